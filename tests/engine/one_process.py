"""Run all tests' scenarios in one real engine: `python -m tests.engine.one_process`.

Prints, as JSON, the results of the arrivals under each set of policies, of each flood, of the
arrivals with a journal, of requests that are continued, and of sessions with offloading.
"""

from __future__ import annotations

import json
import os
import sys

# Set before torch is imported. On a busy machine, two threads wait much longer for each other than
# they compute.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

from tests.engine.arrivals import SETS
from tests.engine.continued import serve_in_two_parts
from tests.engine.floods import play_all
from tests.engine.journaled import serve_with_journal
from tests.engine.offloaded import serve_offloaded
from tests.engine.one_engine import make_engine
from tests.engine.served import serve


def main() -> None:
    """Run all scenarios."""
    engine = make_engine()
    runs = {name: serve(engine, policies) for name, policies in SETS.items()}
    results = {
        "runs": runs,
        "floods": play_all(engine),
        "journal": {"all": serve_with_journal(engine)},
        "continued": serve_in_two_parts(engine),
        "offloaded": serve_offloaded(engine),
    }
    sys.stdout.write(f"{json.dumps(results)}\n")


if __name__ == "__main__":
    main()
