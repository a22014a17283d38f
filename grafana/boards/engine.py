"""The engine policies' dashboard: lanes, holds, chunks and step predictions."""

from __future__ import annotations

from grafana.panels import Board, Panel, Query, Row, Variable
from grafana.promql import ENGINE, mean, quantiles, rate, ratio

P = "vllm_sched_"
LANE = "{{policy}} {{lane}}"
EACH = "{{instance}} engine {{engine}}"


def total(name: str, by: str) -> str:
    """Return the sum of a gauge over all engines."""
    return f"sum by ({by}) ({P}{name}{{{ENGINE}}})"


def most(name: str, by: str) -> str:
    """Return the maximum of a gauge over all engines."""
    return f"max by ({by}) ({P}{name}{{{ENGINE}}})"


def grown(name: str, by: str) -> str:
    return rate(f"{P}{name}_total", ENGINE, by)


WAITING = (
    Panel(
        "Requests waiting, by lane", "In the engines' own queues.", "short",
        (Query(total("requests_waiting", "policy, lane"), LANE),), stacked=True,
    ),
    Panel(
        "Requests running, by lane", "By the lane they came from.", "short",
        (Query(total("requests_running", "policy, lane"), LANE),), stacked=True,
    ),
    Panel(
        "Requests held, by reason",
        "Requests that wait because a policy holds their lane, not for lack of capacity.", "short",
        (Query(total("requests_held", "policy, reason"), "{{policy}} {{reason}}"),), stacked=True,
    ),
    Panel(
        "Longest wait, by lane",
        "Wait of the first request in the queue; the maximum over all engines.", "s",
        (Query(most("oldest_wait_seconds", "policy, lane"), LANE),),
    ),
    Panel(
        "Time held",
        "How long a policy held a request's lane, with free slots, before the request ran. vLLM's "
        "queue time is the whole wait.", "s", quantiles(f"{P}hold_seconds", ENGINE, "policy"),
    ),
    Panel(
        "Admitted, by lane", "Requests that started to run.", "reqps",
        (Query(grown("requests_admitted", "policy, lane"), LANE),), stacked=True,
    ),
    Panel(
        "Starvation releases",
        "Requests admitted because they had waited too long. Occasional releases are normal; a "
        "constant rate means overload.", "reqps",
        (Query(grown("starvation_releases", "policy"), "{{policy}}"),), bad_above=1 / 60,
    ),
    Panel(
        "Prompt tokens to compute", "Waiting and running, by class.", "short",
        (Query(total("prefill_backlog_tokens", "class"), "{{class}}"),), stacked=True,
    ),
    Panel(
        "Requests in prefill",
        "By class. `long_prompt` limits the long prompts in prefill.", "short",
        (Query(total("prefills_running", "class"), "{{class}}"),), stacked=True,
    ),
)  # fmt: skip

KNOBS = (
    Panel(
        "Chunk budget",
        "Prompt tokens that a step may compute in addition to its decodes, as set by "
        "`chunk_budget`.",
        "short",
        (Query(f"{P}chunk_budget_tokens{{{ENGINE}}}", EACH),),
    ),
    Panel(
        "Step budget",
        "Token limit of the last step, from policies and engine together.",
        "short",
        (Query(f"{P}step_budget_tokens{{{ENGINE}}}", EACH),),
    ),
    Panel(
        "K",
        "Departures that `deferred_prefill` waits for before it admits requests, and the best "
        "value according to its estimates.",
        "short",
        (
            Query(f"{P}k{{{ENGINE}}}", EACH),
            Query(f"{P}k_best{{{ENGINE}}}", f"{EACH} best"),
        ),
    ),
)

