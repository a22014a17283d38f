"""`vllm-sched compare` with real workers: table, JSON, plot and cleanup."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import pytest

from tests.counting.engine_starts import STALL
from vllm_sched.bench.compare.report import GROUPS, show, show_ratio

# Two workers start within a few minutes; a longer run hangs.
pytestmark = pytest.mark.engine  # its workers are its own

BOUND_S = 420.0
SOON_S, GONE_S = 60.0, 5.0
MARK = "VLLM_SCHED_TESTED_BY"
SIDES = ("baseline", "candidate")
LONGS, SHORTS, DECODES, ALONE = 1, 8, 4, 20
NO_ENGINE = {STALL: str(BOUND_S)}
TYPED = ("--workload", "long-blocks-short", "--longs", str(LONGS), "--rounds", "1")


@dataclass
class Command:
    """A running command and the processes that it started."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    err: Path
    sessions: set[str] = field(default_factory=set)

    def family(self) -> list[int]:
        """Return the live processes that the command started.

        All inherit its mark. vLLM's engines overwrite the mark but stay in a marked session.
        """
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended, or not accessible
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = wanted in (entry / "environ").read_bytes().split(b"\0")
                if state != "Z" and (marked or session in self.sessions):
                    self.sessions.add(session)
                    found.append(int(entry.name))
        return found

    def left(self) -> list[int]:
        """Return the processes that remain after the command; wait a moment for killed ones."""
        until = time.monotonic() + GONE_S
        while (found := self.family()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def wait(self, within: float) -> int:
        """Wait for its end, record the processes that it starts, and return its exit code."""
        until = time.monotonic() + within
        while True:
            self.family()
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.5)
            assert time.monotonic() < until, f"it hangs: {self.out.read_text()}"


@contextmanager
def run_command(
    folder: Path, *words: str, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Command]:
    """Run the command, and kill all its processes at the end."""
    mark, out, err = uuid4().hex, folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_sched.cli.main", "compare", *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # to find its processes
            env={**os.environ, "PYTHONUNBUFFERED": "1", MARK: mark, **env},
        )
    command = Command(process, mark, out, err)
    try:
        yield command
    finally:
        process.kill()
        process.wait()
        for pid in command.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class ComparedRun:
    out: str
    saved: dict[str, Any]
    page: str
    left: list[int]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> ComparedRun:
    """Compare both schedulers once with one long prompt and eight short ones."""
    folder = tmp_path_factory.mktemp("compare")
    save, plot = folder / "out.json", folder / "out.html"
    options = ("--set", "long_prompt.max_wait_s=30", "--save", str(save), "--plot", str(plot))
    with run_command(folder, *TYPED, *options) as command:
        status = command.wait(BOUND_S)
        output = command.out.read_text() + command.err.read_text()
        assert status == 0, output
        return ComparedRun(
            command.out.read_text(), json.loads(save.read_text()), plot.read_text(),
            command.left(),
        )  # fmt: skip


def test_compare_leaves_no_process(compared: ComparedRun) -> None:
    assert compared.left == []


def test_compare_prints_its_progress(compared: ComparedRun) -> None:
    lines = [line for line in compared.out.splitlines() if line.strip()]
    assert lines[0].startswith("starting baseline and candidate")
    steps = ["warming up baseline", "warming up candidate", "round 1 of 1, baseline",
             "round 1 of 1, candidate", "stopping the workers"]  # fmt: skip
    places = [next(i for i, line in enumerate(lines) if line.startswith(step)) for step in steps]
    assert places == sorted(places)


def test_table_has_every_figure_of_both_sides_and_their_ratio(compared: ComparedRun) -> None:
    rows = [re.split(r"\s{2,}", line.strip()) for line in compared.out.splitlines()]
    found = iter(row for row in rows if re.search(r" \((-|[\d.]+x)\)$", row[-1]))
    group = ""
    for figure in compared.saved["figures"]:
        baseline, candidate = [show(figure[side], figure["unit"]) for side in SIDES]
        title = [] if figure["group"] == group else [GROUPS[figure["group"]]]
        group = figure["group"]
        compared_cell = f"{candidate} ({show_ratio(figure['ratio'])})"
        assert next(found) == [*title, figure["measure"], baseline, compared_cell]
    figures = {(figure["group"], figure["measure"]) for figure in compared.saved["figures"]}
    for group in ("short", "long"):
        assert figures >= {(group, m) for m in ("TTFT p50", "TTFT p99", "ITL p99", "tokens/s")}
    for group in ("short", "long", "background"):
        assert figures >= {(group, m) for m in ("ITL p99", "ITL max", "tokens/s")}
    assert "failed requests" not in compared.out


