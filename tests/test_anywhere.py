"""The tests do not depend on variables of a shell, a CI service or a proxy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
PROXY = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), NOWHERE)

TESTS = (
    "tests/bench/compare/test_report.py",
    # With the clients openai and httpx.
    "tests/proxy/wire/exchange/test_openai.py::test_chat_with_openai_client",
    "tests/proxy/admin/test_server.py::test_server_does_not_change_signal_handlers",
)


def test_tests_ignore_common_environment_variables() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name.upper() != "NO_PROXY"}
        | {"FORCE_COLOR": "1", "COLUMNS": "40"}
        | PROXY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
