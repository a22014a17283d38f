"""The hand-over dashboard: how often requests use two workers, outcomes, and transfer times."""

from __future__ import annotations

from grafana.panels import Board, Panel, Query, Row, Variable
from grafana.promql import OF_MODEL, ROUTER, WINDOW, mean, quantiles, rate, ratio

DECISIONS = "proxy_handover_decisions_total"
HANDED_OVER = f'{OF_MODEL},why="handed_over"'
WANTED = f'{OF_MODEL},why=~"handed_over|no_prefill_worker|prefill_busy"'
ENDS = "proxy_handovers_total"
LEGS = f'{ROUTER},outcome=~"transferred|given_up|.*_failed|client_left_.*"'
# Independent of the selected routers: each router reports all workers, but only its own transfers.
ARRIVED = 'job=~"$job",outcome="transferred"'
MOVED = "proxy_transfer_bytes_total"
BLOCKS = f'{ROUTER},outcome!~"transferred|prefilled.*|given_up|.*_failed|client_left_.*"'
SIDES = f'{OF_MODEL},role=~"prefill|decode"'
PREFILL, DECODE = f'{OF_MODEL},role="prefill"', f'{OF_MODEL},role="decode"'
USED = 'job=~"$job",model=~"$model"'  # for recording rules over all routers
# vLLM's metrics, which have no router label.
FAILED = "vllm:nixl_num_failed_transfers_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
READ_LATE = "vllm:nixl_num_notifications_after_expiry_total"
OF_ANY_WORKER = 'model_name=~"$model"'

WHETHER = (
    Panel(
        "Hand-over verdicts",
        "`not_worth_it` and `cached` are normal. With `no_prefill_worker` and `prefill_busy`, a "
        "hand-over was wanted but not possible.", "reqps",
        (Query(rate(DECISIONS, OF_MODEL, "why"), "{{why}}"),), stacked=True,
    ),
    Panel(
        "Handed over", "Share of all decisions.", "percentunit",
        (
            Query(
                ratio(rate(DECISIONS, HANDED_OVER, "model"), rate(DECISIONS, OF_MODEL, "model")),
                "{{model}}",
            ),
        ),
        most=1,
    ),
    Panel(
        "Handed over, share of wanted hand-overs",
        "Other requests stayed on one worker for lack of a prefill worker.", "percentunit",
        (
            Query(
                ratio(rate(DECISIONS, HANDED_OVER, "model"), rate(DECISIONS, WANTED, "model")),
                "{{model}}",
            ),
        ),
        most=1, bad_below=0.9,
    ),
    Panel(
        "Hand-overs, by outcome",
        "How far hand-overs got. After a failed leg the request is retried as a whole.",
        "reqps", (Query(rate(ENDS, LEGS, "outcome"), "{{outcome}}"),), stacked=True,
    ),
    Panel(
        "Blocks released or left to expire",
        "KV blocks of prompts that were prefilled and not fetched. Blocks left to expire use the "
        "prefill worker's cache for a while.", "reqps",
        (Query(rate(ENDS, BLOCKS, "outcome"), "{{outcome}}"),),
    ),
    Panel(
        "Failed transfers",
        "Reported by workers with NIXL. With `kv_load_failure_policy: recompute` the decode "
        "worker computes the prompt itself, and the client sees no error.", "reqps",
        (Query(rate(FAILED, OF_ANY_WORKER, "instance"), "{{instance}}"),),
    ),
    Panel(
        "Expired leases",
        "Reported by prefill workers with NIXL: blocks that were not fetched in time, and blocks "
        "that were read after their lease. Clients that leave also count as late reads; if leases "
        "end as well, responses may be based on other prompts.", "reqps",
        (
            Query(rate(EXPIRED, OF_ANY_WORKER, "instance"), "{{instance}} not fetched"),
            Query(rate(READ_LATE, OF_ANY_WORKER, "instance"), "{{instance}} read late"),
        ),
    ),
    Panel(
        "Links excluded",
        "Times that a pair of workers was excluded from hand-overs after consecutive failures.",
        "reqps",
        (
            Query(
                rate("proxy_handover_bars_total", ROUTER, "prefill, decode"),
                "{{prefill}} to {{decode}}",
            ),
        ),
    ),
    Panel(
        "Warm-ups",
        "Connections between prefill and decode workers that the router opened in advance.",
        "reqps", (Query(rate("proxy_handover_warmups_total", ROUTER, "outcome"), "{{outcome}}"),),
    ),
)  # fmt: skip

