"""The fleet dashboard: where requests go and why, where they wait, and how workers share them."""

from __future__ import annotations

from grafana.panels import Board, Panel, Query, Row, Variable
from grafana.promql import (
    OF_MODEL,
    ROUTER,
    WINDOW,
    mean,
    part,
    quantile,
    quantiles,
    rate,
    ratio,
    within,
)

# Engines are separate targets, so they are selected by model only.
ENGINES = 'model_name=~"$model"'
REQUESTS = "proxy_requests_total"
WORKER = "{{worker}}"
ENGINE = "{{instance}}"
POOL = "{{role}} {{model}}"
# Requests that a worker got; refused requests do not wait.
PLACED_ALONE = f'{OF_MODEL},pool!="none"'
CLASSES = (
    "Requests above `short_limit` in the fleet file are long. `batch` are requests of batch "
    "tenants and batch lines of any size; `none` are requests that were refused before parsing."
)


# As in the alert: not the errors of clients, of routers that end, and of models not listed yet.
FAILED = 'status=~"5..",status!~"501|505",reason!~"draining|bad_request|not_known_yet"'


def failed() -> str:
    """Return the share of failed requests: 0 without failures, no value without requests."""
    return part(rate(REQUESTS, f"{OF_MODEL},{FAILED}"), rate(REQUESTS, OF_MODEL))


def spilled() -> str:
    """Return the share of decisions that spilled, by reason."""
    spills = rate("proxy_decisions_total", f'{OF_MODEL},reason=~"spill_.*"', "reason")
    return f"{spills} / on () group_left () ({rate('proxy_decisions_total', OF_MODEL)} > 0)"


def left(where: str, by: str = "") -> str:
    """Return the rate of clients that left without a token after more than the target."""
    soon = rate("proxy_left_seconds_bucket", f'{where},le="$ttft_slo"', by)
    return f"{rate('proxy_left_seconds_count', where, by)} - {soon}"


def first_in_time(by: str = "") -> str:
    """Return the share of streamed requests with a first token in time.

    Clients that left after more than the target count as late.
    """
    good = rate("proxy_ttft_seconds_bucket", f'{OF_MODEL},le="$ttft_slo"', by)
    had = rate("proxy_ttft_seconds_count", OF_MODEL, by)
    gone = left(f'{OF_MODEL},stream="true"', by)
    return ratio(good, f"{had} + ({gone} or 0 * {had})")


def phases(which: str = "") -> str:
    """Return the mean time of each phase; the phases sum up to the whole request."""
    where = f"{OF_MODEL},{which}" if which else OF_MODEL
    spent = rate("proxy_phase_seconds_sum", where, "phase")
    requests = rate("proxy_phase_seconds_count", f'{OF_MODEL},phase="queue"')
    return f"{spent} / on () group_left () ({requests} > 0)"


def charged(metric: str, by: str = "worker") -> str:
    return f"sum by ({by}) (proxy_worker_{metric}{{{OF_MODEL}}})"


def uneven(metric: str) -> str:
    """Return the ratio of a pool's fullest worker to its average worker."""
    each = f"sum by (model, role, worker) (proxy_worker_{metric}{{{OF_MODEL}}})"
    return ratio(f"max by (model, role) ({each})", f"avg by (model, role) ({each})")


GLANCE = (
    Panel(
        "Requests", "Finished requests per second, including refusals.", "reqps",
        (Query(rate(REQUESTS, OF_MODEL)),), "stat", 4, 4,
    ),
    Panel(
        "First token in time",
        "Share of streamed requests whose first token came within the target. Clients that left "
        "after the target count as late; clients that left sooner do not count.",
        "percentunit", (Query(first_in_time()),), "stat", 4, 4, most=1, bad_below=0.99,
    ),
    Panel(
        "Tokens in time", "Share of gaps between stream events within the target.",
        "percentunit", (Query(within("proxy_inter_token_latency_seconds", ROUTER, "$itl_slo")),),
        "stat", 4, 4, most=1, bad_below=0.99,
    ),
    Panel(
        "Queued in the router", "Requests that wait for a slot of a worker.", "short",
        (Query(f"sum(proxy_queue_requests{{{ROUTER}}})"),), "stat", 4, 4, bad_above=1,
    ),
    Panel(
        "Workers up", "Workers whose probes succeed; the maximum over all routers.",
        "short", (Query(f"max(sum by (instance) (proxy_worker_up{{{OF_MODEL}}}))"),), "stat", 4, 4,
    ),
    Panel(
        "Failed",
        "Share of requests that ended with a 5xx, after retries, as the alert RequestsFail counts.",
        "percentunit",
        (Query(failed()),), "stat", 4, 4, bad_above=0.01,
    ),
)  # fmt: skip

