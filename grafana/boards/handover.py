"""Prefill on one worker, decode on another: how often, how it ends, what the transfer costs."""

from __future__ import annotations

from grafana.asking import OF_MODEL, ROUTER, WINDOW, mean, quantiles, rate, ratio
from grafana.panels import Board, Panel, Query, Row, Variable

DECISIONS = "proxy_handover_decisions_total"
HANDED_OVER = f'{OF_MODEL},why="handed_over"'
WANTED = f'{OF_MODEL},why=~"handed_over|no_prefill_worker|prefill_busy"'
ENDS = "proxy_handovers_total"
LEGS = f'{ROUTER},outcome=~"transferred|given_up|.*_failed|client_left_.*"'
# Whichever routers are chosen: each tells of all workers, and of its own transfers alone.
ARRIVED = 'job=~"$job",outcome="transferred"'
MOVED = "proxy_transfer_bytes_total"
BLOCKS = f'{ROUTER},outcome!~"transferred|prefilled.*|given_up|.*_failed|client_left_.*"'
SIDES = f'{ROUTER},role=~"prefill|decode"'
PREFILL, DECODE = f'{ROUTER},role="prefill"', f'{ROUTER},role="decode"'
USED = 'job=~"$job",model=~"$model"'  # of what is recorded of all routers together
# vLLM's own, which know nothing of routers.
FAILED = "vllm:nixl_num_failed_transfers_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
READ_LATE = "vllm:nixl_num_notifications_after_expiry_total"
OF_ANY_WORKER = 'model_name=~"$model"'

WHETHER = (
    Panel(
        "Hand-over: decided, and why not",
        "`not_worth_it` and `cached` are as they should be; `no_prefill_worker` and `prefill_busy` "
        "would have been handed over.", "reqps",
        (Query(rate(DECISIONS, OF_MODEL, "why"), "{{why}}"),), stacked=True,
    ),
    Panel(
        "Handed over", "Share of all requests that were decided upon.", "percentunit",
        (
            Query(
                ratio(rate(DECISIONS, HANDED_OVER, "model"), rate(DECISIONS, OF_MODEL, "model")),
                "{{model}}",
            ),
        ),
        most=1,
    ),
    Panel(
        "Handed over, of those that were to be",
        "The rest was served whole, for want of a prefill worker.", "percentunit",
        (
            Query(
                ratio(rate(DECISIONS, HANDED_OVER, "model"), rate(DECISIONS, WANTED, "model")),
                "{{model}}",
            ),
        ),
        most=1, bad_below=0.9,
    ),
    Panel(
        "Hand-overs, by outcome", "How far they got. A leg that fails is tried again whole.",
        "reqps", (Query(rate(ENDS, LEGS, "outcome"), "{{outcome}}"),), stacked=True,
    ),
    Panel(
        "Blocks given back or left to expire",
        "What became of prompts that were prefilled and not fetched. Those left to expire fill the "
        "prefill worker's cache for a while.", "reqps",
        (Query(rate(ENDS, BLOCKS, "outcome"), "{{outcome}}"),),
    ),
    Panel(
        "Transfers that failed",
        "As workers with NIXL say. The decode worker computes such a prompt itself, where it was "
        "started with `kv_load_failure_policy: recompute`, and nobody hears of it.", "reqps",
        (Query(rate(FAILED, OF_ANY_WORKER, "instance"), "{{instance}}"),),
    ),
    Panel(
        "Leases that ended",
        "As prefill workers with NIXL say: blocks that nobody fetched in time, and those that were "
        "read when they were kept no more. Clients that leave count among the latter; where leases "
        "end too, answers may be made of other prompts.", "reqps",
        (
            Query(rate(EXPIRED, OF_ANY_WORKER, "instance"), "{{instance}} not fetched"),
            Query(rate(READ_LATE, OF_ANY_WORKER, "instance"), "{{instance}} read late"),
        ),
    ),
    Panel(
        "Links left alone",
        "Times that two workers were given no hand-over for a while, because some had failed in a "
        "row.", "reqps",
        (
            Query(
                rate("proxy_handover_bars_total", ROUTER, "prefill, decode"),
                "{{prefill}} to {{decode}}",
            ),
        ),
    ),
    Panel(
        "Warm-ups", "Connections between prefill and decode workers that the router had made.",
        "reqps", (Query(rate("proxy_handover_warmups_total", ROUTER, "outcome"), "{{outcome}}"),),
    ),
)  # fmt: skip

