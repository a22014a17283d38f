"""Figures of outcomes: JSON with the keys of `vllm bench serve`, and a table."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from rich import box
from rich.table import Table

from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile_of_sorted

PERCENTILES: Final = (50, 90, 95, 99)
ALL: Final = "all"
BUCKET_S: Final = 1.0
MAX_SHOWN_CLASSES: Final = 6  # classes in a table
SHOWN: Final = {
    "TTFT p50 / p99": ("median_ttft_ms", "p99_ttft_ms"),
    "TPOT p50 / p99": ("median_tpot_ms", "p99_tpot_ms"),
    "ITL p99 / max": ("p99_itl_ms", "max_itl_ms"),
    "whole p50 / p99": ("median_e2el_ms", "p99_e2el_ms"),
}


def summary(outcomes: Sequence[Outcome], duration: float, targets: Targets) -> dict[str, Any]:
    """Return the figures under vLLM's keys; in milliseconds if the key says so, else in seconds.

    Interrupted requests are left out. As in vLLM, a failed request has zeros in the sample lists.
    Our own keys are `interrupted`, `goodput_share`, `merged_tokens` and `max_*_ms`.
    """
    ended = [outcome for outcome in outcomes if not outcome.interrupted]
    good = [outcome for outcome in ended if outcome.good]
    met = sum(map(targets.is_met_by, good))
    return {
        "duration": duration,
        "failed": len(ended) - len(good),
        "interrupted": len(outcomes) - len(ended),
        "request_goodput": _rate(met, duration) if targets else None,
        "max_output_tokens_per_s": _most_tokens_per_s(good),
        "max_concurrent_requests": _most_at_once(good),
        "rtfx": 0.0,
        **served(good, duration),
        # Our own: the share of all ended requests, with failures, that met the targets.
        "goodput_share": met / len(ended) if targets and ended else None,
    }


def served(good: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Return counts, rates and latencies of complete requests under vLLM's keys."""
    prompts, outputs = sum(o.prompt_tokens for o in good), sum(o.completed for o in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": _rate(len(good), duration),
        "output_throughput": _rate(outputs, duration),
        "total_token_throughput": _rate(prompts + outputs, duration),
        # Tokens that shared an event with another token have no visible gap.
        "merged_tokens": sum(max(0, o.completed - len(o.ticks)) for o in good),
    }
    for name, values in samples(good).items():
        figures |= _spread(name, values)
    return figures


