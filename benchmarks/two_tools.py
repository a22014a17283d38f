"""Compare the figures of `vllm bench serve` and `vllm-sched bench` for one worker.

    python -m benchmarks.two_tools
    python -m benchmarks.two_tools --concurrency 8 --rounds 8
    python -m benchmarks.two_tools --rounds 4 --add out/tools.json    # repeat to add rounds

A real worker of the tiny model runs on the CPU. The tools take turns, with the same sizes, rate,
number of requests and targets. Each figure has its median, minimum and maximum over the rounds;
figures within a tool's range are not told apart. Each round draws other texts and arrival times, so
that prefix caches have no effect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_sched.errors import VllmSchedError
from vllm_sched.workers import launch
from vllm_sched.workers.tiny_model import tiny_model

# `vllm bench serve`, under whichever name vLLM is installed.
THEIRS: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
GOODPUT: Final = ("--goodput", "ttft:5000", "e2el:5000")
MODEL: Final = "tiny"
FLAGS: Final = (
    "--max-model-len", "16384", "--max-num-batched-tokens", "512", "--max-num-seqs", "64",
    "--served-model-name", MODEL,
)  # fmt: skip
EXACTLY: Final = ("completed", "failed", "total_output_tokens")
RATES: Final = (
    "total_input_tokens", "duration", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput",
)  # fmt: skip
LATENCIES: Final = tuple(
    f"{kind}_{measure}_ms"
    for measure in ("ttft", "tpot", "itl", "e2el")
    for kind in ("mean", "median", "p99")
)
Rounds = dict[str, list[dict[str, float]]]  # by tool


@dataclass(frozen=True)
class Load:
    """The worker, and the load of a round."""

    url: str
    model: str
    requests: int
    rate: float
    prompt: int
    output: int
    concurrency: int | None = None  # of a closed loop, instead of the rate


async def run(*command: str) -> None:
    """Run a command; raise an error if it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise VllmSchedError(f"{command[2]}: {out.decode()[-3000:]}")


async def theirs(load: Load, folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """Measure with `vllm bench serve`."""
    closed = () if load.concurrency is None else ("--max-concurrency", str(load.concurrency))
    await run(
        sys.executable, "-c", THEIRS,
        "--base-url", load.url, "--backend", "openai", "--endpoint", "/v1/completions",
        "--model", load.model, "--tokenizer", str(tiny_model()), "--dataset-name", "random",
        "--random-input-len", str(load.prompt), "--random-output-len", str(load.output),
        "--num-prompts", str(load.requests), "--ignore-eos", "--temperature", "0",
        "--request-rate", "inf" if closed else str(load.rate), *closed, "--seed", str(seed),
        "--percentile-metrics", "ttft,tpot,itl,e2el", *GOODPUT,
        "--save-result", "--save-detailed", "--result-dir", str(folder),
        "--result-filename", "theirs.json", "--disable-tqdm",
    )  # fmt: skip
    return dict(json.loads((folder / "theirs.json").read_text()))


async def ours(load: Load, folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """Measure with `vllm-sched bench`."""
    closed = load.concurrency is not None
    await run(
        sys.executable, "-m", "vllm_sched.cli.main", "bench", "--url", load.url,
        "--model", load.model, "--workload", f"{load.prompt}x{load.output}",
        "--num-requests", str(load.requests), *GOODPUT,
        "--concurrency" if closed else "--request-rate",
        str(load.concurrency if closed else load.rate),
        "--seed", str(seed), "--save", str(folder / "ours.json"),
    )  # fmt: skip
    return dict(json.loads((folder / "ours.json").read_text()))


TOOLS: Final = {"ours": ours, "theirs": theirs}


async def measure_round(load: Load, number: int, folder: Path) -> dict[str, dict[str, float]]:
    """Measure with both tools, in alternating order."""
    by_tool = {}
    for name in sorted(TOOLS, reverse=bool(number % 2)):
        result = await TOOLS[name](load, folder, seed=number)
        by_tool[name] = {key: result[key] for key in (*EXACTLY, *RATES, *LATENCIES)}
    return by_tool


@dataclass(frozen=True)
class Figure:
    """The values of one figure by both tools, in every round."""

    key: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratio(self) -> float:
        theirs = statistics.median(self.theirs)
        return statistics.median(self.ours) / theirs if theirs else float("nan")

    @property
    def apart(self) -> bool:
        """True if the tools differ by more than either tool's own range."""
        if self.key in EXACTLY:
            return {*self.ours} != {*self.theirs}
        gap = abs(statistics.median(self.ours) - statistics.median(self.theirs))
        return gap > max(max(values) - min(values) for values in (self.ours, self.theirs))


def figures(rounds: Rounds) -> list[Figure]:
    return [
        Figure(key, *([played[key] for played in rounds[name]] for name in TOOLS))
        for key in (*EXACTLY, *RATES, *LATENCIES)
    ]


def table(figures: Sequence[Figure]) -> Table:
    """Return the table of medians, with minimum and maximum in brackets."""
    layout = Table(box=box.MARKDOWN)
    layout.add_column("")
    for title in ("ours", "theirs", "ours / theirs", "told apart"):
        layout.add_column(title, justify="right")
    for figure in figures:
        sides = (
            f"{statistics.median(side):,.4g} ({min(side):,.4g} to {max(side):,.4g})"
            for side in (figure.ours, figure.theirs)
        )
        layout.add_row(figure.key, *sides, f"{figure.ratio:.3f}", "yes" if figure.apart else "no")
    return layout


def read_rounds(path: Path, load: Load) -> Rounds:
    """Return the rounds of earlier runs with the same load."""
    if not path.exists():
        return {name: [] for name in TOOLS}
    saved: Mapping[str, Any] = json.loads(path.read_text())
    if saved["load"] != asdict(replace(load, url="")):
        raise SystemExit(f"{path} is of another load: {saved['load']}")
    return dict(saved["rounds"])


def main() -> int:
    """Print all figures; return 1 if a figure is told apart."""
    parser = argparse.ArgumentParser(prog="two_tools", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--request-rate", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, help="of a closed loop, instead of the rate")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--add", type=Path, metavar="FILE.json", help="add to the rounds there")
    args = parser.parse_args()
    load = Load(
        "", MODEL, args.num_requests, args.request_rate, args.prompt, args.output,
        args.concurrency,
    )  # fmt: skip
    rounds = read_rounds(args.add, load) if args.add else {name: [] for name in TOOLS}
    first = len(rounds["ours"])
    with (
        tempfile.TemporaryDirectory() as name,
        launch.worker(model=str(tiny_model()), flags=FLAGS, name="w0") as worker,
    ):
        at_worker, folder = replace(load, url=worker.url), Path(name)
        asyncio.run(ours(replace(at_worker, requests=20), folder, seed=-1))  # warm-up
        for number in range(first, first + args.rounds):
            for tool, result in asyncio.run(measure_round(at_worker, number, folder)).items():
                rounds[tool].append(result)
            if args.add:
                args.add.write_text(json.dumps({"load": asdict(load), "rounds": rounds}) + "\n")
    compared = figures(rounds)
    Console(width=120).print(table(compared))
    apart = [figure.key for figure in compared if figure.apart]
    print(f"{len(rounds['ours'])} rounds; told apart: {', '.join(apart) or 'nothing'}")
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