PLACED = (
    Panel(
        "Decisions, by reason",
        "Why requests went where they did: own pool, spill into another pool, cached prefix, "
        "hand-over. Many spills mean that a pool is too small.",
        "reqps", (Query(rate("proxy_decisions_total", OF_MODEL, "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Turns of sessions",
        "Turns that stayed on the worker of the turn before, moved to one that costs less, or were "
        "displaced because that worker could not take them. Many of these: too few workers.",
        "reqps", (Query(rate("proxy_session_turns_total", OF_MODEL, "turn"), "{{turn}}"),),
        stacked=True,
    ),
    Panel(
        "Sessions", "Sessions with a turn in the last hour.", "short",
        (Query(f"max(proxy_sessions{{{ROUTER}}})", "sessions"),),
    ),
    Panel(
        "Requests, by worker", "Requests answered by each worker.", "reqps",
        (Query(rate(REQUESTS, f'{OF_MODEL},worker!="none"', "worker"), WORKER),), stacked=True,
    ),
    Panel(
        "Refused, by reason", "Requests that the router answered without a worker.", "reqps",
        (Query(rate(REQUESTS, f'{OF_MODEL},worker="none"', "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Spilled", "Share of decisions that sent a request into another pool.",
        "percentunit",
        (
            Query(
                spilled(),
                "{{reason}}",
            ),
        ),
    ),
    Panel(
        "Responses, by status", "Status sent to clients; 499 is a client that left.", "reqps",
        (Query(rate(REQUESTS, OF_MODEL, "status"), "{{status}}"),), stacked=True,
    ),
    Panel(
        "Requests, by route", "API paths.", "reqps",
        (Query(rate(REQUESTS, OF_MODEL, "route"), "{{route}}"),), stacked=True,
    ),
    Panel(
        "Requests, by class", CLASSES, "reqps",
        (Query(rate(REQUESTS, OF_MODEL, "class"), "{{class}}"),), stacked=True, width=12,
    ),
    Panel(
        "Failed, by class",
        "Share of a class's requests that ended with a 5xx, as the alert RequestsFail counts.",
        "percentunit",
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
        "From a request's arrival at the router, including the router's queue.", "s",
        quantiles("proxy_ttft_seconds", OF_MODEL, "pool"),
    ),
    Panel(
        "Time to first token, by class", CLASSES, "s",
        quantiles("proxy_ttft_seconds", OF_MODEL, "class"),
    ),
    Panel(
        "First token in time, by class",
        "Share of streamed requests within the target; clients that left after the target count "
        "as late.",
        "percentunit", (Query(first_in_time("class"), "{{class}}"),), most=1, bad_below=0.99,
    ),
    Panel(
        "Time to first token, by phase",
        "Mean time of each phase of streamed requests, stacked. `queue` is the router's queue. "
        "`prefill` and `prefill_leg` (of a hand-over) include the engine's queue; `transfer` "
        "includes the decode worker's. `retry` is time spent on failed workers or on counting "
        "tokens.",
        "s",
        (Query(phases('phase!="decode"'), "{{phase}}"),), stacked=True,
    ),
    Panel(
        "Time to first token, predicted and observed",
        "Mean time to first token, predicted at placement and observed. The router compares "
        "workers by these predictions.", "s",
        (
            Query(
                mean("proxy_predicted_ttft_seconds", OF_MODEL, "pool, model"),
                "{{pool}} {{model}} predicted",
            ),
            Query(mean("proxy_ttft_seconds", OF_MODEL, "pool, model"), "{{pool}} {{model}} real"),
        ),
    ),
    Panel(
        "Time to first token, observed over predicted",
        "1 is a correct prediction, 2 means twice as long as predicted; over five minutes.",
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
        "Clients that left before a response, by worker",
        "Clients that waited longer than the target and left before their response began, by the "
        "worker that they waited for; `none` means the router's queue.", "reqps",
        (Query(left(OF_MODEL, "worker"), WORKER),), stacked=True,
    ),
    Panel(
        "Responses that are not streamed, by pool",
        "Time from arrival to the end of the response; the first token of these responses is not "
        "observable.",
        "s", quantiles("proxy_whole_answer_seconds", OF_MODEL, "pool"),
    ),
    Panel(
        "Engine queue and prefill times",
        "Means that engines report for all their requests. A hand-over counts on both workers, "
        "and a decode worker's queue time is mostly the transfer, so do not sum the values.", "s",
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
        "Time between two events of a stream, as received.",
        "s",
        quantiles("proxy_inter_token_latency_seconds", ROUTER, "pool"),
    ),
    Panel(
        "Time per output token, by class",
        "Mean of each streamed request.",
        "s",
        quantiles("proxy_time_per_output_token_seconds", OF_MODEL, "class"),
    ),
    Panel(
        "Request duration, by pool",
        "From arrival to the last byte.",
        "s",
        quantiles("proxy_request_duration_seconds", ROUTER, "pool"),
    ),
    Panel(
        "Gaps between tokens, by class",
        "Shows which classes have stalling streams.",
        "s",
        quantiles("proxy_inter_token_latency_seconds", ROUTER, "class"),
    ),
    Panel(
        "Request time, by phase",
        "Phases of streamed requests as above, and `decode`: from the first token to the end of "
        "the response.",
        "s",
        (Query(phases(), "{{phase}}"),),
        stacked=True,
    ),
    Panel(
        "Request duration, by class",
        "From arrival to the last byte; `none` are requests that were refused before they were "
        "parsed.",
        "s",
        quantiles("proxy_request_duration_seconds", ROUTER, "class"),
    ),
)

QUEUE = (
    Panel(
        "The router's queue", "Queued requests, and the limit.", "short",
        (
            Query(f"proxy_queue_requests{{{ROUTER}}}", "{{instance}}"),
            Query(f"proxy_queue_limit_requests{{{ROUTER}}}", "{{instance}} limit"),
        ),
    ),
    Panel(
        "Wait in the router's queue",
        "All requests, including requests that did not wait. `none` are requests without a "
        "worker: the client left, they waited too long, or they were refused at once.", "s",
        quantiles("proxy_queue_wait_seconds", OF_MODEL, "pool", 0.95, 0.99),
    ),
    Panel(
        "Bodies in the queue", "Bytes of queued request bodies.", "bytes",
        (Query(f"proxy_queue_bytes{{{ROUTER}}}", "{{instance}}"),),
    ),
    Panel(
        "Wait in the router's queue, by class", "Requests that a worker got.", "s",
        quantiles("proxy_queue_wait_seconds", PLACED_ALONE, "class", 0.95, 0.99), width=24,
    ),
)  # fmt: skip

WORKERS = (
    Panel(
        "Requests charged to workers", "In flight through these routers.", "short",
        (Query(charged("inflight_requests"), WORKER),),
    ),
    Panel(
        "Prompt tokens charged", "Not yet prefilled.", "short",
        (Query(charged("prefill_tokens"), WORKER),),
    ),
    Panel(
        "Output tokens charged", "Not yet generated.", "short",
        (Query(charged("decode_tokens"), WORKER),),
    ),
    Panel(
        "KV cache charged",
        "Tokens that requests in flight may use, as a share of the cache's capacity.",
        "percentunit",
        (
            Query(
                ratio(
                    charged("kv_tokens"),
                    f"max by (worker) (proxy_worker_kv_capacity_tokens{{{OF_MODEL}}})",
                ),
                WORKER,
            ),
        ),
    ),
    Panel(
        "Imbalance within a pool",
        "Prompt tokens charged to the fullest worker over the pool's average; 1 is balanced.",
        "short", (Query(uneven("prefill_tokens"), POOL),),
    ),
    Panel(
        "Use of each pool",
        "Share of the time in which workers prefill. For decode pools, the larger of KV cache "
        "usage and slots in use.",
        "percentunit", (Query('role:proxy_use:ratio5m{job=~"$job",model=~"$model"}', POOL),),
        most=1, bad_above=0.8,
    ),
    Panel(
        "Workers up, by role", "Maximum over all routers.", "short",
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
        "Workers without new requests",
        "Workers with an open breaker because they are busy or fail, or a half-open breaker (one "
        "trial request passes); and workers that are drained.", "short",
        (
            Query(
                f"max by (worker, state) (proxy_worker_breaker_state{{{OF_MODEL}}})",
                "{{worker}} {{state}}",
            ),
            Query(
                f"max by (worker) (proxy_worker_draining{{{OF_MODEL}}}) > 0", "{{worker}} draining"
            ),
        ),
        width=12,
    ),
    Panel(
        "Breakers ignored",
        "Models with too few healthy workers (routing.panic_threshold): requests also go to "
        "workers with an open breaker.", "short",
        (Query(f"max by (model, pool) (proxy_pool_panic{{{OF_MODEL}}})", "{{model}} {{pool}}"),),
        width=12, bad_above=1,
    ),
    Panel(
        "Breaker openings, by reason",
        "Rate of openings because of failures or reported overload; failed trials do not count. "
        "Also how often the router began to ignore a model's breakers.", "ops",
        (
            Query(
                f"max by (worker, why) (rate(proxy_breaker_openings_total{{{OF_MODEL}}}{WINDOW}))",
                "{{worker}} {{why}}",
            ),
            Query(
                f"max by (model, pool) (rate(proxy_pool_panics_total{{{OF_MODEL}}}{WINDOW}))",
                "{{model}} {{pool}} ignored",
            ),
        ),
        width=12,
    ),
    Panel(
        "Retries, by reason", "Requests that failed on a worker before its first byte.", "reqps",
        (Query(rate("proxy_retries_total", ROUTER, "worker, why"), "{{worker}} {{why}}"),),
        width=12,
    ),
)  # fmt: skip

TENANTS = (
    Panel(
        "Tokens, by tenant",
        "Tokens of prompts and responses per second, as counted by workers.", "short",
        (
            Query(
                rate("proxy_tenant_tokens_total", ROUTER, "tenant, kind"), "{{tenant}} {{kind}}"
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Requests, by tenant", "Finished requests per second, by status.", "reqps",
        (
            Query(
                rate("proxy_tenant_requests_total", ROUTER, "tenant, status"),
                "{{tenant}} {{status}}",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "In flight, by tenant",
        "Including queued requests, which are also shown separately.", "short",
        (
            Query(f"sum by (tenant) (proxy_tenant_inflight_requests{{{ROUTER}}})", "{{tenant}}"),
            Query(
                f"sum by (tenant) (proxy_tenant_queue_requests{{{ROUTER}}})", "{{tenant}} waiting"
            ),
        ),
    ),
    Panel(
        "Limited, by tenant", "Requests that reached a limit, by limit.", "reqps",
        (
            Query(
                rate("proxy_tenant_limited_total", ROUTER, "tenant, limit"), "{{tenant}} {{limit}}"
            ),
        ),
    ),
    Panel(
        "First token, by class", "From a request's arrival; the interactive class goes first.", "s",
        quantiles("proxy_tenant_ttft_seconds", ROUTER, "class", 0.5, 0.95),
    ),
    Panel(
        "Wait in the queue, by tenant", "Tenants above their share wait longest.", "s",
        quantiles("proxy_tenant_queue_wait_seconds", ROUTER, "tenant", 0.95),
    ),
    Panel(
        "Targets, by class", "Targets and clients' deadlines that were met, missed or refused.",
        "reqps",
        (
            Query(
                rate("proxy_targets_total", ROUTER, "class, target, result"),
                "{{class}} {{target}} {{result}}",
            ),
        ),
        stacked=True,
    ),
)  # fmt: skip

BATCHES = (
    Panel(
        "Batch lines", "By outcome; `sent_again` counts repeated attempts.", "reqps",
        (Query(rate("proxy_batch_lines_total", ROUTER, "outcome"), "{{outcome}}"),), stacked=True,
    ),
    Panel(
        "Batch lines in flight", "Lines of all batches; they only use spare capacity.", "short",
        (Query(f"sum(proxy_batch_lines_in_flight{{{ROUTER}}})", "in flight"),),
    ),
    Panel(
        "Active batches",
        "By status, and whether batches are paused because results cannot be stored.",
        "short",
        (
            Query(f"sum by (status) (proxy_batches{{{ROUTER}}})", "{{status}}"),
            Query(f"max(proxy_batches_paused{{{ROUTER}}})", "paused"),
        ),
    ),
)  # fmt: skip

SELF = (
    Panel(
        "CPU", "CPU time used; 100 % is one core per router process.", "percentunit",
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
        "Loop lag", "Lag of the event loop, which delays every stream by the same time.", "s",
        (
            Query(quantile(0.5, "proxy_loop_lag_seconds", ROUTER, "instance"), "{{instance}} p50"),
            Query(quantile(0.99, "proxy_loop_lag_seconds", ROUTER, "instance"), "{{instance}} p99"),
        ),
        bad_above=0.1,
    ),
    Panel(
        "Processes", "Serving processes, and restarts within 15 minutes.", "short",
        (
            Query(f"proxy_processes{{{ROUTER}}}", "{{instance}}"),
            Query(
                f"sum by (instance) (increase(proxy_process_restarts_total{{{ROUTER}}}[15m]))",
                "{{instance}} died",
            ),
        ),
    ),
    Panel(
        "Memory", "Resident memory.", "bytes",
        (Query(f"process_resident_memory_bytes{{{ROUTER}}}", "{{instance}}"),),
    ),
    Panel(
        "Connections", "Client connections and worker connections.", "short",
        (
            Query(f"sum(proxy_client_connections{{{ROUTER}}})", "clients"),
            Query(f"sum by (state) (proxy_upstream_connections{{{ROUTER}}})", "workers, {{state}}"),
        ),
    ),
    Panel(
        "Open files",
        "Share of the files that a router may open; a stream takes two.", "percentunit",
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
        "Connections without local resources",
        "Connections to workers that failed because the machine had no free files or ports.",
        "reqps",
        (
            Query(
                rate("proxy_connects_without_room_total", ROUTER, "instance"), "{{instance}}"
            ),
        ),
        bad_above=0.1,
    ),
    Panel(
        "Log lines dropped",
        "Dropped because the log's reader is too slow or its disk is full.", "cps",
        (Query(rate("proxy_log_lines_dropped_total", ROUTER, "instance"), "{{instance}}"),),
        bad_above=0.1,
    ),
    Panel(
        "Bytes per token",
        "Learned from `usage` and token counts; used to estimate prompt sizes.", "short",
        (
            Query(
                f"avg by (model, route) (proxy_bytes_per_token{{{OF_MODEL}}})",
                "{{model}} {{route}}",
            ),
        ),
    ),
    Panel(
        "Discovered workers",
        "Workers in each pool, and pools that discovery has no data for.", "short",
        (
            Query(f"max by (name) (proxy_discovery_workers{{{ROUTER}}})", "{{name}}"),
            Query(f"1 - min by (name) (proxy_discovery_up{{{ROUTER}}}) > 0", "{{name}} no data"),
        ),
    ),
    Panel(
        "Replicas",
        "Routers that each router hears from, with itself; 1 for routers that do not reach the "
        "server of `router.shared` (`alone`), and for those that decide tenants' limits alone.",
        "short",
        (
            Query(f"min by (instance) (proxy_replicas{{{ROUTER}}})", "{{instance}}"),
            Query(f"1 - min by (instance) (proxy_shared_up{{{ROUTER}}})", "{{instance}} alone"),
            Query(
                f"1 - min by (instance) (proxy_shared_limits_up{{{ROUTER}}})",
                "{{instance}} limits alone",
            ),
        ),
    ),
    Panel(
        "Shared state",
        "Age of the last message of the replica that was silent for the longest time, in seconds, "
        "and errors of the connection to the server per second.", "short",
        (
            Query(f"max by (instance) (proxy_shared_age_seconds{{{ROUTER}}})", "{{instance}} age"),
            Query(rate("proxy_shared_errors_total", ROUTER, "instance"), "{{instance}} errors"),
        ),
    ),
    Panel(
        "Journals",
        "Requests in the journal of each worker, and journals that a router can't read.", "short",
        (
            Query(
                f"max by (worker) (proxy_journal_requests{{{ROUTER}}})", "{{worker}}"
            ),
            Query(
                f"1 - min by (worker) (proxy_journal_up{{{ROUTER}}}) > 0",
                "{{worker}} not read",
            ),
        ),
    ),
    Panel(
        "Journal errors",
        "Gaps, each closed by a snapshot, and messages with a wrong signature.", "cps",
        (
            Query(rate("proxy_journal_gaps_total", ROUTER, "worker"), "{{worker}} gaps"),
            Query(
                rate("proxy_journal_bad_signatures_total", ROUTER, "worker"),
                "{{worker}} signatures",
            ),
        ),
    ),
    Panel(
        "Streams of failed workers",
        "Streams that went on from another worker, and those that ended with an error, by reason.",
        "cps",
        (
            Query(rate("proxy_continued_streams_total", ROUTER, "worker"), "{{worker}} continued"),
            Query(rate("proxy_streams_not_continued_total", ROUTER, "why"), "not: {{why}}"),
        ),
    ),
)  # fmt: skip

BOARD = Board(
    "vllm-sched-fleet",
    "vllm-sched: Fleet and routing",
    "The router's decisions and what clients get. For single engines see vLLM's own dashboards.",
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
