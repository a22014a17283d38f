"""Figures of a comparison from recorded tokens: percentiles, a table, JSON.

Percentiles pool the samples of all rounds. A rate is the median of the rounds, and its ratio is the
median of the rounds' ratios, because a slow minute affects both sides of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from vllm_sched.bench.compare.workloads import BACKGROUND, BATCH, CLASSES, LONG, SHORT, TURN
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.results.summary import details, plain_table, served, show_number

if TYPE_CHECKING:
    from vllm_sched.bench.compare.runner import Round

    Samples = Callable[[Sequence[Round], str], list[float]]

SECONDS = "s"
RATE = "tokens/s"
GROUPS = {
    SHORT: "short prompts",
    TURN: "agent turns",
    LONG: "long prompts",
    BATCH: "batch",
    BACKGROUND: "running decodes",
    "all": "everything",
    "lone": "a short alone",
}
STYLES = {True: "green", False: "red", None: ""}  # by whether a figure is better

SPREAD = "TTFT last - first"


@dataclass(frozen=True)
class Figure:
    group: str
    measure: str
    unit: str
    baseline: float | None
    candidate: float | None
    ratio: float | None  # candidate / baseline

    @property
    def better(self) -> bool | None:
        """True if the candidate wins by 2 percent, False if it loses; otherwise None."""
        if self.ratio is None or abs(self.ratio - 1) < 0.02:
            return None
        return (self.ratio > 1) == (self.unit == RATE)


def foreground_end(played: Round) -> float:
    return max((r.end for r in played.records if r.klass != BACKGROUND), default=0.0)


def ttfts(rounds: Sequence[Round], klass: str) -> list[float]:
    """Return the TTFTs of a class (or `lone`), without failed requests."""
    return [r.ttft for r in _of_class(rounds, klass) if r.ticks and r.good]


def itls(rounds: Sequence[Round], klass: str) -> list[float]:
    """Return the gaps between tokens of a class.

    For the background, only gaps while longs or shorts run: the quiet time after them would lower
    all percentiles.
    """
    if klass != BACKGROUND:
        return [gap for record in _of_class(rounds, klass) for gap in record.itls]
    return [
        later - sooner
        for played in rounds
        for record in played.records
        if record.klass == BACKGROUND
        for sooner, later in pairwise(record.ticks)
        if later > 0 and sooner < foreground_end(played)
    ]


def class_rate(played: Round, klass: str) -> float | None:
    """Return a class's prompt and output tokens per second, from first arrival to last token.

    For the background, only output tokens while longs or shorts run.
    """
    records = [r for r in played.records if r.klass == klass]
    if klass == BACKGROUND:
        until = foreground_end(played)
        return _per_second(sum(0 < tick <= until for r in records for tick in r.ticks), until)
    if not records:
        return None
    tokens = sum(r.prompt_tokens + r.completed for r in records if not r.error)
    return _per_second(tokens, max(r.end for r in records) - min(r.sent for r in records))


def spread(played: Round, klass: str) -> float | None:
    """Return the time between the first and the last first-token of a class."""
    first_tokens = [r.ticks[0] for r in played.records if r.klass == klass and r.ticks]
    return max(first_tokens) - min(first_tokens) if len(first_tokens) > 1 else None


def backlogged_rate(played: Round, klass: str) -> float | None:
    """Return a class's tokens per second, prompts included, while some of it waits.

    Later some slots are empty under any scheduler.
    """
    records = [r for r in played.records if r.klass == klass and r.ticks]
    until = max((r.ticks[0] for r in records), default=0.0)
    tokens = sum(r.prompt_tokens + sum(tick <= until for tick in r.ticks) for r in records)
    return _per_second(tokens, until)


def total_rate(played: Round) -> float | None:
    """Return the tokens per second of the whole round, including the background's end.

    Both sides do the same work, so no scheduler gains by delaying some of it.
    """
    tokens = sum(
        sum(tick > 0 for tick in r.ticks)
        if r.klass == BACKGROUND
        else r.prompt_tokens + r.completed
        for r in played.records
        if not r.error
    )
    return _per_second(tokens, max((r.end for r in played.records), default=0.0))


# Special rates of classes whose requests are all present at the start.
RATES: Final = {BATCH: backlogged_rate}


@dataclass(frozen=True)
class Sides:
    baseline: Sequence[Round]
    candidate: Sequence[Round]

    def pooled(self, group: str, measure: str, samples: Samples, percent: float) -> Figure:
        theirs = percentile(samples(self.baseline, group), percent)
        ours = percentile(samples(self.candidate, group), percent)
        return Figure(group, measure, SECONDS, theirs, ours, ratio_of(ours, theirs))

    def median(
        self, group: str, measure: str, unit: str, of_round: Callable[[Round], float | None]
    ) -> Figure:
        """Return the median of the rounds, and of their ratios."""
        theirs, ours = list(map(of_round, self.baseline)), list(map(of_round, self.candidate))
        ratio = _median(map(ratio_of, ours, theirs))
        return Figure(group, measure, unit, _median(theirs), _median(ours), ratio)

    def ttfts(self, group: str) -> list[Figure]:
        return [self.pooled(group, f"TTFT p{percent}", ttfts, percent) for percent in (50, 99)]

    def of_class(self, klass: str) -> list[Figure]:
        # The background decodes before the clock starts.
        lines = [] if klass == BACKGROUND else self.ttfts(klass)
        if klass == LONG:
            lines.append(self.median(klass, SPREAD, SECONDS, partial(spread, klass=klass)))
        rate = partial(RATES.get(klass, class_rate), klass=klass)
        return [
            *lines,
            self.pooled(klass, "ITL p99", itls, 99),
            self.pooled(klass, "ITL max", itls, 100),
            self.median(klass, "tokens/s", RATE, rate),
        ]


def figures(baseline: Sequence[Round], candidate: Sequence[Round]) -> list[Figure]:
    sides, rounds = Sides(baseline, candidate), [*baseline, *candidate]
    played = {record.klass for played in rounds for record in played.records}
    return [
        *(line for klass in CLASSES if klass in played for line in sides.of_class(klass)),
        sides.median("all", "tokens/s", RATE, total_rate),
        sides.median("all", "all prompts done", SECONDS, foreground_end),
        *(sides.ttfts("lone") if any(played.lone for played in rounds) else ()),
    ]


def figure(lines: Sequence[Figure], group: str, measure: str) -> Figure:
    return next(line for line in lines if (line.group, line.measure) == (group, measure))


def show(value: float | None, unit: str) -> str:
    """Format a value with three digits, in milliseconds below a second."""
    if value is None:
        return "-"
    if unit == RATE:
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.2f} s" if value >= 1 else f"{show_number(value * 1000)} ms"


def show_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.3f}x"


def table(
    labels: Sequence[str], compared: Sequence[Sequence[Figure]], failed: Sequence[int]
) -> Table:
    """Return the table of a baseline and of the sides that were compared with it."""
    layout = plain_table(("", ""), labels)
    group = ""
    for lines in zip(*compared, strict=True):
        line = lines[0]
        if group and line.group != group:
            layout.add_section()
        layout.add_row(
            GROUPS[line.group] if line.group != group else "",
            line.measure,
            show(line.baseline, line.unit),
            *map(_candidate_cell, lines),
        )
        group = line.group
    if any(failed):
        layout.add_section()
        layout.add_row("failed requests", "", *map(str, failed), style="bold red")
    return layout


def _candidate_cell(line: Figure) -> Text:
    value = f"{show(line.candidate, line.unit)} ({show_ratio(line.ratio)})"
    return Text(value, style=STYLES[line.better])


def serve_summary(rounds: Sequence[Round], klass: str | None = None) -> dict[str, Any]:
    """Return a side's figures of one class or all, under the keys of `vllm bench serve`.

    Times are in milliseconds if the key says so, otherwise in seconds. Failed requests count only
    in `failed` and `errors`.
    """
    records = _of_class(rounds, klass) if klass else [r for p in rounds for r in p.records]
    good = [r for r in records if r.good]
    duration = sum(max((r.end for r in played.records), default=0.0) for played in rounds)
    detail = details(good)
    return {
        "duration": duration,
        "failed": len(records) - len(good),
        **served(good, duration),
        **{name: detail[name] for name in ("ttfts", "itls", "input_lens", "output_lens")},
        "errors": [r.error for r in records if r.error],
    }


def _of_class(rounds: Sequence[Round], klass: str) -> list[Outcome]:
    return [r for played in rounds for r in (*played.records, *played.lone) if r.klass == klass]


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def ratio_of(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def _median(values: Iterable[float | None]) -> float | None:
    return percentile((value for value in values if value is not None), 50)


def format_count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
