"""Where requests go and why, how long they wait where, and how the workers share them."""

from __future__ import annotations

from grafana.asking import OF_MODEL, ROUTER, mean, part, quantile, quantiles, rate, ratio, within
from grafana.panels import Board, Panel, Query, Row, Variable

# Engines are other targets than routers: chosen by model alone.
ENGINES = 'model_name=~"$model"'
REQUESTS = "proxy_requests_total"
WORKER = "{{worker}}"
ENGINE = "{{instance}}"
POOL = "{{role}} {{model}}"
# Requests that a worker got: those that are refused wait for nothing, however long others do.
PLACED_ALONE = f'{OF_MODEL},pool!="none"'
CLASSES = (
    "Short and long as the fleet file has it: above `short_limit` is long. `batch` is what tenants "
    "of that class ask, and lines of batches, of any size; `none` was refused before it was read."
)


# As the alert has it: 501 and 505 are of clients that ask what is not there.
FAILED = 'status=~"5..",status!~"501|505"'


def failed() -> str:
    """Ask for the share that failed: nought where none did, nothing where nothing was asked."""
    return part(rate(REQUESTS, f"{OF_MODEL},{FAILED}"), rate(REQUESTS, OF_MODEL))


def spilled() -> str:
    """Ask for the share of decisions that was a spill, by which."""
    spills = rate("proxy_decisions_total", f'{OF_MODEL},reason=~"spill_.*"', "reason")
    return f"{spills} / on () group_left () ({rate('proxy_decisions_total', OF_MODEL)} > 0)"


def left(where: str, by: str = "") -> str:
    """Ask how many leave with nothing after more than the target, a second."""
    soon = rate("proxy_left_seconds_bucket", f'{where},le="$ttft_slo"', by)
    return f"{rate('proxy_left_seconds_count', where, by)} - {soon}"


def first_in_time(by: str = "") -> str:
    """Ask which share of streamed requests had a first token in time; who left has waited too."""
    good = rate("proxy_ttft_seconds_bucket", f'{OF_MODEL},le="$ttft_slo"', by)
    had = rate("proxy_ttft_seconds_count", OF_MODEL, by)
    gone = left(f'{OF_MODEL},stream="true"', by)
    return ratio(good, f"{had} + ({gone} or 0 * {had})")


def phases(which: str = "") -> str:
    """Ask what phases take of the mean request: all of them together take all of its time."""
    where = f"{OF_MODEL},{which}" if which else OF_MODEL
    spent = rate("proxy_phase_seconds_sum", where, "phase")
    requests = rate("proxy_phase_seconds_count", f'{OF_MODEL},phase="queue"')
    return f"{spent} / on () group_left () ({requests} > 0)"


def charged(metric: str, by: str = "worker") -> str:
    """Sum up what all routers charged."""
    return f"sum by ({by}) (proxy_worker_{metric}{{{ROUTER}}})"


def uneven(metric: str) -> str:
    """Compare a pool's fullest worker with its average one."""
    each = f"sum by (model, role, worker) (proxy_worker_{metric}{{{OF_MODEL}}})"
    return ratio(f"max by (model, role) ({each})", f"avg by (model, role) ({each})")


GLANCE = (
    Panel(
        "Requests", "Answered per second, refusals included.", "reqps",
        (Query(rate(REQUESTS, OF_MODEL)),), "stat", 4, 4,
    ),
    Panel(
        "First token in time",
        "Share of streamed requests whose first token came within the target. Who waited longer "
        "and left counts, who left sooner does not.",
        "percentunit", (Query(first_in_time()),), "stat", 4, 4, most=1, bad_below=0.99,
    ),
    Panel(
        "Tokens in time", "Share of gaps between events of streams within the target.",
        "percentunit", (Query(within("proxy_inter_token_latency_seconds", ROUTER, "$itl_slo")),),
        "stat", 4, 4, most=1, bad_below=0.99,
    ),
    Panel(
        "Waiting in the router", "Requests for which no worker has room now.", "short",
        (Query(f"sum(proxy_queue_requests{{{ROUTER}}})"),), "stat", 4, 4, bad_above=1,
    ),
    Panel(
        "Workers up", "Workers whose probes succeed, as the router that sees most of them has it.",
        "short", (Query(f"max(sum by (instance) (proxy_worker_up{{{ROUTER}}}))"),), "stat", 4, 4,
    ),
    Panel(
        "Failed", "Share of requests that ended with a 5xx, after retries.", "percentunit",
        (Query(failed()),), "stat", 4, 4, bad_above=0.01,
    ),
)  # fmt: skip