# Metrics of single policies; empty if another policy runs.
OWN = (
    Panel(
        "chunk_budget: predicted step time", "Predicted time of the last step with prefill.", "s",
        (Query(f"{P}predicted_step_seconds{{{ENGINE}}}", EACH),),
    ),
    Panel(
        "chunk_budget: margin",
        "Factor on predictions that keeps steps within the target, and how much slower than "
        "predicted recent steps were.", "short",
        (
            Query(f"{P}margin{{{ENGINE}}}", EACH),
            Query(f"{P}drift{{{ENGINE}}}", f"{EACH} drift"),
        ),
    ),
    Panel(
        "chunk_budget: steps beyond the target",
        "Steps with prefill that exceeded the target, and steps that used time saved by earlier "
        "steps.", "ops",
        (
            Query(grown("long_steps", "instance"), "{{instance}} longer"),
            Query(grown("slack_steps", "instance"), "{{instance}} spent"),
        ),
    ),
    Panel(
        "deferred_prefill: time held", "Share of the time in which no request is admitted.",
        "percentunit",
        (
            Query(grown("held_seconds", "instance, engine"), EACH),
            Query(f"{P}holding{{{ENGINE}}}", f"{EACH} now"),
        ),
        most=1,
    ),
    Panel(
        "deferred_prefill: holds, by end",
        "`departures`: K requests finished, as intended. `few`, `idle`: too few requests run or "
        "wait. `overdue`: a request waited too long. `room`: there was capacity again.", "ops",
        tuple(
            Query(grown(f"holds_ended_{end}", "instance"), f"{{{{instance}}}} {end}")
            for end in ("departures", "few", "idle", "overdue", "room")
        ),
    ),
    Panel(
        "lanes: requests running and waiting", "By class.", "short",
        tuple(
            Query(f"sum ({P}{state}_{lane}{{{ENGINE}}})", f"{state} {lane}")
            for state in ("running", "waiting")
            for lane in ("urgent", "normal", "batch")
        ),
    ),
    Panel(
        "lanes: unknown classes", "Requests with an unknown class.", "reqps",
        (Query(grown("unknown_lanes", "instance"), "{{instance}}"),), bad_above=0.1,
    ),
    Panel(
        "long_prompt: long prompts in prefill",
        "As the policy counts them against its limit.", "short",
        (Query(f"{P}long_prefills{{{ENGINE}}}", EACH),),
    ),
    Panel(
        "prefill_first: paused decodes",
        "Whether decodes pause now, and the rate of steps in which they pause.", "short",
        (
            Query(f"{P}decodes_paused{{{ENGINE}}}", f"{EACH} now"),
            Query(grown("paused_steps", "instance, engine"), f"{EACH} steps a second"),
        ),
    ),
    Panel(
        "rotation: prompts in rotation",
        "Prompts in rotation, and the tokens of one turn.", "short",
        (
            Query(f"{P}prompts_in_rotation{{{ENGINE}}}", f"{EACH} prompts"),
            Query(f"{P}turn_tokens{{{ENGINE}}}", f"{EACH} tokens"),
        ),
    ),
    Panel(
        "static_batching: the batch",
        "Members of the batch, and whether it is still forming.", "short",
        (
            Query(f"{P}batch_members{{{ENGINE}}}", f"{EACH} members"),
            Query(f"{P}batch_forming{{{ENGINE}}}", f"{EACH} forming"),
        ),
    ),
)  # fmt: skip

STEPS = (
    Panel(
        "Step time, by kind",
        "A decode waits for its step: if `mixed` is far above `decode`, long prompts delay "
        "running streams.", "s", quantiles(f"{P}step_seconds", ENGINE, "kind", 0.5, 0.99),
    ),
    Panel(
        "Steps, by kind", "Per second.", "ops",
        (Query(grown("steps", "kind"), "{{kind}}"),), stacked=True,
    ),
    Panel(
        "Tokens computed", "Prefill and decode.", "short",
        (Query(grown("step_tokens", "kind"), "{{kind}}"),), stacked=True,
    ),
    Panel(
        "Tokens per step", "Mean, and the budget.", "short",
        (
            Query(
                ratio(rate(f"{P}step_tokens_total", ENGINE), rate(f"{P}steps_total", ENGINE)),
                "computed",
            ),
            Query(f"avg({P}step_budget_tokens{{{ENGINE}}})", "budget"),
        ),
    ),
    Panel(
        "Step time, predicted and observed", "Mean time of steps that had a prediction.", "s",
        (
            Query(
                ratio(grown("step_predicted_seconds", "kind"), grown("steps_predicted", "kind")),
                "{{kind}} predicted",
            ),
            Query(
                ratio(grown("step_observed_seconds", "kind"), grown("steps_predicted", "kind")),
                "{{kind}} real",
            ),
        ),
    ),
    Panel(
        "Prediction error", "Mean absolute error as a share of the step time.",
        "percentunit",
        (
            Query(
                ratio(
                    grown("step_error_seconds", "kind"), grown("step_observed_seconds", "kind")
                ),
                "{{kind}}",
            ),
        ),
    ),
    Panel(
        "Step time coefficients",
        "Coefficients of the step time model, fitted while the engine runs.", "s",
        (
            Query(
                f"avg by (coefficient) ({P}step_time_coefficient_seconds{{{ENGINE}}})",
                "{{coefficient}}",
            ),
        ),
        width=12,
    ),
    Panel(
        "Mean time held", "Of requests that a policy held before they ran.", "s",
        (Query(mean(f"{P}hold_seconds", ENGINE, "policy"), "{{policy}}"),), width=12,
    ),
)  # fmt: skip

ENGINES = (
    Panel(
        "Running engines", "Version, scheduler and policies of each engine.", "short",
        (
            Query(
                "max by (instance, model_name, engine, version, scheduler, policies) "
                f"({P}info{{{ENGINE}}})"
            ),
        ),
        "table", 16,
    ),
    Panel(
        "Uptime", "Time since the engine started.", "s",
        (Query(f"time() - {P}start_time_seconds{{{ENGINE}}}", EACH),),
    ),
)  # fmt: skip

BOARD = Board(
    "vllm-sched-engine",
    "vllm-sched: Engine policies",
    "Decisions of the engines' schedulers. Requires workers started with `vllm-sched serve`.",
    (
        Variable("job", "Job", "vllm_sched_info", "job"),
        Variable("instance", "Worker", 'vllm_sched_info{job=~"$job"}', "instance"),
        Variable("model", "Model", 'vllm_sched_info{job=~"$job"}', "model_name"),
    ),
    (
        Row("Requests waiting and running", WAITING),
        Row("Settings of the policies", KNOBS),
        Row("Steps", STEPS),
        Row("Single policies", OWN),
        Row("Engines", ENGINES),
    ),
)
