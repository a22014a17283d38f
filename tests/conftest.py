"""What all tests share."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.programs import untested

pytest_plugins = ["tests.parallel", "tests.starts"]

# What a shell, a CI service or a proxy tells all programs is not meant for those under test: what
# they print is plain and as wide as ever, and what listens on this machine is asked straight.
for told in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
    os.environ.pop(told, None)
# Of the two spellings the first counts where both are there; `*` only where it is alone.
if (straight := os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")) != "*":
    straight = ",".join(filter(None, (straight, "localhost,127.0.0.1,::1")))
    os.environ |= {"no_proxy": straight, "NO_PROXY": straight}

# Routers under test are made of the sources at hand, unless a test is about compiled ones.
os.environ.setdefault("VLLM_SCHED_COMPILED", "0")

# Tests that choose at random choose the same in each run, so that a change is judged by itself;
# `make explore` has them choose anew.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("fixed")

# A shell without job control has what it starts in the background ignore Ctrl-C: tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hints about the speed of a model that is never run; each scheduler made repeats them.
for chatty in ("vllm.platforms.cpu", "vllm.config.vllm"):
    logging.getLogger(chatty).setLevel(logging.ERROR)


def pytest_sessionstart() -> None:
    """Refuse to test plain modules as compiled ones."""
    from proxy.compiled.locate import SWITCH, in_use, kind  # not before the switch above is set

    if os.environ[SWITCH] == "1" and not in_use():
        pytest.exit(
            f"{SWITCH} is 1, but the router's modules are {kind()}", pytest.ExitCode.USAGE_ERROR
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what replaces a part of a module, or looks inside, where that is compiled."""
    if (mark := item.get_closest_marker("plain")) is None:
        return
    from proxy.compiled.locate import in_use  # not before the switch above is set

    if in_use():
        pytest.skip(f"{mark.args[0]}: for plain modules")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say last of all what was not tested for want of a program, lest a run looks whole."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    if lines := untested([report.longrepr[2] for report in skipped]):
        terminalreporter.section("not tested here", yellow=True)
        for line in lines:
            terminalreporter.line(line)
