"""What the policies inside the engines do: lanes, holds, chunks, and how steps were predicted."""

from __future__ import annotations

from grafana.asking import ENGINE, mean, quantiles, rate, ratio
from grafana.panels import Board, Panel, Query, Row, Variable

P = "vllm_sched_"
LANE = "{{policy}} {{lane}}"
EACH = "{{instance}} engine {{engine}}"


def total(name: str, by: str) -> str:
    """Sum up a gauge of all engines."""
    return f"sum by ({by}) ({P}{name}{{{ENGINE}}})"


def most(name: str, by: str) -> str:
    """Take the highest of all engines."""
    return f"max by ({by}) ({P}{name}{{{ENGINE}}})"


def grown(name: str, by: str) -> str:
    """Sum up how fast a counter grows."""
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
        "Those that wait because a policy holds their lane, not for want of room.", "short",
        (Query(total("requests_held", "policy, reason"), "{{policy}} {{reason}}"),), stacked=True,
    ),
    Panel(
        "Longest wait, by lane", "Of the request in front, in the engine where that is worst.", "s",
        (Query(most("oldest_wait_seconds", "policy, lane"), LANE),),
    ),
    Panel(
        "Time held",
        "For how long a policy held a request's lane before it ran, with slots free. The whole "
        "wait is vLLM's queue time.", "s", quantiles(f"{P}hold_seconds", ENGINE, "policy"),
    ),
    Panel(
        "Admitted, by lane", "Requests that began to run.", "reqps",
        (Query(grown("requests_admitted", "policy, lane"), LANE),), stacked=True,
    ),
    Panel(
        "Starvation releases",
        "Requests let through because they had waited too long. Now and then is what the guard is "
        "for; all the time means too much load.", "reqps",
        (Query(grown("starvation_releases", "policy"), "{{policy}}"),), bad_above=1 / 60,
    ),
    Panel(
        "Prompt tokens to compute", "Waiting and running, by class.", "short",
        (Query(total("prefill_backlog_tokens", "class"), "{{class}}"),), stacked=True,
    ),
    Panel(
        "Requests in prefill", "By class; `long_prompt` lets few longs in at a time.", "short",
        (Query(total("prefills_running", "class"), "{{class}}"),), stacked=True,
    ),
)  # fmt: skip

KNOBS = (
    Panel(
        "Chunk budget",
        "Tokens of prompts that a step may compute beside its decodes, as `chunk_budget` set it.",
        "short",
        (Query(f"{P}chunk_budget_tokens{{{ENGINE}}}", "{{instance}} engine {{engine}}"),),
    ),
    Panel(
        "Step budget",
        "Tokens that the last step was allowed, policies and engine together.",
        "short",
        (Query(f"{P}step_budget_tokens{{{ENGINE}}}", "{{instance}} engine {{engine}}"),),
    ),
    Panel(
        "K",
        "Departures that `deferred_prefill` waits for before it admits anybody, and what would be "
        "best by what it has learnt.",
        "short",
        (
            Query(f"{P}k{{{ENGINE}}}", "{{instance}} engine {{engine}}"),
            Query(f"{P}k_best{{{ENGINE}}}", "{{instance}} engine {{engine}} best"),
        ),
    ),
)

