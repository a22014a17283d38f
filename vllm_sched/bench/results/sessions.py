"""Figures of sessions: how long tasks take, and what their prompts repeat."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile_of_sorted
from vllm_sched.bench.results.summary import milliseconds, plain_table
from vllm_sched.bench.traffic.types import Request

# Groups of tasks by their turns, without sub-agents' turns: upper limits.
TURN_LIMITS: Final = (5, 20, 100)
HIGH_REUSE: Final = 0.9
MANY_SECONDS: Final = 100.0  # shown without fractions


@dataclass(slots=True)
class PlayedSession:
    name: str
    at: float  # planned start
    turns: int  # planned, without sub-agents' turns
    klass: str = ""
    tenant: str = ""
    done: int = 0  # turns with a complete response
    sub_agents: int = 0  # that ended
    think_s: float = 0.0  # of its turns, and of the sub-agents that it waited for
    end: float | None = None  # of the last response, once the task is finished
    failed: bool = False

    @classmethod
    def from_request(cls, request: Request, at: float) -> PlayedSession:
        session = request.begins
        turns = len(session.turns) if session else 1
        return cls(session.name if session else "", at, turns, request.klass, request.tenant)

    @property
    def seconds(self) -> float | None:
        """The time to finish the task; None if it is not finished."""
        return None if self.end is None else self.end - self.at

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.name,
            "class": self.klass,
            "tenant": self.tenant,
            "start": self.at,
            "turns": self.turns,
            "done": self.done,
            "think_s": self.think_s,
            "task_s": self.seconds,
            "failed": self.failed,
        }


def session_figures(
    sessions: Sequence[PlayedSession], outcomes: Iterable[Outcome]
) -> dict[str, Any]:
    """Return the figures as JSON, times in seconds; each session is in `tasks`."""
    finished = [session for session in sessions if session.seconds is not None]
    failed = sum(session.failed for session in sessions)
    return {
        "begun": len(sessions),
        "finished": len(finished),
        "failed": failed,
        "unfinished": len(sessions) - len(finished) - failed,
        "sub_agents": sum(session.sub_agents for session in sessions),
        **_percentiles("turns", (session.turns for session in sessions)),
        **_percentiles("task_s", map(_task_s, finished)),
        **_percentiles("task_without_thinking_s", map(_without_thinking, finished)),
        **_turn_figures([outcome for outcome in outcomes if outcome.good and outcome.session]),
        "by_turns": {
            name: {"finished": len(group), **_percentiles("task_s", map(_task_s, group))}
            for name, group in _by_turns(finished).items()
        },
        "tasks": [session.to_json() for session in sessions],
    }


def _turn_figures(turns: Sequence[Outcome]) -> dict[str, float | None]:
    """Return the figures of complete turns: TTFT, and how much of the prompts was not new."""
    first = [turn for turn in turns if not turn.context_tokens]
    later = [turn for turn in turns if turn.context_tokens]
    repeating = [t for t in turns if t.context_tokens >= HIGH_REUSE * t.prompt_tokens]
    reported = [turn for turn in turns if turn.cached_tokens is not None]
    return {
        **_percentiles("first_ttft_s", (turn.ttft for turn in first)),
        **_percentiles("later_ttft_s", (turn.ttft for turn in later)),
        "repeated_share": _share(sum(turn.context_tokens for turn in turns), _prompt_tokens(turns)),
        "high_reuse_turns": _share(len(repeating), len(turns)),
        "cached_share": _share(
            sum(turn.cached_tokens or 0 for turn in reported), _prompt_tokens(reported)
        ),
    }


def _by_turns(finished: Iterable[PlayedSession]) -> dict[str, list[PlayedSession]]:
    groups: defaultdict[str, list[PlayedSession]] = defaultdict(list)
    for session in sorted(finished, key=lambda session: session.turns):
        groups[_turn_range(session.turns)].append(session)
    return groups


def session_table(figures: dict[str, Any]) -> Table:
    layout = plain_table([""], [""], show_header=False)
    failed = figures["failed"]
    layout.add_row("tasks finished", f"{figures['finished']:,}")
    layout.add_row("failed", f"{failed:,}", style="bold red" if failed else "")
    layout.add_row("not finished", f"{figures['unfinished']:,}")
    layout.add_row("turns p50 / p90", f"{_percentile_pair(figures, 'turns', _count)}")
    layout.add_row("sub-agents", f"{figures['sub_agents']:,}", end_section=True)
    for title, name, percents in (
        ("task p50 / p90", "task_s", (50, 90)),
        ("task time without think time", "task_without_thinking_s", (50, 90)),
        ("first turn's TTFT p50 / p99", "first_ttft_s", (50, 99)),
        ("later turns' TTFT p50 / p99", "later_ttft_s", (50, 99)),
    ):
        layout.add_row(title, _percentile_pair(figures, name, _time, percents))
    for name, group in figures["by_turns"].items():
        layout.add_row(
            f"task of {name} turns p50 / p90 ({group['finished']:,})",
            _percentile_pair(group, "task_s", _time),
        )
    layout.add_section()
    layout.add_row("prompt tokens from earlier turns", _percent(figures["repeated_share"]))
    layout.add_row("turns with at least 90 % earlier tokens", _percent(figures["high_reuse_turns"]))
    layout.add_row("prompt tokens from caches", _percent(figures["cached_share"]))
    return layout


def cut_warning(count: int, place: str, *, sessions: bool) -> str:
    """Return the warning on requests that did not fit a model or a fleet."""
    what = "requests were shortened"
    if sessions:
        what = "turns were compacted to the shared prefix and their new text"
    return f"{count} {what} to fit the {place}; --scale shortens all"


def unfinished_warning(sessions: Sequence[PlayedSession]) -> list[str]:
    """Return the warning on task times if some tasks did not finish."""
    count = sum(session.end is None for session in sessions)
    if not count:
        return []
    return [
        f"{count} of {len(sessions)} tasks did not finish; task times cover the finished ones, "
        "which are shorter"
    ]


def _task_s(session: PlayedSession) -> float:
    return session.seconds or 0.0


def _without_thinking(session: PlayedSession) -> float:
    return _task_s(session) - session.think_s


def _prompt_tokens(turns: Iterable[Outcome]) -> int:
    return sum(turn.prompt_tokens for turn in turns)


def _turn_range(turns: int) -> str:
    low = 1
    for limit in TURN_LIMITS:
        if turns <= limit:
            return f"{low}-{limit}"
        low = limit + 1
    return f"{low} or more"


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        f"p{percent}_{name}": percentile_of_sorted(ordered, percent) if ordered else None
        for percent in (50, 90, 99)
    }


def _percentile_pair(
    figures: dict[str, Any], name: str, shown: Any, percents: tuple[int, int] = (50, 90)
) -> str:
    return " / ".join(shown(figures[f"p{percent}_{name}"]) for percent in percents)


def _time(value: float | None) -> str:
    if value is not None and value >= MANY_SECONDS:
        return f"{value:,.0f} s"
    return milliseconds(None if value is None else value * 1000)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{math.floor(value * 1000) / 10:g} %"