def test_every_request_is_complete_and_every_sample_is_saved(compared: ComparedRun) -> None:
    counts = {"short": SHORTS, "long": LONGS, "background": DECODES, "lone": ALONE}
    sizes = {"short": (100, 16), "long": (12_000, 16), "lone": (100, 1)}
    for side in SIDES:
        saved = compared.saved["sides"][side]
        assert saved["failed"] == 0
        assert saved["errors"] == []
        for klass, count in counts.items():
            of = saved["classes"][klass]
            assert (of["completed"], len(of["ttfts"]), len(of["itls"])) == (count, count, count)
            if klass in sizes:
                prompt, output = sizes[klass]
                assert (of["input_lens"], of["output_lens"]) == ([prompt] * count, [output] * count)
    candidate, baseline = (compared.saved["sides"][side]["command"] for side in reversed(SIDES))
    assert candidate[candidate.index("--scheduler-cls") + 1] == "vllm_sched.SyncPolicyScheduler"
    config = json.loads(candidate[candidate.index("--additional-config") + 1])
    assert config == {"vllm_sched": {"long_prompt": {"max_wait_s": 30}}}
    assert "--scheduler-cls" not in baseline


def test_shorts_do_not_wait_for_the_long_prompt(compared: ComparedRun) -> None:
    baseline, candidate = (
        statistics.median(compared.saved["sides"][side]["classes"]["short"]["ttfts"])
        for side in SIDES
    )
    (figure,) = [
        figure
        for figure in compared.saved["figures"]
        if (figure["group"], figure["measure"]) == ("short", "TTFT p50")
    ]
    assert figure["ratio"] == pytest.approx(candidate / baseline)
    # On an idle machine the wait falls from two seconds to a tenth of that.
    assert candidate < baseline / 2


def test_plot_has_two_panels_on_one_axis_and_a_lane_per_request(compared: ComparedRun) -> None:
    svg = ET.fromstring(  # noqa: S314 - written by the program under test
        re.sub(r' xmlns="[^"]*"', "", compared.page[slice(*span(compared.page))], count=1)
    )
    lanes = [group for group in svg.iter("g") if group.get("class") == "lane"]
    requests = LONGS + SHORTS + DECODES
    assert len(lanes) == 2 * requests
    axis = [
        (text.get("x"), text.text)
        for text in svg.iter("text")
        if text.get("class") == "soft num" and text.get("text-anchor") == "middle"
    ]
    assert len(axis) > 4
    assert axis[: len(axis) // 2] == axis[len(axis) // 2 :]
    waits = []
    for lane in lanes:
        title = str(lane.findtext("title"))
        assert "failed" not in title
        (ticks,) = [p for p in lane.findall("path") if str(p.get("class")).startswith("tick ")]
        tokens = int(re.findall(r"(\d+) tokens", title)[-1])
        # Ticks at one place are merged.
        assert 0 < str(ticks.get("d")).count("M") <= tokens
        grey = [rect for rect in lane.findall("rect") if rect.get("class") == "wait"]
        if "background" not in title:
            waits.append(float(str(grey[0].get("width"))))
    baseline, candidate = waits[1 : LONGS + SHORTS], waits[LONGS + SHORTS + 1 :]
    assert statistics.median(candidate) < statistics.median(baseline) / 2
    assert compared.page.count("<tr") == 1 + len(compared.saved["figures"])


def span(page: str) -> tuple[int, int]:
    return page.index("<svg"), page.index("</svg>") + len("</svg>")


def test_interrupt_leaves_no_worker(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "out.json"))
    with run_command(tmp_path, *TYPED, *save, env=NO_ENGINE) as command:
        # The command, and the server and guard of both workers.
        until = time.monotonic() + SOON_S
        while len(command.family()) < 5:
            assert command.process.poll() is None, command.err.read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(SOON_S) == 130
        assert command.left() == []
    assert command.err.read_text() == "vllm-sched: interrupted; the workers have been stopped\n"
    assert not (tmp_path / "out.json").exists()


def test_failed_worker_is_reported_and_the_other_is_stopped(tmp_path: Path) -> None:
    wrong = "--candidate-arg=--no-such-flag"
    with run_command(tmp_path, *TYPED, wrong, env=NO_ENGINE) as command:
        assert command.wait(BOUND_S) == 1
        assert command.left() == []
    error = command.err.read_text()
    assert error.startswith("vllm-sched: candidate died with exit code ")
    assert "--no-such-flag" in error