TAKES = (
    Panel(
        "Prefill leg", "From its start to the prefill worker's answer, its wait there included.",
        "s", quantiles("proxy_prefill_leg_seconds", OF_MODEL, "model"),
    ),
    Panel(
        "Transfer time",
        "From the decode leg's start to its first token, less the time of a step.", "s",
        quantiles("proxy_transfer_seconds", OF_MODEL, "model"),
    ),
    Panel(
        "Transfer, predicted against real", "Means. The prediction decides what is worth it.", "s",
        (
            Query(
                mean("proxy_predicted_transfer_seconds", OF_MODEL, "model"), "{{model}} predicted"
            ),
            Query(mean("proxy_transfer_seconds", OF_MODEL, "model"), "{{model}} real"),
        ),
    ),
    Panel(
        "Where a hand-over's first token goes",
        "Means: waiting in the router, the prefill leg, the transfer.", "s",
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
        "Tokens handed over", "Prompt tokens per second, estimated.", "short",
        (Query(rate("proxy_transfer_tokens_total", OF_MODEL, "model"), "{{model}}"),),
    ),
    Panel(
        "Bytes moved", "As the workers themselves say.", "Bps",
        (
            Query(
                f"max by (worker, role) (rate({MOVED}{{{ROUTER}}}{WINDOW}))", "{{role}} {{worker}}"
            ),
        ),
    ),
    Panel(
        "Bytes of a hand-over",
        "Mean: what all workers say that they moved, by the transfers of all routers.", "bytes",
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
        "How much each side is in use",
        "Prefill workers: share of the time in which they prefill. Decode workers: how full their "
        "caches are, or how many of their seats are taken where that is more. One high and the "
        "other low: a worker should change sides.", "percentunit",
        (Query(f'role:proxy_use:ratio5m{{{USED},role=~"prefill|decode"}}', "{{role}} {{model}}"),),
        most=1, bad_above=0.8,
    ),
    Panel(
        "Imbalance", "Use of the prefill side less that of the decode side.", "percentunit",
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
        "KV cache in use", "As workers say. A prefill worker holds blocks until they are fetched.",
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
        "Seats taken",
        "Of the sequences that a decode worker runs at once (`--max-num-seqs`), as far as the "
        "fleet file or its own queue tells. For want of one hand-overs wait in the router. Those "
        "for prompts that are still prefilled elsewhere are not taken yet.",
        "percentunit",
        (Query(f"max by (worker) (proxy_worker_seats_taken_ratio{{{DECODE}}})", "{{worker}}"),),
        most=1, bad_above=0.9,
    ),
    Panel(
        "Prompts held", "Prefilled, and yet to be fetched: their blocks stay where they are.",
        "short",
        (Query(f"sum by (worker) (proxy_worker_held_prompts{{{PREFILL}}})", "{{worker}}"),),
    ),
    Panel(
        "Prompt tokens charged to prefill workers", "That they have yet to compute.", "short",
        (Query(f"sum by (worker) (proxy_worker_prefill_tokens{{{PREFILL}}})", "{{worker}}"),),
    ),
    Panel(
        "Prefill legs, by worker",
        "Done by each prefill worker; *Fleet and routing* counts such requests with who decodes.",
        "reqps", (Query(rate("proxy_prefill_legs_total", ROUTER, "worker"), "{{worker}}"),),
        stacked=True,
    ),
    Panel(
        "Requests charged to decode workers", "Those whose prefill is under way included.", "short",
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
    "Requests served by two workers. Empty where the fleet file has no `transfer`.",
    (
        Variable("job", "Job", "proxy_build_info", "job"),
        Variable("instance", "Router", 'proxy_build_info{job=~"$job"}', "instance"),
        Variable("model", "Model", 'proxy_requests_total{job=~"$job"}', "model"),
    ),
    (
        Row("Whether, and how it ends", WHETHER),
        Row("What it takes", TAKES),
        Row("Both sides", SIDES_ROW),
    ),
)
