"""Two real vLLM workers, started together, alive for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from vllm_sched.workers.launch import Side, Worker, worker
from vllm_sched.workers.tiny_model import tiny_model

FLAGS = (
    "--max-model-len", "16384",
    "--max-num-batched-tokens", "512",
    "--max-num-seqs", "64",
    "--enable-prefix-caching",
)  # fmt: skip
# Above 1,000 tokens is long; the structured-output backend starts with the first request.
SETTINGS = {"long_prompt": {"long_prefill_token_threshold": 1000}}


@pytest.fixture(scope="session")
def workers() -> Iterator[dict[str, Worker]]:
    """Start vLLM's own scheduler and ours."""
    sides = {
        "default": Side("default"),
        "long_prompt": Side("long_prompt", SETTINGS),
    }
    with ExitStack() as stack:
        started = {}
        for name, side in sides.items():
            each = worker(
                side,
                model=str(tiny_model()),
                flags=(*FLAGS, "--served-model-name", "tiny"),
                name=name,
                env={"VLLM_LOGGING_LEVEL": "INFO"},
            )
            stack.callback(each.stop)
            each.start()
            started[name] = each
        for each in started.values():
            each.wait_ready()
        yield started
