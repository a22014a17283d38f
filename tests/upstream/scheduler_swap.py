"""A pytest plugin that replaces the schedulers of vLLM's own tests.

It runs in the process that runs upstream's tests, under its own name (`-p scheduler_swap`): the
package `tests` there is upstream's. The names `Scheduler` and `AsyncScheduler` are rebound in
vLLM's modules before anything of upstream's is collected, so each `from ... import Scheduler` in
a test finds ours. Naming upstream's own two classes in the options makes it a baseline run.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SYNC = "vllm.v1.core.sched.scheduler:Scheduler"
ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("scheduler swap")
    group.addoption("--scheduler-sync", default=SYNC, help="module:Class for Scheduler")
    group.addoption("--scheduler-async", default=ASYNC, help="module:Class for AsyncScheduler")
    group.addoption("--scheduler-report", type=Path, help="write a JSON account of the run here")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Before upstream's conftest, which may import vLLM.
    options = early_config.known_args_namespace
    swap = Swap({SYNC: options.scheduler_sync, ASYNC: options.scheduler_async})
    early_config.pluginmanager.register(Account(swap), "scheduler-account")


def load(name: str) -> type[Any]:
    """Return the class that `module:Class` names."""
    module, _, attribute = name.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


class Swap:
    """The replacement of the classes, and the count of built schedulers."""

    def __init__(self, stand_ins: dict[str, str]) -> None:
        self.file = ""
        self.built: dict[str, Counter[str]] = {}
        upstream = {name: load(name) for name in stand_ins}
        ours = {name: load(stand_in) for name, stand_in in stand_ins.items()}
        self.wanted = {_name(stand_in) for stand_in in ours.values()}
        self.replaced = tuple(c for name, c in upstream.items() if ours[name] is not c)
        for name, stand_in in ours.items():
            if not issubclass(stand_in, upstream[name]):
                message = f"{stand_in} is no subclass of {name}: upstream's checks would fail"
                raise pytest.UsageError(message)
        self._count(upstream[SYNC])
        for name, stand_in in ours.items():
            module, _, attribute = name.partition(":")
            setattr(importlib.import_module(module), attribute, stand_in)

    def _count(self, base: type[Any]) -> None:
        original = base.__init__

        @functools.wraps(original)
        def counted(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if type(scheduler) in self.replaced:
                message = f"{_name(type(scheduler))} was built, not its stand-in"
                raise AssertionError(message)
            self.built.setdefault(self.file, Counter())[_name(type(scheduler))] += 1
            original(scheduler, *args, **kwargs)

        base.__init__ = counted


class Account:
    """The report of a run; a run without replaced schedulers fails."""

    def __init__(self, swap: Swap) -> None:
        self.swap = swap
        self.collected: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.collection_errors: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # Upstream's marker: no case needs the GPU cleanup of 0.4 s.
        for item in items:
            item.add_marker("skip_global_cleanup")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # So that a case without a report is found.
        self.collected = [item.nodeid for item in session.items]
        gc.freeze()  # collections during tests skip all imported objects

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A module that cannot be imported has no cases.
        if report.failed:
            self.collection_errors.append(f"{report.nodeid}: {report.longreprtext[-2000:]}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.swap.file = nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The worst of setup, call and teardown.
        if report.failed or report.skipped:
            outcome = "skipped" if report.skipped else "failed"
            self.outcomes[report.nodeid] = outcome
            self.reasons[report.nodeid] = report.longreprtext[-2000:]
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        built = set().union(*self.swap.built.values())
        if never_built := sorted(self.swap.wanted - built):
            self.collection_errors.append(f"never built: {', '.join(never_built)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if report := session.config.getoption("--scheduler-report"):
            account = {
                "collected": self.collected,
                "outcomes": self.outcomes,
                "reasons": self.reasons,
                "errors": self.collection_errors,
                "built": self.swap.built,
            }
            report.write_text(json.dumps(account, indent=1))


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
