"""Is a simulated fleet like the real one? Both are played the same workload, and compared.

    python -m benchmarks.simulator --save out/simulator.json

A real worker of the tiny model is calibrated; then, for vLLM's own scheduler, for `long_prompt` and
for a short and a long worker, the fleet is started on this machine (`up`), played a workload
(`bench`), stopped, and simulated with the same file and the same workload. Prints every figure
beside its simulated one. To be run where nothing else does: real workers are what is measured.
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
from vllm_sched.workers.launch import free_port

BUDGET = 512
FLAGS = [
    "--max-model-len=16384", f"--max-num-batched-tokens={BUDGET}", "--block-size=32",
    "--num-gpu-blocks-override=2048", "--no-async-scheduling", "--no-enable-prefix-caching",
]  # fmt: skip
READY_S, BOUND = 300.0, 0.20
FIGURES = {
    "TTFT p50, ms": "median_ttft_ms", "TTFT p99, ms": "p99_ttft_ms", "ITL p99, ms": "p99_itl_ms",
    "output tokens/s": "output_throughput",
}  # fmt: skip
# What the policies are ordered by, of the class that comes most often: shorts.
ORDER = "p99_ttft_ms"
LONE = 8
COMMAND = [sys.executable, "-m", "vllm_sched.cli.main"]


def worker(name: str, cpu: int, **more: Any) -> dict[str, Any]:
    """Describe a worker that is both real and simulated."""
    launch = {"args": FLAGS, "cpus": [cpu], "policies": more.pop("policies", {})}
    return {"name": name, "profile": "cost.json", "launch": launch, **more}


def cases(cpus: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Describe the fleets; the last processor is for one that is alone."""
    last = cpus[-1]
    pools = [
        worker("short-0", cpus[0], role="short", max_model_len=4096),
        worker("long-0", last, role="long", policies={"long_prompt": {}}),
    ]
    return {
        "default": {"workers": [worker("w0", last)]},
        "long_prompt": {"workers": [worker("w0", last, policies={"long_prompt": {}})]},
        "pools": {"workers": pools, "routing": {"short_limit": 1500}},
    }


@contextmanager
def fleet_up(file: Path, url: str, log: Path) -> Iterator[None]:
    """Run a fleet; nothing of it is left running."""
    with log.open("wb") as out:
        up = subprocess.Popen([*COMMAND, "up", str(file)], stdout=out, stderr=subprocess.STDOUT)
        try:
            give_up = time.monotonic() + READY_S
            while not _is_ready(url):
                if up.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit(f"the fleet did not come up; see {log}")
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
    """Ask for one token, and say how long it took."""
    body = {"model": "tiny", "prompt": [11 + n % 300 for n in range(words)], "max_tokens": 1}
    asked = urllib.request.Request(  # noqa: S310 - our own fleet
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310
        answer.read()
    return time.perf_counter() - began


def front_of(url: str, time_of: StepTime) -> float:
    """Measure what HTTP and tokenizer add: a lone request, less the step that it takes."""
    tokens = 100
    step = time_of.seconds(StepShape(prefill_tokens=tokens, pairs=tokens**2 / 2))
    return max(statistics.median(_complete(url, tokens) for _ in range(LONE)) - step, 0.0)


@dataclass(frozen=True)
class Pair:
    """One case, measured and simulated."""

    name: str
    real: Mapping[str, Any]
    simulated: Mapping[str, Any]

    def rows(self) -> Iterator[tuple[str, str, float, float]]:
        """Give class, figure, and both values."""
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
    time_of = StepTime.from_json(json.loads((folder / "cost.json").read_text())["step_time"])
    console.print(f"{name}: a real fleet", style="dim")
    with fleet_up(file, url, folder / f"{name}.log"):
        front_s = front_of(url, time_of)
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
    """Order the cases by what the shorts wait."""
    found: dict[str, float] = {}
    for pair in pairs:
        classes = getattr(pair, side)["classes"].values()
        found[pair.name] = max(classes, key=lambda figures: figures["completed"])[ORDER]
    return sorted(found, key=found.__getitem__)


def tell(pairs: Sequence[Pair], console: Console) -> int:
    """Print all; returns how many figures are off by more than they may be."""
    layout = Table("case", "class", "figure", "real", "simulated", "off by")
    off = 0
    for pair in pairs:
        for klass, label, real, simulated in pair.rows():
            error = simulated / real - 1 if real else 0.0
            off += abs(error) > BOUND
            style = "red" if abs(error) > BOUND else ""
            values = (f"{real:.1f}", f"{simulated:.1f}", f"{error:+.0%}")
            layout.add_row(pair.name, klass, label, *values, style=style)
        layout.add_section()
    console.print(layout)
    orders = [order(pairs, side) for side in ("real", "simulated")]
    alike = "the same" if orders[0] == orders[1] else "NOT the same"
    console.print(f"by the shorts' TTFT p99: real {orders[0]}, simulated {orders[1]}: {alike}")
    figures = sum(len([*pair.rows()]) for pair in pairs)
    console.print(f"{figures - off} of {figures} figures within {BOUND:.0%}")
    busy = [each.real["client_busy"] for each in pairs]
    console.print(f"load of the machine {os.getloadavg()[0]:.1f}, client busy {max(busy):.0%}")
    return off


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cost", type=Path, help="what `calibrate` saved, with the same budget")
    parser.add_argument("--workload", default="long-blocks-short")
    parser.add_argument("--duration", default="36")
    parser.add_argument("--request-rate", help="default: the workload's own times")
    parser.add_argument("--cases", nargs="+", choices=cases([0]), default=[*cases([0])])
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    console = Console()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    load = ["--workload", given.workload, "--duration", given.duration]
    load += ["--request-rate", given.request_rate] if given.request_rate else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cost = folder / "cost.json"
        if given.cost:
            cost.write_text(given.cost.read_text())
        else:
            console.print("calibrating", style="dim")
            flags = [f"--arg={flag}" for flag in FLAGS if "batched" not in flag]
            words = ["calibrate", "--model", "tiny", "--budget", str(BUDGET), *flags]
            _command([*words, "--save", str(cost)])
        pairs = [
            run_case(name, blocks, folder, load, console)
            for name, blocks in cases(cpus).items()
            if name in given.cases
        ]
        tell(pairs, console)
        if given.save:
            content = {
                "cost": json.loads(cost.read_text()),
                "cases": {p.name: {"real": p.real, "simulated": p.simulated} for p in pairs},
            }
            given.save.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
