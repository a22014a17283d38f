"""Predict TPOT and TTFT of machines that others measured, with the built-in profiles.

    python -m benchmarks.silicon                # median and worst error by set
    python -m benchmarks.silicon --rows         # each row too
    python -m benchmarks.silicon --save silicon.json

The rows come from aiconfigurator-core's wheel (`silicon_sample.csv`: vLLM, one kind of worker), in
the environment of `benchmarks.fit_profiles`. Each row is a closed loop: so many requests at once on
one worker, each followed by the next. The 70B rows have the GPUs, lengths and concurrencies of
InferenceMAX (October 2025). Its public scripts send ten requests for each concurrent one, of 0.8
to 1 times the row's lengths, and count all of them: also the first, which arrive together. That is
assumed of all rows, and nothing is fitted to them. Rows of other models, precisions and layouts
are counted, not predicted.

A prediction has no front: HTTP, tokenizer and client add to a TTFT. The last column shows the TTFT
error of the other rows with the front that a set's rows of least concurrency show.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.fit_profiles import environment
from vllm_sched.cost.profiles import ProfileKey, measured
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.types import Job

MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
}
WAVES = 10  # requests for each concurrent one
SHORTEST = 0.8  # of a length
FAR_OFF = 0.25
TTFT_TARGET, TPOT_TARGET = 0.20, 0.08
# Why the predictions of rows may be off, by `Row.deployment`.
REASONS = {
    "llama-3.1-70b fp8 b200": (
        "InferenceMAX has an fp8 KV cache there, with which the source's steps are 6 % off; "
        "TTFT lacks a front (last column)"
    ),
    "llama-3.1-8b fp8 h200": (
        "the rows prefill up to 95 % of the tokens a second of the data sheet's peak, beside "
        "decodes: their concurrency is not one worker's"
    ),
    "qwen3-235b-a22b fp8 h200": "vLLM 0.12; the profile has 0.24's kernels for experts",
    "qwen3-32b bf16 h100": "vLLM 0.12; the profile has 0.24's kernels",
    "qwen3-32b fp8 h100": (
        "two of three rows decode faster than the memory's bandwidth reads weights and a bf16 "
        "KV cache"
    ),
}


@dataclass(frozen=True)
class Row:
    """A measured row with its prediction."""

    model: str
    system: str
    dtype: str
    tp: int
    concurrency: int
    prompt: int
    output: int
    version: str
    tpot_ms: float
    ttft_ms: float
    predicted_tpot_ms: float = 0.0
    predicted_ttft_ms: float = 0.0

    @property
    def deployment(self) -> str:
        return f"{self.model} {self.dtype} {self.system}"

    @property
    def tpot_error(self) -> float:
        return self.predicted_tpot_ms / self.tpot_ms - 1

    @property
    def ttft_error(self) -> float:
        return self.predicted_ttft_ms / self.ttft_ms - 1


def sample_path() -> Path:
    """Return the rows' file in the environment of the source."""
    home = environment().parents[1]
    paths = sorted(home.glob("lib/*/site-packages/aiconfigurator_core/systems/silicon_sample.csv"))
    if not paths:
        raise SystemExit(f"{home} has no silicon_sample.csv; run python -m benchmarks.fit_profiles")
    return paths[0]


def read_rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """Return the rows that a built-in profile fits, and why others do not."""
    measured_keys, rows, left = measured(), [], Counter[str]()
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["backend"] != "vllm":
                continue
            if (why := _unfit(row)) is not None:
                left[why] += 1
                continue
            dtype = "fp8" if row["precision"] == "fp8" else "bf16"
            system = row["system"].removesuffix("_sxm")
            key = ProfileKey(MODELS[row["model_path"]], system, dtype, int(row["tp_size"]))
            if key not in measured_keys:
                left["no profile of this size"] += 1
                continue
            rows.append(
                Row(
                    *(key.model, key.system, key.dtype, key.tp),
                    int(row["batch_size"]),
                    int(row["isl"]),
                    int(row["osl"]),
                    row["backend_version"] or "unknown",
                    float(row["silicon_tpot_ms"]),
                    float(row["silicon_ttft_ms"]),
                )
            )
    return rows, left


def _unfit(row: Mapping[str, str]) -> str | None:
    if row["model_path"] not in MODELS:
        return "another model"
    if row["mode"] != "agg":
        return "separate prefill and decode workers"
    if row["precision"] not in ("", "fp8", "bf16"):
        return "another precision"
    if row["pp_size"] not in ("", "1") or row["attention_dp_size"] not in ("", "1"):
        return "pipeline or data parallel"
    widths = [int(row[name] or 1) for name in ("moe_tp_size", "moe_ep_size")]
    if "A22B" in row["model_path"] and widths[0] * widths[1] != int(row["tp_size"]):
        return "another layout of the experts"
    return None