PLACED = (
    Panel(
        "Decisions, by reason",
        "Why requests went where they went: their own pool, a spill into another one, a cached "
        "prefix, a hand-over. Many spills mean that a pool is too small.",
        "reqps", (Query(rate("proxy_decisions_total", OF_MODEL, "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Requests, by worker", "Answered by each worker.", "reqps",
        (Query(rate(REQUESTS, f'{OF_MODEL},worker!="none"', "worker"), WORKER),), stacked=True,
    ),
    Panel(
        "Refused, by reason", "Answered by the router itself, without a worker.", "reqps",
        (Query(rate(REQUESTS, f'{OF_MODEL},worker="none"', "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Spilled", "Share of decisions that sent a request into a pool that is not its own.",
        "percentunit",
        (
            Query(
                spilled(),
                "{{reason}}",
            ),
        ),
    ),
    Panel(
        "Answers, by status", "What clients got; 499 is a client that left.", "reqps",
        (Query(rate(REQUESTS, OF_MODEL, "status"), "{{status}}"),), stacked=True,
    ),
    Panel(
        "Requests, by route", "Paths of the API.", "reqps",
        (Query(rate(REQUESTS, OF_MODEL, "route"), "{{route}}"),), stacked=True,
    ),
    Panel(
        "Requests, by class", CLASSES, "reqps",
        (Query(rate(REQUESTS, OF_MODEL, "class"), "{{class}}"),), stacked=True, width=12,
    ),
    Panel(
        "Failed, by class", "Share of a class's requests that ended with a 5xx.", "percentunit",
        (
            Query(
                part(
                    rate(REQUESTS, f"{OF_MODEL},{FAILED}", "class"),
                    rate(REQUESTS, OF_MODEL, "class"),
                ),
                "{{class}}",
            ),
        ),
        width=12,
    ),
)  # fmt: skip

FIRST = (
    Panel(
        "Time to first token, by pool",
        "From a request's arrival at the router, its wait there included.", "s",
        quantiles("proxy_ttft_seconds", OF_MODEL, "pool"),
    ),
    Panel(
        "Time to first token, by class", CLASSES, "s",
        quantiles("proxy_ttft_seconds", OF_MODEL, "class"),
    ),
    Panel(
        "First token in time, by class",
        "Share of streamed requests within the target, with those who waited longer and left.",
        "percentunit", (Query(first_in_time("class"), "{{class}}"),), most=1, bad_below=0.99,
    ),
    Panel(
        "Where the time to the first token goes",
        "Of streams: what each phase takes of the mean, one on the other. `queue` is the router's; "
        "`prefill` and `prefill_leg` (of a hand-over) have the engine's queue in them, `transfer` "
        "the decode worker's; `retry` is what went on workers that failed, or counted tokens.",
        "s",
        (Query(phases('phase!="decode"'), "{{phase}}"),), stacked=True,
    ),
    Panel(
        "Predicted against real",
        "Mean time to first token as predicted when requests were placed, and as it was. The "
        "router compares workers by these predictions.", "s",
        (
            Query(
                mean("proxy_predicted_ttft_seconds", OF_MODEL, "pool, model"),
                "{{pool}} {{model}} predicted",
            ),
            Query(mean("proxy_ttft_seconds", OF_MODEL, "pool, model"), "{{pool}} {{model}} real"),
        ),
    ),
    Panel(
        "Real over predicted", "1 is right, 2 is twice as long as was thought; five minutes.",
        "short",
        (
            Query(
                'pool:proxy_ttft_real_to_predicted:ratio_rate5m{job=~"$job",model=~"$model"}',
                "{{pool}} {{model}}",
            ),
        ),
        bad_above=2,
    ),
    Panel(
        "Left with nothing, by worker",
        "Clients that waited longer than the target and left before there was any of their answer, "
        "by the worker they waited for; `none` while they waited in the router.", "reqps",
        (Query(left(OF_MODEL, "worker"), WORKER),), stacked=True,
    ),
    Panel(
        "Answers that are not streamed, by pool",
        "From a request's arrival to the end of its answer: nobody sees a first token of these.",
        "s", quantiles("proxy_whole_answer_seconds", OF_MODEL, "pool"),
    ),
    Panel(
        "In the engines, each by itself",
        "Means of what engines tell, of all they serve. A hand-over is a request on both workers, "
        "and what a decode worker calls its queue is mostly the transfer: not to be added up.", "s",
        (
            Query(mean("vllm:request_queue_time_seconds", ENGINES, "instance"), f"{ENGINE} queue"),
            Query(
                mean("vllm:request_prefill_time_seconds", ENGINES, "instance"), f"{ENGINE} prefill"
            ),
        ),
    ),
)  # fmt: skip

TOKENS = (
    Panel(
        "Gaps between tokens, by pool",
        "Between two events of a stream, as they came.",
        "s",
        quantiles("proxy_inter_token_latency_seconds", ROUTER, "pool"),
    ),
    Panel(
        "Time per output token, by class",
        "Each request's mean, as far as it streamed.",
        "s",
        quantiles("proxy_time_per_output_token_seconds", OF_MODEL, "class"),
    ),
    Panel(
        "Whole requests, by pool",
        "From arrival to the last byte.",
        "s",
        quantiles("proxy_request_duration_seconds", ROUTER, "pool"),
    ),
    Panel(
        "Gaps between tokens, by class",
        "Whose streams stutter.",
        "s",
        quantiles("proxy_inter_token_latency_seconds", ROUTER, "class"),
    ),
    Panel(
        "Where a request's time goes",
        "Of streams, as above, and `decode`: from the first token to the end of the answer.",
        "s",
        (Query(phases(), "{{phase}}"),),
        stacked=True,
    ),
    Panel(
        "Whole requests, by class",
        "From arrival to the last byte; `none` were refused before they were read.",
        "s",
        quantiles("proxy_request_duration_seconds", ROUTER, "class"),
    ),
)

QUEUE = (
    Panel(
        "The router's queue", "Requests that wait, and how many may.", "short",
        (
            Query(f"proxy_queue_requests{{{ROUTER}}}", "{{instance}}"),
            Query(f"proxy_queue_limit_requests{{{ROUTER}}}", "{{instance}} limit"),
        ),
    ),
    Panel(
        "Wait in the router's queue",
        "Of all requests, those that never waited included; `none` got no worker: they left, "
        "waited too long, or were refused at once.", "s",
        quantiles("proxy_queue_wait_seconds", OF_MODEL, "pool", 0.95, 0.99),
    ),
    Panel(
        "Bodies in the queue", "Bytes that wait.", "bytes",
        (Query(f"proxy_queue_bytes{{{ROUTER}}}", "{{instance}}"),),
    ),
    Panel(
        "Wait in the router's queue, by class", "Of requests that a worker got.", "s",
        quantiles("proxy_queue_wait_seconds", PLACED_ALONE, "class", 0.95, 0.99), width=24,
    ),
)  # fmt: skip

WORKERS = (
    Panel(
        "Requests charged to workers", "In flight through these routers.", "short",
        (Query(charged("inflight_requests"), WORKER),),
    ),
    Panel(
        "Prompt tokens charged", "That workers have yet to prefill.", "short",
        (Query(charged("prefill_tokens"), WORKER),),
    ),
    Panel(
        "Output tokens charged", "That workers have yet to write.", "short",
        (Query(charged("decode_tokens"), WORKER),),
    ),
    Panel(
        "Cache charged", "Tokens that requests in flight may hold, over what the cache holds.",
        "percentunit",
        (
            Query(
                ratio(
                    charged("kv_tokens"),
                    f"max by (worker) (proxy_worker_kv_capacity_tokens{{{ROUTER}}})",
                ),
                WORKER,
            ),
        ),
    ),
    Panel(
        "Uneven within a pool",
        "The worker with the most prompt tokens charged over the average of its pool; 1 is even.",
        "short", (Query(uneven("prefill_tokens"), POOL),),
    ),
    Panel(
        "How much each pool is in use",
        "Share of time that workers prefill; of decode pools, how full their caches are, or how "
        "many of their seats are taken where that is more.",
        "percentunit", (Query('role:proxy_use:ratio5m{job=~"$job",model=~"$model"}', POOL),),
        most=1, bad_above=0.8,
    ),
    Panel(
        "Workers up, by role", "As the router that sees most of them has it.", "short",
        (
            Query(
                "max by (role, model) "
                f"(sum by (instance, role, model) (proxy_worker_up{{{OF_MODEL}}}))",
                POOL,
            ),
        ),
        width=12,
    ),
    Panel(
        "Kept out",
        "Workers that are busy, as they say, or fail: their breaker is open, or half open, when a "
        "request is let through on trial; and those that are being drained.", "short",
        (
            Query(
                f"max by (worker, state) (proxy_worker_breaker_state{{{ROUTER}}})",
                "{{worker}} {{state}}",
            ),
            Query(
                f"max by (worker) (proxy_worker_draining{{{ROUTER}}}) > 0", "{{worker}} draining"
            ),
        ),
        width=12,
    ),
    Panel(
        "Breakers ignored",
        "Models of which too few workers are well (routing.panic_threshold): requests go to "
        "workers with an open breaker too.", "short",
        (Query(f"max by (model, pool) (proxy_pool_panic{{{OF_MODEL}}})", "{{model}} {{pool}}"),),
        width=12, bad_above=1,
    ),
    Panel(
        "Breakers open, by why",
        "How often: because of failures, or because a worker said that it was busy. Trials that "
        "failed are not counted. And how often a model's breakers began to be ignored.", "ops",
        (
            Query(
                rate("proxy_breaker_openings_total", ROUTER, "worker, why"), "{{worker}} {{why}}"
            ),
            Query(
                rate("proxy_pool_panics_total", OF_MODEL, "model, pool"),
                "{{model}} {{pool}} ignored",
            ),
        ),
        width=12,
    ),
    Panel(
        "Retries, by why", "Requests that failed on a worker before its first byte.", "reqps",
        (Query(rate("proxy_retries_total", ROUTER, "worker, why"), "{{worker}} {{why}}"),),
        width=12,
    ),
)  # fmt: skip

TENANTS = (
    Panel(
        "Tokens, by tenant", "Of prompts and answers, per second, as workers count them.", "short",
        (
            Query(
                rate("proxy_tenant_tokens_total", ROUTER, "tenant, kind"), "{{tenant}} {{kind}}"
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Requests, by tenant", "Answered per second, by what they came to.", "reqps",
        (
            Query(
                rate("proxy_tenant_requests_total", ROUTER, "tenant, status"),
                "{{tenant}} {{status}}",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "In flight, by tenant", "And of these, how many wait.", "short",
        (
            Query(f"sum by (tenant) (proxy_tenant_inflight_requests{{{ROUTER}}})", "{{tenant}}"),
            Query(
                f"sum by (tenant) (proxy_tenant_queue_requests{{{ROUTER}}})", "{{tenant}} waiting"
            ),
        ),
    ),
    Panel(
        "Limited, by tenant", "Requests that met a limit, and which.", "reqps",
        (
            Query(
                rate("proxy_tenant_limited_total", ROUTER, "tenant, limit"), "{{tenant}} {{limit}}"
            ),
        ),
    ),
    Panel(
        "First token, by class", "From a request's arrival; interactive goes before the rest.", "s",
        quantiles("proxy_tenant_ttft_seconds", ROUTER, "class", 0.5, 0.95),
    ),
    Panel(
        "Wait in the queue, by tenant", "Those with more than their share wait longest.", "s",
        quantiles("proxy_tenant_queue_wait_seconds", ROUTER, "tenant", 0.95),
    ),
)  # fmt: skip

BATCHES = (
    Panel(
        "Batch lines", "By what became of them; `sent_again` counts tries.", "reqps",
        (Query(rate("proxy_batch_lines_total", ROUTER, "outcome"), "{{outcome}}"),), stacked=True,
    ),
    Panel(
        "Batch lines in flight", "Of all batches; they run in the gaps that others leave.", "short",
        (Query(f"sum(proxy_batch_lines_in_flight{{{ROUTER}}})", "in flight"),),
    ),
    Panel(
        "Batches that are not over", "By state, and whether they have paused for want of a disk.",
        "short",
        (
            Query(f"sum by (status) (proxy_batches{{{ROUTER}}})", "{{status}}"),
            Query(f"max(proxy_batches_paused{{{ROUTER}}})", "paused"),
        ),
    ),
)  # fmt: skip

SELF = (
    Panel(
        "Processor", "Of one for each process of a router.", "percentunit",
        (
            Query(
                ratio(
                    rate("process_cpu_seconds_total", ROUTER, "instance"),
                    f"sum by (instance) (proxy_processes{{{ROUTER}}})",
                ),
                "{{instance}}",
            ),
        ),
        most=1, bad_above=0.85,
    ),
    Panel(
        "Loop lag", "How late the event loop is; every stream is late by as much.", "s",
        (
            Query(quantile(0.5, "proxy_loop_lag_seconds", ROUTER, "instance"), "{{instance}} p50"),
            Query(quantile(0.99, "proxy_loop_lag_seconds", ROUTER, "instance"), "{{instance}} p99"),
        ),
        bad_above=0.1,
    ),
    Panel(
        "Processes", "That serve, and those that died, in a quarter of an hour.", "short",
        (
            Query(f"proxy_processes{{{ROUTER}}}", "{{instance}}"),
            Query(
                f"sum by (instance) (increase(proxy_process_restarts_total{{{ROUTER}}}[15m]))",
                "{{instance}} died",
            ),
        ),
    ),
    Panel(
        "Memory", "Resident.", "bytes",
        (Query(f"process_resident_memory_bytes{{{ROUTER}}}", "{{instance}}"),),
    ),
    Panel(
        "Connections", "Of clients, and to workers.", "short",
        (
            Query(f"sum(proxy_client_connections{{{ROUTER}}})", "clients"),
            Query(f"sum by (state) (proxy_upstream_connections{{{ROUTER}}})", "workers, {{state}}"),
        ),
    ),
    Panel(
        "Files open", "Of those that a router may open; a stream takes two.", "percentunit",
        (
            Query(
                ratio(
                    f"sum by (instance) (process_open_fds{{{ROUTER}}})",
                    f"sum by (instance) (process_max_fds{{{ROUTER}}})",
                ),
                "{{instance}}",
            ),
        ),
        most=1, bad_above=0.8,
    ),
    Panel(
        "Connections without room", "To workers, for which the machine had no files or ports.",
        "reqps",
        (
            Query(
                rate("proxy_connects_without_room_total", ROUTER, "instance"), "{{instance}}"
            ),
        ),
        bad_above=0.1,
    ),
    Panel(
        "Log lines dropped", "Because whoever reads the log is too slow, or its disk full.", "cps",
        (Query(rate("proxy_log_lines_dropped_total", ROUTER, "instance"), "{{instance}}"),),
        bad_above=0.1,
    ),
    Panel(
        "Bytes per token", "Learnt from `usage` and counts; sizes are estimated by it.", "short",
        (
            Query(
                f"avg by (model, route) (proxy_bytes_per_token{{{OF_MODEL}}})",
                "{{model}} {{route}}",
            ),
        ),
    ),
    Panel(
        "Workers found by discovery", "In each pool, and pools of which nothing is told.", "short",
        (
            Query(f"max by (name) (proxy_discovery_workers{{{ROUTER}}})", "{{name}}"),
            Query(f"min by (name) (proxy_discovery_up{{{ROUTER}}}) == 0", "{{name}} not told"),
        ),
    ),
)  # fmt: skip

BOARD = Board(
    "vllm-sched-fleet",
    "vllm-sched: Fleet and routing",
    "What the router decides and what clients get. For single engines see vLLM's own boards.",
    (
        Variable("job", "Job", "proxy_build_info", "job"),
        Variable("instance", "Router", 'proxy_build_info{job=~"$job"}', "instance"),
        Variable("model", "Model", 'proxy_requests_total{job=~"$job"}', "model"),
        Variable(
            "ttft_slo", "First token within (s)",
            values=("0.5", "1.0", "2.5", "3.0", "5.0", "10.0"), default="3.0",
        ),
        Variable(
            "itl_slo", "Gaps within (s)",
            values=("0.05", "0.1", "0.15", "0.2", "0.3", "0.5"), default="0.2",
        ),
    ),
    (
        Row("At a glance", GLANCE),
        Row("Where requests go, and why", PLACED),
        Row("Time to the first token", FIRST),
        Row("After the first token", TOKENS),
        Row("The router's queue", QUEUE),
        Row("Tenants", TENANTS),
        Row("Batches", BATCHES),
        Row("Workers", WORKERS),
        Row("The router itself", SELF),
    ),
)  # fmt: skip
