"""`vllm-sched explain FLEET.yaml`: show where a request would go, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic import TypeAdapter

from proxy.admin.schemas import Explanation, Question, explanation
from proxy.config import FleetConfig
from proxy.core.fleet.charges import idle_fleet
from proxy.core.model.specs import Score
from proxy.core.router import Router
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.health.balance import BalanceShown
from vllm_sched.cli.fleet.fleet import Commands, columns, fleet_command, read
from vllm_sched.cli.fleet.live_router import LiveRouter, call_router
from vllm_sched.errors import UsageError

ASSUMED_NOTE = "these times are assumptions; --live asks a running router, which measures them"
NO_WORKER_STATUS = 1
HEADING = ("worker", "cost s", "wait s", "prefill s", "harm s", "cached", "note")
SIDES = ("model", "side", "workers", "busy", "wanted", "ahead s", "step ms", "")
# Why a prompt is not handed over.
NO_HANDOVER_REASONS = {
    HandoverVerdict.NOT_WORTH_IT: "the gain is too small for the number of running decodes, or "
    "the prompt has no more tokens than routing.disaggregate_above",
    HandoverVerdict.CACHED: "the decode worker should have most of the prompt cached",
    HandoverVerdict.ELSEWHERE: "that worker serves prefill and decode itself",
    HandoverVerdict.NO_PREFILL: "no prefill worker is up",
    HandoverVerdict.PREFILL_BUSY: "no prefill worker is free and connected to the decode worker",
}
EXPLANATION = TypeAdapter(Explanation)
BALANCES = TypeAdapter(list[BalanceShown])


def describe(commands: Commands) -> None:
    command = fleet_command(commands, "explain", "show where a request would go, and why")
    command.add_argument(
        "--prompt-tokens",
        type=_count,
        metavar="N",
        help="tokens of the prompt (optional with --live, which then shows only the load)",
    )
    command.add_argument(
        "--max-tokens", type=_count, metavar="M", help="limit of output tokens (default: none)"
    )
    command.add_argument("--model", help="model of the request (default: the fleet's model)")
    command.add_argument(
        "--session", default="", metavar="ID", help="with --live: id of the request's session"
    )
    command.add_argument("--tenant", default="", help="with --session: tenant of the session")
    command.add_argument(
        "--live",
        nargs="?",
        const="",
        metavar="URL",
        help="ask the admin API of a running router, which knows the load (default URL: from the "
        "file); without --live, all workers are assumed to be up and idle",
    )
    command.set_defaults(func=lambda args: explain(args, read(args.fleet)))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def explain(arguments: argparse.Namespace, config: FleetConfig) -> int:
    """Print the worker, the reason and the scores; return 1 if no worker would take the request.

    With --live, also print the load of prefill and decode workers.
    """
    live = None
    if arguments.session and arguments.live is None:
        raise UsageError("--session: only a running router knows sessions; add --live")
    if arguments.tenant and not arguments.session:
        raise UsageError("--tenant: is the tenant of a --session; add one")
    if arguments.live is not None:
        live = LiveRouter.from_config(config, arguments.fleet, arguments.live)
    status = 0
    if arguments.prompt_tokens is not None:
        status = _explain_one(arguments, config, live)
    elif live is None:
        raise UsageError("--prompt-tokens is missing; give the prompt's length, such as 12000")
    if live is not None and config.transfer is not None:
        sides = call_router(live, "balance", BALANCES)
        _show_sides(sides)
    elif arguments.prompt_tokens is None:
        print("this fleet has no prefill and decode workers; give --prompt-tokens")
    return status


def _show_sides(sides: Sequence[BalanceShown]) -> None:
    if not sides:
        print("this router knows no prefill or decode worker")
        return
    print(columns([SIDES, *_sides(sides)]))
    for side in sides:
        print(f"{side.model}: {side.advice}")


def _explain_one(
    arguments: argparse.Namespace, config: FleetConfig, live: LiveRouter | None
) -> int:
    question = Question(
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        model=arguments.model or config.model,
        session=arguments.session,
        tenant=arguments.tenant,
    )
    if live is None:
        _note_discovered(config, question.model)
        explanation = predict(config, question)
        if unstated := [w.name for w in config.workers if w.stated_max_model_len is None]:
            print(f"no max_model_len is given, so no limit is assumed: {', '.join(unstated)}")
    else:
        unset = {name for name in ("session", "tenant") if not getattr(question, name)}
        body = question.model_dump_json(exclude=unset)
        explanation = call_router(live, "explain", EXPLANATION, body)
    print(_verdict(explanation))
    if explanation.scores:
        print(columns([HEADING, *_rows(explanation.scores)]))
    if live is None and explanation.worker:
        print(ASSUMED_NOTE)
    return 0 if explanation.worker else NO_WORKER_STATUS


def _note_discovered(config: FleetConfig, model: str | None) -> None:
    """Print a note on pools with discovered workers; raise if the model has no other workers."""
    names = ", ".join(pool.name for pool in config.pools if config.model_of(pool) == model)
    if not names:
        return
    if not any(config.model_of(worker) == model for worker in config.workers):
        raise UsageError(
            f"the workers of {model} are discovered ({names}) and not known here; ask a "
            "running router with --live"
        )
    print(f"the discovered pools {names} are left out; ask a running router with --live")


def predict(config: FleetConfig, question: Question) -> Explanation:
    """Return the decision of a router that has just started, with all workers up and idle."""
    from proxy.app import router_settings, specs

    router = Router(router_settings(config), idle_fleet(specs(config)))
    return explanation(router, question, config.model, now=0.0)


def _verdict(explanation: Explanation) -> str:
    if explanation.worker is None:
        return (
            f"no worker: {explanation.reason} (status {explanation.status}): {explanation.message}"
        )
    who = explanation.worker
    if explanation.prefill_worker is not None:
        who = f"prefill on {explanation.prefill_worker}, decode on {who}"
    text = f"{who}: {explanation.reason}"
    if explanation.predicted_ttft_s is not None:
        text += f", first token in about {explanation.predicted_ttft_s:.3g} s"
    if explanation.predicted_transfer_s is not None:
        text += f" ({explanation.predicted_transfer_s:.3g} s of it the transfer)"
    if explanation.turn is not None:
        text += f"\nsession: {explanation.turn}"
    if explanation.handover is not None and explanation.prefill_worker is None:
        text += f"\nhandover: {explanation.handover}"
        if why := NO_HANDOVER_REASONS.get(explanation.handover):
            text += f": {why}"
    return text


def _sides(balances: Sequence[BalanceShown]) -> list[tuple[str, ...]]:
    return [
        (
            balance.model,
            name,
            str(side.workers),
            f"{side.busy:.0%}",
            f"{side.wanted:g}",
            f"{side.ahead_s:.2f}",
            "-" if side.step_s is None else f"{1000 * side.step_s:.1f}",
            "short" if balance.short in (name, "both") else "",
        )
        for balance in balances
        for name, side in (("prefill", balance.prefill), ("decode", balance.decode))
    ]


def _rows(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """Return the table rows of scores, best first; workers without a score are last."""
    ordered = sorted(scores, key=lambda score: (_has_none(score), score.total))
    return [
        (score.worker, "-", "-", "-", "-", "-", score.note)
        if _has_none(score)
        else (
            score.worker,
            *(f"{s:z.4f}" for s in (score.total, score.wait_s, score.prefill_s, score.harm_s)),
            f"{score.cached_tokens:,} ({'reported' if score.cached_reported else 'estimated'})",
            "; ".join(filter(None, (_prefill_by(score), score.note))),
        )
        for score in ordered
    ]


def _has_none(score: Score) -> bool:
    """Return whether a worker has no score; its note says why. A candidate may have a note too."""
    return bool(score.note) and not score.total


def _prefill_by(score: Score) -> str:
    return f"prefill on {score.prefill_by}" if score.prefill_by else ""
