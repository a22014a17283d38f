"""`vllm-sched explain FLEET.yaml`: where a request would go, and why."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from pydantic import ValidationError

from proxy.control.shapes import Explanation, Question, explanation
from proxy.core.fleet import Fleet
from proxy.core.router import Router
from vllm_sched.cli.text import columns
from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.config import FleetConfig
    from proxy.core.types import Score

TIMEOUT_S = 10.0
NOWHERE = 1
HEADING = ("worker", "cost s", "wait s", "prefill s", "harm s", "cached", "no candidate because")


def add_options(command: argparse.ArgumentParser) -> None:
    """Describe the options."""
    command.add_argument(
        "--prompt-tokens", type=_count, required=True, metavar="N", help="of the prompt"
    )
    command.add_argument(
        "--max-tokens", type=_count, metavar="M", help="of output (default: no limit is stated)"
    )
    command.add_argument("--model", help="whose request it is (default: the fleet's model)")
    command.add_argument(
        "--live",
        nargs="?",
        const="",
        metavar="URL",
        help="ask the admin API of a running router, which knows the load (default URL: the "
        "file's); without this all workers are taken to be up and idle",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def explain(arguments: argparse.Namespace, config: FleetConfig) -> int:
    """Print worker, reason and scores; 1 when the request would go nowhere."""
    question = Question(
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        model=arguments.model or config.model,
    )
    if arguments.live is None:
        found = predicted(config, question)
        if unstated := [w.name for w in config.workers if w.stated_max_model_len is None]:
            print(f"taken to hold anything, as no max_model_len is stated: {', '.join(unstated)}")
    else:
        admin = config.router.admin
        found = asked(arguments.live or f"http://{admin.host}:{admin.port}", question)
    print(_verdict(found))
    if found.scores:
        print(columns([HEADING, *_rows(found.scores)]))
    return 0 if found.worker else NOWHERE


def predicted(config: FleetConfig, question: Question) -> Explanation:
    """Answer as a router does that has just started, with all its workers up and idle."""
    from proxy.app import router_settings, specs

    fleet = Fleet()
    for spec in specs(config):
        fleet.add(spec)
        fleet.probe_ok(spec.name, now=0.0)
    router = Router(router_settings(config), fleet)
    return explanation(router, question, config.model, now=0.0)


def asked(url: str, question: Question) -> Explanation:
    """Ask the admin API of a running router."""
    # Straight there: a proxy named by the environment knows nothing of a loopback address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(  # noqa: S310 - the user's own URL
            f"{url.rstrip('/')}/admin/explain",
            data=question.model_dump_json().encode(),
            headers={"Content-Type": "application/json"},
        )
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return Explanation.model_validate_json(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            why = _complaint(error.read()) or error.reason
        raise UsageError(f"{url}: {why} (status {error.code})") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, ValidationError):
            why = "its answer is not that of a router's admin API"
        else:
            why = str(getattr(error, "reason", error))
        raise UsageError(
            f"{url}: {why}; give the address of a running router's admin API, as "
            "http://127.0.0.1:8001"
        ) from None


def _complaint(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return ""


def _verdict(found: Explanation) -> str:
    if found.worker is None:
        return f"no worker: {found.reason} (status {found.status}): {found.message}"
    if found.predicted_ttft_s is None:
        return f"{found.worker}: {found.reason}"
    return f"{found.worker}: {found.reason}, first token in about {found.predicted_ttft_s:.3g} s"


def _rows(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """Write the scores, best first, and those without one last."""
    ordered = sorted(scores, key=lambda score: (bool(score.note), score.total))
    return [
        (score.worker, "-", "-", "-", "-", "-", score.note)
        if score.note
        else (
            score.worker,
            *(f"{s:.4f}" for s in (score.total, score.wait_s, score.prefill_s, score.harm_s)),
            str(score.cached_tokens),
            "",
        )
        for score in ordered
    ]
