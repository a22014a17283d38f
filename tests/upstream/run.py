"""Run files or cases of vLLM's own tests with given scheduler classes, in separate processes.

Upstream's package is also called `tests`, so the process gets its tree first on the path.
vLLM itself is the installed one: the tree has no `vllm` folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import vllm_sched
from tests.upstream.models import write_redirects
from tests.upstream.source import upstream_tests

HERE = Path(__file__).parent
TIME_LIMIT = 1800.0


class Classes(NamedTuple):
    """The replacements of `Scheduler` and `AsyncScheduler`, each as `module:Class`."""

    sync: str
    asynchronous: str


OURS = Classes(
    "vllm_sched.engine.scheduler:SyncPolicyScheduler", "vllm_sched.engine.scheduler:PolicyScheduler"
)
UPSTREAM = Classes(
    "vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
)


@dataclass(frozen=True)
class Account:
    """The outcomes of a run. Cases have pytest's ids, files their path from the tree."""

    exit_code: int
    output: str
    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    built: dict[str, dict[str, int]] = field(default_factory=dict)

    def cases_of(self, what: str) -> list[str]:
        """Return the collected cases of this file or case."""
        return [case for case in self.collected if case == what or case.startswith(f"{what}::")]

    def not_passed(self, what: str) -> list[str]:
        """Return the cases that failed, were skipped, or never reported."""
        return [case for case in self.cases_of(what) if self.outcomes.get(case) != "passed"]

    def fails_for(self, case: str, reason: str) -> bool:
        """Return whether the case failed with this text near the end of its report."""
        return self.outcomes.get(case) == "failed" and reason in self.reasons[case]


class Run(NamedTuple):
    """Files or cases by their path from the tree's root, and the scheduler classes."""

    what: Sequence[str]
    classes: Classes


def run_upstream(runs: Sequence[Run], workspace: Path) -> list[Account]:
    """Run all runs concurrently, in an empty workspace."""
    tree = upstream_tests()
    folders = [workspace / f"run {number}" for number in range(len(runs))]
    for folder in folders:
        (folder / "scratch").mkdir(parents=True)  # some tests write into the working directory
    requests = [
        {
            "arguments": _arguments(run, tree, folder / "report.json"),
            "folder": str(folder / "scratch"),
            "output": str(folder / "output"),
        }
        for run, folder in zip(runs, folders, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, HERE / "forks.py"],
        input=json.dumps(requests),
        env=_environment(tree, write_redirects(workspace / "models")),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    return [_account(status, folder) for status, folder in zip(statuses, folders, strict=True)]


def _arguments(run: Run, tree: Path, report: Path) -> list[str]:
    arguments = ["-p", "scheduler_swap", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    arguments += ["--assert=plain"]
    arguments += ["--rootdir", str(tree), "--config-file", str(tree / "pyproject.toml")]
    arguments += ["--scheduler-sync", run.classes.sync]
    arguments += ["--scheduler-async", run.classes.asynchronous]
    arguments += ["--scheduler-report", str(report), "--quiet", "--tb=short"]
    return [*arguments, "--continue-on-collection-errors", *(str(tree / name) for name in run.what)]


def _account(status: int, folder: Path) -> Account:
    output, report = (folder / "output").read_text(), folder / "report.json"
    report_fields = json.loads(report.read_text()) if report.exists() else {}
    return Account(status, output, **report_fields)


def _environment(tree: Path, redirects: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    own = Path(vllm_sched.__file__).parents[1]
    return environment | {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, HERE, own))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_MODEL_REDIRECT_PATH": str(redirects),
    }
