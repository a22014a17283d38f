"""All that tests want of a real engine, from one start of it: `python -m tests.engine.one_process`.

Prints, as JSON, what came of the arrivals under each set of policies, and of each flood.
"""

from __future__ import annotations

import json
import os
import sys

# Before torch is imported. With two threads, beside other work, a step waits for one of them for
# hundreds of times as long as it computes.
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
from tests.engine.floods import play_all
from tests.engine.one_engine import make_engine
from tests.engine.served import serve


def main() -> None:
    """Serve all in turn."""
    engine = make_engine()
    runs = {name: serve(engine, policies) for name, policies in SETS.items()}
    sys.stdout.write(f"{json.dumps({'runs': runs, 'floods': play_all(engine)})}\n")


if __name__ == "__main__":
    main()
