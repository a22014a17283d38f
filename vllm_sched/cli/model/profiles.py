"""`vllm-sched profiles`: list the built-in profiles with their source and errors."""

from __future__ import annotations

import argparse
import json
from typing import Final

from rich.table import Table

from vllm_sched.bench.results.summary import plain_table
from vllm_sched.cli.output import Output
from vllm_sched.cost import profiles
from vllm_sched.cost.profile_fit import FitError
from vllm_sched.cost.step_time import STEP_KINDS, StepShape
from vllm_sched.errors import UsageError

NOTE: Final = (
    "Errors are of the fit to the source, median and worst over its sampled steps. The source adds "
    "up measured kernels: what a mixed step costs beside them is unknown and taken as 0 (set "
    "--mixed-ms), and a real worker differs. `vllm-sched calibrate` measures yours."
)
MANY, CONTEXT = 64, 2048


def describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "profiles",
        help="list the built-in cost profiles, their source and their errors",
        description=(
            "List the step-time profiles that --profile takes: measured ones with the errors of "
            "their fit, assumed ones with their source."
        ),
        allow_abbrev=False,
    )
    add = command.add_argument
    add("words", nargs="*", metavar="WORD", help="list names with all of these words only")
    add("--json", action="store_true", help="print everything as JSON")
    add("--missing", action="store_true", help="list what the source cannot give, with reasons")
    command.set_defaults(func=run_profiles)


def run_profiles(args: argparse.Namespace) -> int:
    console = Output()
    if args.missing:
        _print_missing(console, args.words)
        return 0
    everything = [*profiles.ASSUMED.values(), *profiles.measured().values()]
    matching = [profile for profile in everything if _matches(_names(profile), args.words)]
    if not matching:
        raise UsageError(
            f"no built-in profile has {' '.join(args.words)} in its name; without words all are "
            "listed"
        )
    if args.json:
        shown = [{"name": e.name, "source": e.source, **profiles.to_json(e)} for e in matching]
        print(json.dumps(shown, indent=1))
        return 0
    console.print_table(_table(matching))
    for source in dict.fromkeys(profile.source for profile in matching):
        console.print_text(f"source: {source}")
    for profile in matching:
        if profile.remark:
            console.print_text(f"{profile.name}: {profile.remark}", "yellow")
    for short, key in profiles.ALIASES.items():
        if any(profile.key == key for profile in matching):
            console.print_text(f"{short}: short for {key.name}")
    console.print_text(NOTE)
    return 0


def _names(profile: profiles.Profile) -> str:
    short = [name for name, key in profiles.ALIASES.items() if key == profile.key]
    return " ".join([profile.name, *short])


def _matches(name: str, words: list[str]) -> bool:
    return all(word in name for word in words)


def _table(matching: list[profiles.Profile]) -> Table:
    errors = (f"{kind}\nerr %" for kind in STEP_KINDS)
    headings = ("KV, k", f"{MANY} dec\nms", "2k pre\nms", *errors)
    layout = plain_table(["profile"], headings, padding=(0, 1, 0, 0))
    for column in layout.columns:
        column.no_wrap = True
    for profile in matching:
        decode = profile.time.seconds(StepShape(decodes=MANY, context_tokens=MANY * CONTEXT))
        prompt = StepShape(prefill_tokens=CONTEXT, pairs=CONTEXT * CONTEXT / 2, prompts=1)
        layout.add_row(
            profile.name,
            f"{profile.size.kv_tokens() / 1000:,.0f}",
            f"{decode * 1000:.3g}",
            f"{profile.time.seconds(prompt) * 1000:.3g}",
            *(_error(profile.errors.get(kind), assumed=profile.key is None) for kind in STEP_KINDS),
        )
    return layout


def _error(error: FitError | None, *, assumed: bool) -> str:
    if error is None:
        return "guess" if assumed else "none"
    return f"{100 * error.median:.1f}/{100 * error.worst:.0f}"


def _print_missing(console: Output, words: list[str]) -> None:
    for key, why in profiles.unavailable().items():
        if _matches(key.name, words):
            console.print_text(f"{key.name}: {why}", "")
