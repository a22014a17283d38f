"""Compare simulated fleets with real ones under the same workload.

    python -m benchmarks.simulator --save out/simulator.json

A real worker of the tiny model is calibrated. Then each fleet (vLLM's scheduler, `long_prompt`, a
short and a long worker) is started (`up`), measured (`bench`), stopped, and simulated with the same
file and workload. Prints real and simulated figures. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.sim.planning.capacity_bound import prefill_seconds
from vllm_sched.workers import launch
from vllm_sched.workers.launch import free_port
from vllm_sched.workers.tiny_model import tiny_model

BUDGET = 512
FLAGS = [
    "--max-model-len=16384", f"--max-num-batched-tokens={BUDGET}", "--block-size=32",
    "--num-gpu-blocks-override=2048", "--no-async-scheduling", "--no-enable-prefix-caching",
]  # fmt: skip
READY_TIMEOUT_S, MAX_ERROR = 300.0, 0.20
FIGURES = {
    "TTFT p50, ms": "median_ttft_ms", "TTFT p99, ms": "p99_ttft_ms", "ITL p99, ms": "p99_itl_ms",
    "output tokens/s": "output_throughput",
}  # fmt: skip
# Figure of the most frequent class, short prompts, by which fleets are ordered.
ORDER_KEY = "p99_ttft_ms"
LONE_REQUESTS, IDLE_S = 24, 0.15
# Prompt that checks the machine's speed, and the accepted change since calibration.
SPEED_CHECK_TOKENS, MAX_SPEED_CHANGE = 4000, 0.15
# Not counted: first steps are slow, and policies fit their models.
WARM_UP = ["--workload", "2000x16:0.5,100x32:0.5", "--request-rate", "5", "--duration", "6"]
# By the worker's number of processors: with one, server and engine share it.
COSTS = {1: "cost-of-one.json", 2: "cost-of-two.json"}
COMMAND = [sys.executable, "-m", "vllm_sched.cli.main"]


def worker(name: str, cpus: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return a worker's settings, for `up` and `simulate`."""
    launch = {"args": FLAGS, "cpus": [*cpus], "policies": more.pop("policies", {})}
    return {"name": name, "profile": COSTS[len(cpus)], "launch": launch, **more}