def samples(good: Iterable[Outcome]) -> dict[str, list[float]]:
    """Return sorted latencies in seconds under the names of targets."""
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for outcome in good:
        samples["ttft"].append(outcome.ttft)
        samples["e2el"].append(outcome.latency)
        samples["itl"] += outcome.itls
        if (tpot := outcome.tpot) is not None:
            samples["tpot"].append(tpot)
    for values in samples.values():
        values.sort()
    return samples


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return every request's samples in order of time; vLLM's keys, then ours."""
    ended = [outcome for outcome in outcomes if not outcome.interrupted]
    return {
        "input_lens": [o.prompt_tokens for o in ended],
        "output_lens": [o.completed if o.good else 0 for o in ended],
        "ttfts": [o.ttft if o.good else 0.0 for o in ended],
        "itls": [o.itls if o.good else [] for o in ended],
        "latencies": [o.latency if o.good else 0.0 for o in ended],
        "start_times": [o.at for o in ended],
        # The delay by the client, not the server.
        "queue_times": [o.late for o in ended],
        "errors": [o.error for o in ended],
        "classes_of": [o.klass for o in ended],
        "tenants_of": [o.tenant for o in ended],
        "workers_of": [o.worker for o in ended],
        **(_turns(ended) if any(o.session for o in ended) else {}),
    }


def _turns(ended: Sequence[Outcome]) -> dict[str, list[Any]]:
    return {
        "sessions_of": [o.session for o in ended],
        "turns_of": [o.turn for o in ended],
        "context_lens": [o.context_tokens for o in ended],
        "cached_lens": [o.cached_tokens for o in ended],
    }


def by_class(
    outcomes: Sequence[Outcome], duration: float, targets: Targets
) -> dict[str, dict[str, Any]]:
    """Return the figures of each class in order of first arrival, then those of all."""
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.klass, []).append(outcome)
    classes = {name: summary(of_class, duration, targets) for name, of_class in parts.items()}
    return classes | {ALL: summary(outcomes, duration, targets)}


def table(classes: dict[str, dict[str, Any]], targets: Targets) -> Table:
    """Return a table with one column per class; only the most frequent if there are many."""
    named = [name for name in classes if name != ALL]
    if left_out := max(len(named) - MAX_SHOWN_CLASSES, 0):
        named.sort(key=lambda name: -classes[name]["completed"])
        del named[MAX_SHOWN_CLASSES:]
    shown = {name: classes[name] for name in (*(named if len(named) > 1 else ()), ALL)}
    layout = plain_table([""], shown, show_header=len(shown) > 1)
    if left_out:
        layout.caption = f"--save also writes {left_out} more classes"
        layout.caption_justify = "left"
    columns = shown.values()

    def row(title: str, key: str, format_figure: Callable[[Any], str], **style: Any) -> None:
        layout.add_row(title, *(format_figure(figures[key]) for figures in columns), **style)

    failed = any(figures["failed"] for figures in columns)
    row("requests done", "completed", "{:,}".format)
    row("failed", "failed", "{:,}".format, style="bold red" if failed else "")
    row("requests/s", "request_throughput", show_number)
    if targets:
        row("goodput, req./s", "request_goodput", show_number)
        row("share in time", "goodput_share", _share)
    row("output tokens/s", "output_throughput", show_number)
    row("all tokens/s", "total_token_throughput", show_number, end_section=True)
    for measure, keys in SHOWN.items():
        layout.add_row(
            measure,
            *(" / ".join(milliseconds(figures[key]) for key in keys) for figures in columns),
        )
    return layout


def plain_table(
    texts: Iterable[str], figures: Iterable[str], *, long_texts: bool = False, **options: Any
) -> Table:
    """Return a table with columns of texts and of figures; only long texts, or figures, fold."""
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for heading in texts:
        layout.add_column(heading, no_wrap=not long_texts, overflow="fold")
    for heading in figures:
        layout.add_column(heading, justify="right", no_wrap=long_texts, overflow="fold")
    return layout


def milliseconds(value: float | None) -> str:
    """Format a latency with three digits; in seconds from one second."""
    if value is None:
        return "-"
    return f"{show_number(value / 1000)} s" if value >= 1000 else f"{show_number(value)} ms"


def show_number(value: float) -> str:
    """Format a number with three digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    # Rounded down, so that 100 % means that no request was late.
    return "-" if value is None else f"{math.floor(value * 100)} %"


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    if not values:
        keys = ["mean", "median", "std", *(f"p{percent}" for percent in PERCENTILES), "max"]
        return {f"{key}_{name}_ms": None for key in keys}
    mean = statistics.fmean(values)
    # Not statistics.pstdev: it is exact, and takes seconds for a million gaps.
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return {
        f"mean_{name}_ms": mean * 1000,
        f"median_{name}_ms": percentile_of_sorted(values, 50) * 1000,
        f"std_{name}_ms": deviation * 1000,
        **{
            f"p{percent}_{name}_ms": percentile_of_sorted(values, percent) * 1000
            for percent in PERCENTILES
        },
        f"max_{name}_ms": values[-1] * 1000,
    }


def _most_tokens_per_s(good: Sequence[Outcome]) -> float:
    first = min((o.at for o in good), default=0.0)
    tokens: defaultdict[int, float] = defaultdict(float)
    for outcome in good:
        for tick in outcome.ticks:
            tokens[_bucket(tick - first)] += 1
        # With only the first token and the end recorded, spread the rest evenly between them.
        unseen = outcome.completed - len(outcome.ticks)
        if unseen > len(outcome.ticks) > 1:
            buckets = range(_bucket(outcome.ticks[0] - first), _bucket(outcome.end - first) + 1)
            for bucket in buckets:
                tokens[bucket] += unseen / len(buckets)
    return max(tokens.values(), default=0) / BUCKET_S


def _most_at_once(good: Sequence[Outcome]) -> int:
    first = min((o.at for o in good), default=0.0)
    changes: Counter[int] = Counter()
    for outcome in good:
        changes[_bucket(outcome.at - first)] += 1
        changes[_bucket(outcome.end - first) + 1] -= 1
    running = accumulate(changes[bucket] for bucket in sorted(changes))
    return max(running, default=0)


def _bucket(seconds: float) -> int:
    return int(seconds / BUCKET_S)
