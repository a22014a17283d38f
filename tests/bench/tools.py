"""`vllm bench serve` and `vllm-sched bench`, each in a process of its own, with the same load."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_sched.workers.tiny_model import tiny_model

# `vllm bench serve`, under whichever name vLLM is installed.
THEIRS = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
GOODPUT = ("--goodput", "ttft:5000", "e2el:5000")


@dataclass(frozen=True)
class Load:
    """What is asked of whom."""

    url: str
    model: str
    requests: int
    rate: float
    prompt: int
    output: int


async def run(*command: str) -> None:
    """Run a command to its end, which has to be a good one."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-3000:]


async def theirs(load: Load, folder: Path) -> dict[str, Any]:
    """Measure with vLLM's."""
    await run(
        sys.executable, "-c", THEIRS,
        "--base-url", load.url, "--backend", "openai", "--endpoint", "/v1/completions",
        "--model", load.model, "--tokenizer", str(tiny_model()), "--dataset-name", "random",
        "--random-input-len", str(load.prompt), "--random-output-len", str(load.output),
        "--num-prompts", str(load.requests), "--request-rate", str(load.rate), "--ignore-eos",
        "--percentile-metrics", "ttft,tpot,itl,e2el", *GOODPUT,
        "--save-result", "--save-detailed", "--result-dir", str(folder),
        "--result-filename", "theirs.json", "--disable-tqdm",
    )  # fmt: skip
    return dict(json.loads((folder / "theirs.json").read_text()))


async def ours(load: Load, folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """Measure with ours."""
    await run(
        sys.executable, "-m", "vllm_sched.cli.main", "bench", "--url", load.url,
        "--model", load.model, "--workload", f"{load.prompt}x{load.output}",
        "--num-requests", str(load.requests), "--request-rate", str(load.rate), *GOODPUT,
        "--seed", str(seed), "--save", str(folder / "ours.json"),
    )  # fmt: skip
    return dict(json.loads((folder / "ours.json").read_text()))