def cases(cpus: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the fleets, for two processors; a single worker has both."""
    pools = [
        worker("short-0", cpus[:1], role="short", max_model_len=4096),
        worker("long-0", cpus[-1:], role="long", policies={"long_prompt": {}}),
    ]
    return {
        "default": {"workers": [worker("w0", cpus)]},
        "long_prompt": {"workers": [worker("w0", cpus, policies={"long_prompt": {}})]},
        "pools": {"workers": pools, "routing": {"short_limit": 1500}},
    }


@contextmanager
def fleet_up(file: Path, url: str, log: Path) -> Iterator[None]:
    """Run a fleet, and stop it on exit."""
    with log.open("wb") as out:
        up = subprocess.Popen([*COMMAND, "up", str(file)], stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not _is_ready(url):
                if up.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the fleet did not start; see {log}")
                time.sleep(1.0)
            yield
        finally:
            up.send_signal(signal.SIGINT)
            try:
                up.wait(60)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait()


def _is_ready(url: str) -> bool:
    try:
        _complete(url, 8)
    except (OSError, urllib.error.URLError):
        return False
    return True


def _complete(url: str, words: int) -> float:
    """Request one token and return the seconds that it took."""
    body = {"model": "tiny", "prompt": [11 + n % 300 for n in range(words)], "max_tokens": 1}
    request = urllib.request.Request(  # noqa: S310 - our own fleet
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        answer.read()
    return time.perf_counter() - started


def calibrate(settings: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Calibrate a worker without policies, unless its profile exists."""
    cost, cpus = folder / settings["profile"], settings["launch"]["cpus"]
    if cost.exists():
        return
    console.print(f"calibrating a worker with {len(cpus)} processors", style="dim")
    with launch.worker(model=str(tiny_model()), flags=FLAGS, cpus=cpus, name="w0") as started:
        words = ["calibrate", "--url", started.url, "--budget", str(BUDGET)]
        _command([*words, "--save", str(cost)])


def measure_front_s(url: str, time_of: StepTime) -> float:
    """Return what HTTP, router and tokenizer add to the step time of a lone request."""
    tokens = 100
    step = time_of.seconds(StepShape(prefill_tokens=tokens, pairs=tokens**2 / 2))
    times = []
    for _ in range(LONE_REQUESTS):
        time.sleep(IDLE_S)
        times.append(_complete(url, tokens))
    return max(statistics.median(times) - step, 0.0)


def measure_slowdown(url: str, time_of: StepTime, front_s: float) -> float:
    """Return how much slower a prefill is than at calibration, as a share."""
    expected = prefill_seconds(time_of, SPEED_CHECK_TOKENS, BUDGET) + front_s
    times = [_complete(url, SPEED_CHECK_TOKENS) for _ in range(3)]
    return statistics.median(times) / expected - 1


@dataclass(frozen=True)
class Pair:
    """The real and the simulated figures of one fleet."""

    name: str
    real: Mapping[str, Any]
    simulated: Mapping[str, Any]

    def rows(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield class, figure and both values."""
        for klass in (*self.real["classes"], "all"):
            for label, key in FIGURES.items():
                both = [
                    side if klass == "all" else side["classes"][klass]
                    for side in (self.real, self.simulated)
                ]
                yield klass, label, both[0][key] or 0.0, both[1][key] or 0.0


def run_case(
    name: str, blocks: Mapping[str, Any], folder: Path, load: Sequence[str], console: Console
) -> Pair:
    """Measure and simulate one fleet."""
    port, admin = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    file = folder / f"{name}.yaml"
    router = {"port": port, "admin": {"port": admin}}
    file.write_text(yaml.safe_dump({"model": "tiny", "router": router, **blocks}))
    real, simulated = folder / f"{name}.real.json", folder / f"{name}.simulated.json"
    profile = blocks["workers"][0]["profile"]
    time_of = StepTime.from_json(json.loads((folder / profile).read_text())["step_time"])
    console.print(f"{name}: a real fleet", style="dim")
    with fleet_up(file, url, folder / f"{name}.log"):
        _command(["bench", "--url", url, *WARM_UP])
        front_s = measure_front_s(url, time_of)
        if abs(off := measure_slowdown(url, time_of, front_s)) > MAX_SPEED_CHANGE:
            console.print(
                f"{name}: the machine is {off:+.0%} slower than at calibration, or busy: "
                "the comparison is not valid",
                style="yellow",
            )
        _command(["bench", "--url", url, *load, "--save", str(real)])
    console.print(f"{name}: simulated, with {front_s * 1000:.1f} ms in front", style="dim")
    front = ["--front-ms", str(front_s * 1000)]
    _command(["simulate", str(file), *front, *load, "--save", str(simulated)])
    return Pair(name, json.loads(real.read_text()), json.loads(simulated.read_text()))


def _command(words: Sequence[str]) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])}: {done.stderr or done.stdout}")


def order(pairs: Sequence[Pair], side: str) -> list[str]:
    """Return the fleets' names, ordered by the TTFT p99 of short prompts."""
    keys: dict[str, float] = {}
    for pair in pairs:
        classes = getattr(pair, side)["classes"].values()
        keys[pair.name] = max(classes, key=lambda figures: figures["completed"])[ORDER_KEY]
    return sorted(keys, key=keys.__getitem__)


def print_comparison(pairs: Sequence[Pair], console: Console) -> int:
    """Print all figures; return the number of those with an error above MAX_ERROR."""
    layout = Table("fleet", "class", "figure", "real", "simulated", "error")
    off = 0
    for pair in pairs:
        for klass, label, real, simulated in pair.rows():
            error = simulated / real - 1 if real else 0.0
            off += abs(error) > MAX_ERROR
            style = "red" if abs(error) > MAX_ERROR else ""
            values = (f"{real:.1f}", f"{simulated:.1f}", f"{error:+.0%}")
            layout.add_row(pair.name, klass, label, *values, style=style)
        layout.add_section()
    console.print(layout)
    orders = [order(pairs, side) for side in ("real", "simulated")]
    result = "the same" if orders[0] == orders[1] else "NOT the same"
    console.print(f"by short TTFT p99: real {orders[0]}, simulated {orders[1]}: {result}")
    figures = sum(len([*pair.rows()]) for pair in pairs)
    console.print(f"{figures - off} of {figures} figures within {MAX_ERROR:.0%}")
    busy = [pair.real["client_busy"] for pair in pairs]
    console.print(f"load of the machine {os.getloadavg()[0]:.1f}, client busy {max(busy):.0%}")
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, help="folder of calibrations, created if missing")
    parser.add_argument("--workload", default="long-blocks-short")
    parser.add_argument("--duration", default="36")
    parser.add_argument("--request-rate", help="default: the workload's own times")
    parser.add_argument("--cases", nargs="+", choices=cases([0]), default=[*cases([0])])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    console = Console()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    load = ["--workload", args.workload, "--duration", args.duration]
    load += ["--request-rate", args.request_rate] if args.request_rate else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.costs or name)
        fleets = {key: blocks for key, blocks in cases(cpus).items() if key in args.cases}
        for blocks in fleets.values():
            calibrate(blocks["workers"][0], folder, console)
        pairs = [run_case(name, blocks, folder, load, console) for name, blocks in fleets.items()]
        print_comparison(pairs, console)
        if args.save:
            content = {
                "costs": {
                    name: json.loads((folder / name).read_text())
                    for name in COSTS.values()
                    if (folder / name).exists()
                },
                "cases": {p.name: {"real": p.real, "simulated": p.simulated} for p in pairs},
            }
            args.save.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
