"""Settings of all tests."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.programs import untested

pytest_plugins = ["tests.parallel", "tests.starts"]

# Settings of a shell or a CI service must not change the output of programs under test. Requests to
# this machine must not go through a proxy.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
# Lower case has precedence. `*` has its meaning only if it is the whole value.
if (no_proxy := os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")) != "*":
    no_proxy = ",".join(filter(None, (no_proxy, "localhost,127.0.0.1,::1")))
    os.environ |= {"no_proxy": no_proxy, "NO_PROXY": no_proxy}

# Routers under test run plain modules, except in tests of compiled modules.
os.environ.setdefault("VLLM_SCHED_COMPILED", "0")

# Property tests use the same examples in each run; `make explore` has them use new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("fixed")

# A shell without job control starts background processes with SIGINT ignored, but tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each scheduler repeats hints about the speed of a model that is never run.
for name in ("vllm.platforms.cpu", "vllm.config.vllm"):
    logging.getLogger(name).setLevel(logging.ERROR)


def pytest_sessionstart() -> None:
    """Stop if compiled modules are to be tested and there are none."""
    from proxy.compiled.locate import SWITCH, in_use, kind  # after the switch is set

    if os.environ[SWITCH] == "1" and not in_use():
        pytest.exit(
            f"{SWITCH} is 1, but the router's modules are {kind()}", pytest.ExitCode.USAGE_ERROR
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need plain modules if compiled modules are in use."""
    if (mark := item.get_closest_marker("plain")) is None:
        return
    from proxy.compiled.locate import in_use  # after the switch is set

    if in_use():
        pytest.skip(f"{mark.args[0]}: for plain modules")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Print last which tests were skipped because a program is missing."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    if lines := untested([report.longrepr[2] for report in skipped]):
        terminalreporter.section("not tested here", yellow=True)
        for line in lines:
            terminalreporter.line(line)
