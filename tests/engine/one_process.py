"""Run all tests' scenarios in one real engine: `python -m tests.engine.one_process`.

Prints, as JSON, the results of the arrivals under each set of policies, of each flood, of the
arrivals with a journal, of requests that are continued, and of sessions with offloading.
"""

from __future__ import annotations

import json
import os
import sys

from tests.engine.environment import IN_PROCESS

os.environ |= IN_PROCESS  # before torch is imported

from tests.engine.arrivals import SETS
from tests.engine.continued import serve_in_two_parts
from tests.engine.floods import play_all
from tests.engine.journaled import serve_with_journal
from tests.engine.offloaded import serve_offloaded
from tests.engine.one_engine import make_engine
from tests.engine.served import serve


def main() -> None:
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