def predict(row: Row) -> Row:
    """Play the row's closed loop on a fluid engine."""
    key = ProfileKey(row.model, row.system, row.dtype, row.tp)
    engine = FluidEngine(replace(of_profile(key.name), prefix_caching=False, max_num_seqs=1024))
    rng = random.Random(row.concurrency * row.prompt)
    count = WAVES * row.concurrency
    lengths = [
        tuple(max(round(n * rng.uniform(SHORTEST, 1)), 2) for n in (row.prompt, row.output))
        for _ in range(count)
    ]
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    ttfts, tpots, submitted = [], [], 0

    def submit(now: float) -> None:
        nonlocal submitted
        if submitted < count:
            name = str(submitted)
            prompt, output = lengths[submitted]
            sent[name] = now
            engine.submit(Job(name, prompt, output, text=submitted), now)
            submitted += 1

    for _ in range(row.concurrency):
        submit(0.0)
    while (at := engine.next_at()) < float("inf"):
        for event in engine.advance(at):
            name = event.job_id
            if name not in first:
                first[name] = event.at
            if event.finished:
                ttfts.append(first[name] - sent[name])
                tpots.append((event.at - first[name]) / (lengths[int(name)][1] - 1))
                submit(event.at)
    return replace(
        row,
        predicted_tpot_ms=1000 * statistics.fmean(tpots),
        predicted_ttft_ms=1000 * statistics.fmean(ttfts),
    )


def sets(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each model, precision, system and vLLM."""
    by_set: dict[str, list[Row]] = {}
    for row in rows:
        by_set.setdefault(f"{row.deployment}, vLLM {row.version}", []).append(row)
    yield from by_set.items()


def summary(rows: list[Row]) -> dict[str, float]:
    tpot, ttft = [abs(r.tpot_error) for r in rows], [abs(r.ttft_error) for r in rows]
    return {
        "rows": len(rows),
        "tpot_median": statistics.median(tpot),
        "tpot_worst": max(tpot),
        "tpot_bias": statistics.median(r.tpot_error for r in rows),
        "ttft_median": statistics.median(ttft),
        "ttft_worst": max(ttft),
        "ttft_bias": statistics.median(r.ttft_error for r in rows),
        **_with_front(rows),
    }


def _with_front(rows: list[Row]) -> dict[str, float]:
    """Return the front that the rows of least concurrency show, and the others' TTFT error."""
    least = min(r.concurrency for r in rows)
    few = [r.ttft_ms - r.predicted_ttft_ms for r in rows if r.concurrency == least]
    front = max(statistics.median(few), 0.0)
    off = [
        abs((r.predicted_ttft_ms + front) / r.ttft_ms - 1) for r in rows if r.concurrency > least
    ]
    return {"front_ms": front, "ttft_median_with_front": statistics.median(off)} if off else {}


def _times(error: float) -> str:
    return f"{error:.0%}" if error < 10 else f"{1 + error:.0f} x"


def _front(figures: Mapping[str, float]) -> str:
    if "front_ms" not in figures:
        return "-"
    return f"{figures['ttft_median_with_front']:.0%} ({figures['front_ms']:.0f} ms)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    samples, left = read_rows(sample_path())
    rows = [predict(row) for row in samples]
    print(
        f"{'set':40}{'rows':>5}{'TPOT median':>13}{'worst':>7}{'TTFT median':>14}{'worst':>8}"
        f"  {'with front':>12}"
    )
    for name, of_set in sets(rows):
        figures = summary(of_set)
        print(
            f"{name:40}{len(of_set):5}{figures['tpot_median']:10.1%} ({figures['tpot_bias']:+.0%})"
            f"{figures['tpot_worst']:7.0%}"
            f"{figures['ttft_median']:7.0%} ({figures['ttft_bias']:+.0%})"
            f"{_times(figures['ttft_worst']):>8}  {_front(figures):>12}"
        )
        over = figures["tpot_median"] > TPOT_TARGET or figures["ttft_median"] > TTFT_TARGET
        if over:
            why = REASONS.get(of_set[0].deployment, "no reason known")
            print(f"    above {TPOT_TARGET:.0%} or {TTFT_TARGET:.0%}: {why}")
        if args.rows:
            for r in of_set:
                errors = {"TPOT": r.tpot_error, "TTFT": r.ttft_error}
                far = [name for name, error in errors.items() if abs(error) > FAR_OFF]
                off = f"  off: {', '.join(far)}" if far else ""
                print(
                    f"    tp{r.tp} {r.concurrency:4} x {r.prompt:5}/{r.output:<5} TPOT "
                    f"{r.predicted_tpot_ms:6.1f} of {r.tpot_ms:6.1f} ms, TTFT "
                    f"{r.predicted_ttft_ms:6.0f} of {r.ttft_ms:6.0f} ms{off}"
                )
    print(f"not predicted: {', '.join(f'{n} rows of {why}' for why, n in left.items())}")
    if args.save:
        content = {
            "sets": {name: summary(of_set) for name, of_set in sets(rows)},
            "rows": [asdict(row) for row in rows],
            "left_out": left,
        }
        args.save.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