TAKES = (
    Panel(
        "Prefill leg",
        "From its start to the prefill worker's response, including the worker's queue.",
        "s", quantiles("proxy_prefill_leg_seconds", OF_MODEL, "model"),
    ),
    Panel(
        "Transfer time",
        "From the decode leg's start to its first token, minus one decode step.", "s",
        quantiles("proxy_transfer_seconds", OF_MODEL, "model"),
    ),
    Panel(
        "Transfer time, predicted and observed",
        "Means. The prediction decides whether a hand-over is worth its cost.", "s",
        (
            Query(
                mean("proxy_predicted_transfer_seconds", OF_MODEL, "model"), "{{model}} predicted"
            ),
            Query(mean("proxy_transfer_seconds", OF_MODEL, "model"), "{{model}} real"),
        ),
    ),
    Panel(
        "Time to first token of hand-overs, by phase",
        "Means: the router's queue, the prefill leg, the transfer.", "s",
        (
            Query(
                mean("proxy_queue_wait_seconds", f'{OF_MODEL},pool="decode"', "model"),
                "{{model}} router queue",
            ),
            Query(mean("proxy_prefill_leg_seconds", OF_MODEL, "model"), "{{model}} prefill"),
            Query(mean("proxy_transfer_seconds", OF_MODEL, "model"), "{{model}} transfer"),
        ),
        stacked=True,
    ),
    Panel(
        "Tokens handed over", "Prompt tokens per second (estimate).", "short",
        (Query(rate("proxy_transfer_tokens_total", OF_MODEL, "model"), "{{model}}"),),
    ),
    Panel(
        "Bytes transferred", "As reported by the workers.", "Bps",
        (
            Query(
                f"max by (worker, role) (rate({MOVED}{{{ROUTER}}}{WINDOW}))", "{{role}} {{worker}}"
            ),
        ),
    ),
    Panel(
        "Bytes per hand-over",
        "Mean: bytes that all workers report, divided by the transfers of all routers.", "bytes",
        (
            Query(
                ratio(
                    f'sum by (job) (max by (job, worker, role) (rate({MOVED}{{job=~"$job"}}'
                    f"{WINDOW})))",
                    rate(ENDS, ARRIVED, "job"),
                ),
                "{{job}}",
            ),
        ),
    ),
)  # fmt: skip

SIDES_ROW = (
    Panel(
        "Use of each side",
        "Prefill workers: share of the time in which they prefill. Decode workers: the larger of "
        "KV cache usage and slots in use. If one is high and the other is low, change the role of "
        "a worker.", "percentunit",
        (Query(f'role:proxy_use:ratio5m{{{USED},role=~"prefill|decode"}}', "{{role}} {{model}}"),),
        most=1, bad_above=0.8,
    ),
    Panel(
        "Imbalance", "Use of the prefill side minus use of the decode side.", "percentunit",
        (
            Query(
                f'max by (job, model) (role:proxy_use:ratio5m{{{USED},role="prefill"}}) - '
                f'max by (job, model) (role:proxy_use:ratio5m{{{USED},role="decode"}})',
                "{{job}} {{model}}",
            ),
        ),
        low=-1, most=1,
    ),
    Panel(
        "KV cache in use",
        "As reported by the workers. A prefill worker holds blocks until they are fetched.",
        "percentunit",
        (
            Query(
                f"max by (role, worker) (proxy_worker_kv_usage_ratio{{{SIDES}}})",
                "{{role}} {{worker}}",
            ),
        ),
        most=1, bad_above=0.9,
    ),
    Panel(
        "Slots in use",
        "Share of a decode worker's slots (`--max-num-seqs`) in use, if the fleet file or the "
        "worker's queue tells their number. Without a free slot hand-overs wait in the router. "
        "Prompts that are still being prefilled do not use a slot.",
        "percentunit",
        (Query(f"max by (worker) (proxy_worker_seats_taken_ratio{{{DECODE}}})", "{{worker}}"),),
        most=1, bad_above=0.9,
    ),
    Panel(
        "Prompts held",
        "Prefilled prompts that are not yet fetched; their blocks stay in the prefill worker.",
        "short",
        (Query(f"sum by (worker) (proxy_worker_held_prompts{{{PREFILL}}})", "{{worker}}"),),
    ),
    Panel(
        "Prompt tokens charged to prefill workers", "Not yet computed.", "short",
        (Query(f"sum by (worker) (proxy_worker_prefill_tokens{{{PREFILL}}})", "{{worker}}"),),
    ),
    Panel(
        "Prefill legs, by worker",
        "Completed by each prefill worker. The dashboard *Fleet and routing* counts such requests "
        "for the decode worker.",
        "reqps", (Query(rate("proxy_prefill_legs_total", ROUTER, "worker"), "{{worker}}"),),
        stacked=True,
    ),
    Panel(
        "Requests charged to decode workers",
        "Including requests whose prefill is still in progress.", "short",
        (Query(f"sum by (worker) (proxy_worker_inflight_requests{{{DECODE}}})", "{{worker}}"),),
    ),
    Panel(
        "Workers up", "On each side.", "short",
        (
            Query(
                f"max by (role) (sum by (instance, role) (proxy_worker_up{{{SIDES}}}))", "{{role}}"
            ),
        ),
    ),
)  # fmt: skip

BOARD = Board(
    "vllm-sched-handover",
    "vllm-sched: Prefill/decode hand-over",
    "Requests served by two workers. Empty if the fleet file has no `transfer`.",
    (
        Variable("job", "Job", "proxy_build_info", "job"),
        Variable("instance", "Router", 'proxy_build_info{job=~"$job"}', "instance"),
        Variable("model", "Model", 'proxy_requests_total{job=~"$job"}', "model"),
    ),
    (
        Row("Verdicts and outcomes", WHETHER),
        Row("Times and bytes", TAKES),
        Row("Both sides", SIDES_ROW),
    ),
)