# What single policies tell; empty where another one runs.
OWN = (
    Panel(
        "chunk_budget: a step's time", "As predicted for the last step with prefill.", "s",
        (Query(f"{P}predicted_step_seconds{{{ENGINE}}}", EACH),),
    ),
    Panel(
        "chunk_budget: margin",
        "What predictions are multiplied by, so that steps keep to the target; and by how much "
        "steps have been slower of late than was predicted.", "short",
        (
            Query(f"{P}margin{{{ENGINE}}}", EACH),
            Query(f"{P}drift{{{ENGINE}}}", f"{EACH} drift"),
        ),
    ),
    Panel(
        "chunk_budget: steps beyond the target",
        "Steps with prefill that took longer, and those that spent what others had saved.", "ops",
        (
            Query(grown("long_steps", "instance"), "{{instance}} longer"),
            Query(grown("slack_steps", "instance"), "{{instance}} spent"),
        ),
    ),
    Panel(
        "deferred_prefill: time it holds", "Share of the time in which nobody is admitted.",
        "percentunit",
        (
            Query(grown("held_seconds", "instance"), "{{instance}}"),
            Query(f"{P}holding{{{ENGINE}}}", "{{instance}} now"),
        ),
        most=1,
    ),
    Panel(
        "deferred_prefill: holds, by how they ended",
        "By K departures, as is meant; for want of requests that run or wait; because somebody had "
        "waited too long; because there was room again.", "ops",
        tuple(
            Query(grown(f"holds_ended_{end}", "instance"), f"{{{{instance}}}} {end}")
            for end in ("departures", "few", "idle", "overdue", "room")
        ),
    ),
    Panel(
        "lanes: who runs and who waits", "By class.", "short",
        tuple(
            Query(f"sum ({P}{state}_{lane}{{{ENGINE}}})", f"{state} {lane}")
            for state in ("running", "waiting")
            for lane in ("urgent", "normal", "batch")
        ),
    ),
    Panel(
        "lanes: classes that there are not", "Requests that asked for one that is none.", "reqps",
        (Query(grown("unknown_lanes", "instance"), "{{instance}}"),), bad_above=0.1,
    ),
    Panel(
        "long_prompt: longs in prefill", "As the policy counts them against its places.", "short",
        (Query(f"{P}long_prefills{{{ENGINE}}}", EACH),),
    ),
    Panel(
        "prefill_first: decodes that pause", "Whether they do now, and in how many steps.", "short",
        (
            Query(f"{P}decodes_paused{{{ENGINE}}}", "{{instance}} now"),
            Query(grown("paused_steps", "instance"), "{{instance}} steps a second"),
        ),
    ),
    Panel(
        "rotation: prompts that take turns", "And the tokens of a turn.", "short",
        (
            Query(f"{P}prompts_in_rotation{{{ENGINE}}}", "{{instance}} prompts"),
            Query(f"{P}turn_tokens{{{ENGINE}}}", "{{instance}} tokens"),
        ),
    ),
    Panel(
        "static_batching: the batch", "Its members, and whether it is still being formed.", "short",
        (
            Query(f"{P}batch_members{{{ENGINE}}}", "{{instance}} members"),
            Query(f"{P}batch_forming{{{ENGINE}}}", "{{instance}} forming"),
        ),
    ),
)  # fmt: skip

STEPS = (
    Panel(
        "Time of steps, by what they compute",
        "A decode waits for its step: `mixed` far above `decode` is what long prompts do to those "
        "who read along.", "s", quantiles(f"{P}step_seconds", ENGINE, "kind", 0.5, 0.99),
    ),
    Panel(
        "Steps, by what they compute", "Per second.", "ops",
        (Query(grown("steps", "kind"), "{{kind}}"),), stacked=True,
    ),
    Panel(
        "Tokens computed", "Prefill and decode.", "short",
        (Query(grown("step_tokens", "kind"), "{{kind}}"),), stacked=True,
    ),
    Panel(
        "Tokens of a step", "Mean, against the budget that it was allowed.", "short",
        (
            Query(
                ratio(rate(f"{P}step_tokens_total", ENGINE), rate(f"{P}steps_total", ENGINE)),
                "computed",
            ),
            Query(f"avg({P}step_budget_tokens{{{ENGINE}}})", "budget"),
        ),
    ),
    Panel(
        "Steps, predicted against real", "Mean time of those that were predicted.", "s",
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
        "How far predictions were off", "Mean error either way, as a share of the time.",
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
        "What steps were found to take", "Coefficients, fitted while the engine runs.", "s",
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
        "What runs", "Version, scheduler and policies of each engine.", "short",
        (
            Query(
                "max by (instance, model_name, engine, version, scheduler, policies) "
                f"({P}info{{{ENGINE}}})"
            ),
        ),
        "table", 16,
    ),
    Panel(
        "Up for", "Since the engine started.", "s",
        (Query(f"time() - {P}start_time_seconds{{{ENGINE}}}", "{{instance}} {{engine}}"),),
    ),
)  # fmt: skip

BOARD = Board(
    "vllm-sched-engine",
    "vllm-sched: Engine policies",
    "What the schedulers inside the engines decide. Needs workers started with `vllm-sched serve`.",
    (
        Variable("job", "Job", "vllm_sched_info", "job"),
        Variable("instance", "Worker", 'vllm_sched_info{job=~"$job"}', "instance"),
        Variable("model", "Model", 'vllm_sched_info{job=~"$job"}', "model_name"),
    ),
    (
        Row("Who waits, and who runs", WAITING),
        Row("What the policies set", KNOBS),
        Row("Steps", STEPS),
        Row("What single policies tell", OWN),
        Row("Engines", ENGINES),
    ),
)
