"""Two swimlane panels: the same arrivals under two schedulers, on one time axis.

Each request has a lane: grey from arrival to first token, then a tick per token. With the engine's
trace, grey ends when the engine starts the request, chunks of the prompt are boxes, and preemptions
are hatched boxes. The output is one SVG, or a page with it. Colour has no meaning of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template

from vllm_sched.bench.compare.compare import Comparison
from vllm_sched.bench.compare.report import (
    GROUPS,
    Figure,
    foreground_end,
    format_count,
    show,
    show_ratio,
)
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import BACKGROUND, BATCH, LONG, SHORT, TURN
from vllm_sched.bench.results.engine_trace import PREEMPTED, PREFILL, WAITING, Phase, Stories
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.errors import UsageError
from vllm_sched.files import write_whole
from vllm_sched.workers.launch import DEFAULT, NONE

SUFFIXES = (".html", ".svg")
ORDER = (LONG, SHORT, TURN, BATCH, BACKGROUND)
# Explanations of sides without a policy.
SIDE_EXPLANATIONS = {
    DEFAULT: "vLLM's own scheduler",
    NONE: "our scheduler without a policy, equivalent to vLLM's own",
}

WIDTH = 1200.0
LEFT, RIGHT = 150.0, 24.0  # gutters next to the lanes
LANE = 15.0
GROUP_GAP = 9.0
PANEL_HEAD = 50.0
AXIS = 34.0
PANEL_GAP = 10.0
HEAD = 100.0
# A gap counts as a pause above both of these limits.
PAUSE_FACTOR = 3.0
MIN_PAUSE_S = 0.1


@dataclass(frozen=True)
class Panel:
    role: str
    label: str
    played: Round
    numbers: str = ""
    stories: Stories = field(default_factory=dict)  # from the engine's trace

    @property
    def title(self) -> str:
        meant = SIDE_EXPLANATIONS.get(self.label.split(" ")[0])
        return f"{self.role}: {self.label}" + (f" ({meant})" if meant else "")

    def phases(self, record: Outcome) -> list[Phase]:
        """Return a request's phases in the engine, on the round's clock."""
        began = self.played.began
        return [
            Phase(phase.name, phase.start - began, phase.end - began, phase.tokens)
            for phase in self.stories.get(record.name, ())
        ]


@dataclass(frozen=True)
class Scale:
    """The mapping from seconds to pixels, and the length of a pause."""

    until: float
    pause: float

    def x(self, seconds: float) -> float:
        inner = WIDTH - LEFT - RIGHT
        return LEFT + inner * min(max(seconds / self.until, 0.0), 1.0)

    @classmethod
    def from_panels(cls, panels: Sequence[Panel]) -> Scale:
        """Return a scale on which all long and short requests of all panels fit."""
        ends = [foreground_end(panel.played) for panel in panels]
        until = max(*ends, 0.1) * 1.03
        gaps = sorted(
            later - sooner
            for panel in panels
            for record in panel.played.records
            for sooner, later in pairwise(record.ticks)
            if later > 0 and sooner < foreground_end(panel.played)
        )
        usual = gaps[len(gaps) // 2] if gaps else 0.0
        pause = max(MIN_PAUSE_S, PAUSE_FACTOR * usual)
        return cls(until, math.ceil(pause * 100) / 100)


def swimlane(panels: Sequence[Panel], *, title: str, subtitle: str = "") -> str:
    """Return the panels, one above the other, as a self-contained SVG."""
    scale = Scale.from_panels(panels)
    y = HEAD
    parts: list[str] = []
    for panel in panels:
        drawn, height = _panel(panel, scale, y)
        parts.append(drawn)
        y += height + PANEL_GAP
    height = y - PANEL_GAP + 6
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="swim" viewBox="0 0 {WIDTH:g} '
            f'{height:g}" width="{WIDTH:g}" height="{height:g}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<style>{_file('swimlane.css')}</style>",
            f'<rect class="paper" width="{WIDTH:g}" height="{height:g}"/>',
            _text(24, 30, title, "h1"),
            _text(24, 49, subtitle, "soft"),
            _legend(scale, 72, engines=any(panel.stories for panel in panels)),
            *parts,
            "</svg>\n",
        ]
    )


def page(svg: str, *, title: str, lines: Sequence[Figure], roles: Sequence[str], notes: str) -> str:
    template = Template(_file("swimlane.html"))
    head = "".join(f'<th scope="col">{escape(role)}</th>' for role in roles)
    return template.substitute(
        title=escape(title), svg=svg, head=head, rows="\n".join(_rows(lines)), notes=escape(notes)
    )


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: must end in {' or '.join(SUFFIXES)}; rename the file")


def write(comparison: Comparison, path: Path) -> None:
    check_suffix(path)
    index = comparison.typical()
    *_, lines = comparison.figures.values()
    panels = [
        Panel(role, side.label, side.rounds[index], _numbers(lines, role), side.stories)
        for role, side in zip(("baseline", "candidate"), comparison.drawn, strict=True)
    ]
    workload = comparison.plan.workload
    title = f"{workload.name}: the same arrivals under two schedulers"
    notes = (
        f"{_requests_text(panels[0].played.records)}. Seed {workload.seed}, round {index + 1} of "
        f"{comparison.plan.rounds}; worker flags: {' '.join(workload.worker_flags)}."
    )
    svg = swimlane(panels, title=title, subtitle=notes)
    if path.suffix == ".html":
        roles = [f"{panel.role}: {panel.label}" for panel in panels]
        svg = page(svg, title=title, lines=lines, roles=roles, notes=_method(comparison))
    write_whole(path, svg)


def _panel(panel: Panel, scale: Scale, top: float) -> tuple[str, float]:
    groups = [
        (klass, records)
        for klass in ORDER
        if (records := [r for r in panel.played.records if r.klass == klass])
    ]
    lanes = sum(len(records) for _, records in groups) * LANE + GROUP_GAP * len(groups)
    bottom = top + PANEL_HEAD + lanes
    parts = [
        _text(24, top + 16, panel.title, "h2"),
        _text(24, top + 34, panel.numbers, "num"),
        _axis(scale, top + PANEL_HEAD - 4, bottom),
    ]
    y = top + PANEL_HEAD
    for klass, records in groups:
        middle = y + len(records) * LANE / 2 + 4
        unit = "streams" if klass == BACKGROUND else f"x {records[0].prompt_tokens:,} tokens"
        parts.append(_text(24, middle - (6 if len(records) > 1 else 0), GROUPS[klass]))
        if len(records) > 1:
            parts.append(_text(24, middle + 9, f"{len(records)} {unit}", "soft"))
        for number, record in enumerate(sorted(records, key=lambda r: r.sent), 1):
            parts.append(_lane(record, f"{klass} {number}", scale, y, panel.phases(record)))
            y += LANE
        y += GROUP_GAP
    return "\n".join(parts), bottom + AXIS - top


def _lane(
    record: Outcome, name: str, scale: Scale, top: float, phases: Sequence[Phase] = ()
) -> str:
    middle = top + LANE / 2
    token_at = record.first_token
    waited_until = scale.until if token_at is None else token_at
    if phases:
        waited_until = next((p.end for p in phases if p.name == WAITING), record.sent)
    wait_start, wait_end = scale.x(record.sent), scale.x(waited_until)
    parts = [
        f"<title>{escape(_tooltip(record, name, phases))}</title>",
        _rect("hit", LEFT, top, WIDTH - LEFT - RIGHT, LANE),
    ]
    if wait_end > LEFT:
        parts.append(_rect("wait", wait_start, middle - 2.5, wait_end - wait_start, 5))
    parts += _boxes(record, phases, scale, middle)
    parts += _ticks(record, scale, middle)
    parts += _pauses(record, scale, middle)
    at = wait_end if token_at is None else scale.x(token_at)
    if token_at is not None and token_at > 0:
        parts.append(f'<circle class="{record.klass}" cx="{at:.1f}" cy="{middle:g}" r="3.4"/>')
    if record.error:
        parts.append(_text(at + 4, middle + 4, f"failed: {record.error[:80]}"))
    return f'<g class="lane">{"".join(parts)}</g>'


def _boxes(record: Outcome, phases: Sequence[Phase], scale: Scale, middle: float) -> Iterator[str]:
    styles = {PREFILL: f"chunk {record.klass}", PREEMPTED: "out"}
    for phase in phases:
        if phase.name not in styles or phase.end <= 0 or phase.start >= scale.until:
            continue
        begin, end = scale.x(phase.start), scale.x(phase.end)
        yield _rect(styles[phase.name], begin, middle - 4, max(end - begin, 0.4), 8)


def _ticks(record: Outcome, scale: Scale, middle: float) -> Iterator[str]:
    # Ticks on the same tenth of a pixel are drawn once, to keep the file small.
    columns = {round(scale.x(tick), 1) for tick in record.ticks if 0 <= tick <= scale.until}
    if columns:
        path = "".join(f"M{x:.1f} {middle - 4.5:g}v9" for x in sorted(columns))
        yield f'<path class="tick {record.klass}" d="{path}"/>'


def _pauses(record: Outcome, scale: Scale, middle: float) -> Iterator[str]:
    for sooner, later in pairwise(record.ticks):
        if later - sooner <= scale.pause or later <= 0 or sooner >= scale.until:
            continue
        begin, end = scale.x(sooner), scale.x(later)
        yield f'<path class="pause dash" d="M{begin:.1f} {middle:g}H{end:.1f}"/>'
        yield f'<path class="pause stop" d="M{end:.1f} {middle - 6.5:g}v13"/>'


def _tooltip(record: Outcome, name: str, phases: Sequence[Phase] = ()) -> str:
    parts = [name, f"{record.prompt_tokens:,}-token prompt"]
    if record.sent > 0:
        parts.append(f"arrived at {record.sent:.2f} s")
    if record.ticks and record.sent > 0:
        parts.append(f"first token after {show(record.ttft, 's')}")
    waits = [phase for phase in phases if phase.name == WAITING]
    if chunks := [phase for phase in phases if phase.name == PREFILL]:
        queued = show(sum(wait.end - wait.start for wait in waits), "s")
        parts.append(f"in the engine's queue {queued}")
        parts.append(f"prompt in {format_count(len(chunks), 'chunk')}")
    if out := sum(phase.name == PREEMPTED for phase in phases):
        parts.append(f"preempted {format_count(out, 'time')}")
    parts.append(f"{record.completed} tokens")
    if record.itls:
        parts.append(f"longest gap {show(max(record.itls), 's')}")
    if record.error:
        parts.append(f"failed: {record.error}")
    return ", ".join(parts)


def _axis(scale: Scale, top: float, bottom: float) -> str:
    step = _nice(scale.until / 10)
    parts = [_text(WIDTH - RIGHT, bottom + 29, "seconds after the long prompts", "soft", "end")]
    for index in range(int(scale.until / step) + 1):
        x = scale.x(index * step)
        parts.append(f'<path class="rule" d="M{x:.1f} {top:g}V{bottom:g}"/>')
        parts.append(_text(x, bottom + 14, f"{index * step:g}", "soft num", "middle"))
    return "".join(parts)


def _legend(scale: Scale, y: float, *, engines: bool = False) -> str:
    at = 24.0
    parts: list[str] = []

    def entry(mark: str, words: str, width: float) -> None:
        nonlocal at
        parts.append(mark + _text(at + 30, y + 4, words, "soft"))
        at += width

    entry(
        _rect("wait", at, y - 2.5, 24, 5),
        "waiting for the engine" if engines else "waiting for the first token",
        185 if engines else 215,
    )
    if engines:
        chunks = "".join(_rect("chunk long", at + dx, y - 4, 11, 8) for dx in (0, 12))
        entry(chunks, "a chunk of the prompt", 190)
        entry(_rect("out", at, y - 4, 24, 8), "preempted", 120)
    entry(f'<circle class="short" cx="{at + 14:g}" cy="{y:g}" r="3.4"/>', "first token", 118)
    ticks = "".join(f"M{at + dx:g} {y - 4.5:g}v9" for dx in (4, 9, 14, 19))
    entry(f'<path class="tick short" d="{ticks}"/>', "a token", 98)
    pause = (
        f'<path class="pause dash" d="M{at:g} {y:g}h22"/>'
        f'<path class="pause stop" d="M{at + 22:g} {y - 6.5:g}v13"/>'
    )
    entry(pause, f"a pause: more than {show(scale.pause, 's')} between two tokens", 0)
    return "".join(parts)


def _numbers(lines: Sequence[Figure], role: str) -> str:
    wanted = [
        (SHORT, "TTFT p50", "short TTFT p50"),
        (SHORT, "TTFT p99", "p99"),
        (TURN, "TTFT p50", "turn TTFT p50"),
        (TURN, "TTFT p99", "p99"),
        (LONG, "TTFT p50", "long TTFT p50"),
        (BACKGROUND, "ITL p99", "decode ITL p99"),
        ("all", "tokens/s", "tokens/s"),
    ]
    values = {(line.group, line.measure): show(getattr(line, role), line.unit) for line in lines}
    shown = (
        f"{name} {values[group, measure]}"
        for group, measure, name in wanted
        if (group, measure) in values
    )
    return "over all rounds   " + "   \u00b7   ".join(shown)


def _rows(lines: Sequence[Figure]) -> Iterator[str]:
    group = ""
    for line in lines:
        begins = line.group != group
        group = line.group
        cells = [show(line.baseline, line.unit), show(line.candidate, line.unit)]
        verdict = {True: "better", False: "worse", None: ""}[line.better]
        yield (
            f'<tr{" class=begins" if begins else ""}><th scope="row">'
            f"{escape(GROUPS[line.group]) if begins else ''}</th><td>{escape(line.measure)}</td>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + f'<td class="{verdict}">{show_ratio(line.ratio)} <small>{verdict}</small></td></tr>'
        )


def _requests_text(records: Sequence[Outcome]) -> str:
    of = {klass: [r for r in records if r.klass == klass] for klass in ORDER}
    parts = [f"{len(of[BACKGROUND])} running decodes"] if of[BACKGROUND] else []
    parts += [
        f"{len(of[klass])} {klass} prompts of {of[klass][0].prompt_tokens:,} tokens"
        for klass in (LONG, SHORT, TURN)
        if of[klass]
    ]
    if of[BATCH]:
        parts.append(f"{len(of[BATCH])} batch requests")
    return ", ".join(parts)


def _method(comparison: Comparison) -> str:
    plan = comparison.plan
    rounds = f"{plan.rounds} round{'s' if plan.rounds > 1 else ''}"
    return (
        f"Model {Path(plan.model).name}. Both workers stayed up on the same machine and alternated "
        f"in going first, {rounds} after a discarded one. "
        "Percentiles pool all rounds; the ratio of a rate is the median of the rounds' ratios. "
        "Tokens/s of everything counts prompts and outputs over the whole round, the same work "
        "on both sides. A decode's gaps count while long or short prompts were running. "
        f"{comparison.warning()}"
    )


def _nice(step: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(step))
    return next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= step)


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    size = f'width="{width:.1f}" height="{height:g}"'
    return f'<rect class="{style}" x="{x:.1f}" y="{y:g}" {size}/>'


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    if not words:
        return ""
    return (
        f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}" '
        f'xml:space="preserve">{escape(words)}</text>'
    )


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
