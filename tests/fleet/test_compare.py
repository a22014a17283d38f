"""`vllm-sched compare` as a user types it: real workers, a table, a JSON, a picture, no remains."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from vllm_sched.bench.compare.report import GROUPS, show, show_ratio

# Two workers load in a minute or two, more beside others; what takes longer than this hangs.
BOUND_S = 420.0
SOON_S, GONE_S = 60.0, 5.0
MARK = "VLLM_SCHED_TESTED_BY"
SIDES = ("baseline", "candidate")
LONGS, SHORTS, DECODES, ALONE = 1, 8, 4, 20
TYPED = ("--workload", "long-blocks-short", "--longs", str(LONGS), "--rounds", "1")


@dataclass
class Command:
    """A command that runs, and everybody whom it started."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    err: Path
    sessions: set[str] = field(default_factory=set)

    def family(self) -> list[int]:
        """Return who lives of those it started.

        All inherit its mark; vLLM's engines write over it, but stay in the session of who has it.
        """
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone meanwhile, or not ours
                state, _, _, session = (each / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = wanted in (each / "environ").read_bytes().split(b"\0")
                if state != "Z" and (marked or session in self.sessions):
                    self.sessions.add(session)
                    found.append(int(each.name))
        return found

    def left(self) -> list[int]:
        """Return who lives of those once it is over; who was killed takes a moment to be gone."""
        until = time.monotonic() + GONE_S
        while (found := self.family()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def ends(self, within: float) -> int:
        """Wait for its end and return its status; see meanwhile whom it starts."""
        until = time.monotonic() + within
        while True:
            self.family()
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.5)
            assert time.monotonic() < until, f"it hangs: {self.out.read_text()}"


@contextmanager
def typed(folder: Path, *words: str) -> Iterator[Command]:
    """Run it, within bounds, and leave nothing of it whatever happens."""
    mark, out, err = uuid4().hex, folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_sched.cli.main", "compare", *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # which is known by it
            env={**os.environ, "PYTHONUNBUFFERED": "1", MARK: mark},
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
class Compared:
    """What one run printed and wrote, and who was left of it."""

    out: str
    saved: dict[str, Any]
    page: str
    left: list[int]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Play one long prompt and eight short ones against both schedulers, once."""
    folder = tmp_path_factory.mktemp("compare")
    save, plot = folder / "out.json", folder / "out.html"
    asked = ("--set", "long_prompt.max_wait_s=30", "--save", str(save), "--plot", str(plot))
    with typed(folder, *TYPED, *asked) as command:
        status = command.ends(BOUND_S)
        said = command.out.read_text() + command.err.read_text()
        assert status == 0, said
        return Compared(
            command.out.read_text(), json.loads(save.read_text()), plot.read_text(),
            command.left(),
        )  # fmt: skip


def test_no_process_is_left(compared: Compared) -> None:
    assert compared.left == []


def test_what_it_is_doing_is_told_while_it_runs(compared: Compared) -> None:
    told = [line for line in compared.out.splitlines() if line.strip()]
    assert told[0].startswith("starting baseline and candidate")
    steps = ["warming up baseline", "warming up candidate", "round 1 of 1, baseline",
             "round 1 of 1, candidate", "stopping the workers"]  # fmt: skip
    places = [next(i for i, line in enumerate(told) if line.startswith(step)) for step in steps]
    assert places == sorted(places)


def test_the_table_has_every_figure_of_both_and_their_ratio(compared: Compared) -> None:
    rows = [re.split(r"\s{2,}", line.strip()) for line in compared.out.splitlines()]
    found = iter(row for row in rows if re.fullmatch(r"-|[\d.]+x", row[-1]))
    group = ""
    for figure in compared.saved["figures"]:
        cells = [show(figure[side], figure["unit"]) for side in SIDES]
        title = [] if figure["group"] == group else [GROUPS[figure["group"]]]
        group = figure["group"]
        assert next(found) == [*title, figure["measure"], *cells, show_ratio(figure["ratio"])]
    said = {(figure["group"], figure["measure"]) for figure in compared.saved["figures"]}
    for group in ("short", "long"):
        assert said >= {(group, m) for m in ("TTFT p50", "TTFT p99", "ITL p99", "tokens/s")}
    for group in ("short", "long", "background"):
        assert said >= {(group, m) for m in ("ITL p99", "ITL max", "tokens/s")}
    assert "failed requests" not in compared.out


def test_every_request_was_served_in_full_and_every_sample_is_saved(compared: Compared) -> None:
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
    ours, theirs = (compared.saved["sides"][side]["command"] for side in reversed(SIDES))
    assert ours[ours.index("--scheduler-cls") + 1] == "vllm_sched.SyncPolicyScheduler"
    asked = json.loads(ours[ours.index("--additional-config") + 1])
    assert asked == {"vllm_sched": {"long_prompt": {"max_wait_s": 30}}}
    assert "--scheduler-cls" not in theirs


def test_shorts_no_longer_wait_for_the_long_prompt(compared: Compared) -> None:
    theirs, ours = (
        statistics.median(compared.saved["sides"][side]["classes"]["short"]["ttfts"])
        for side in SIDES
    )
    (figure,) = [
        figure
        for figure in compared.saved["figures"]
        if (figure["group"], figure["measure"]) == ("short", "TTFT p50")
    ]
    assert figure["ratio"] == pytest.approx(ours / theirs)
    # Of two seconds a tenth is left on a machine that has nothing else to do.
    assert ours < theirs / 2


def test_the_picture_is_a_pair_on_one_axis_with_a_line_for_each_request(compared: Compared) -> None:
    svg = ET.fromstring(  # noqa: S314 - written by the program under test
        re.sub(r' xmlns="[^"]*"', "", compared.page[slice(*span(compared.page))], count=1)
    )
    lanes = [group for group in svg.iter("g") if group.get("class") == "lane"]
    each = LONGS + SHORTS + DECODES
    assert len(lanes) == 2 * each
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
        # Those that fall on one another are one.
        assert 0 < str(ticks.get("d")).count("M") <= tokens
        grey = [rect for rect in lane.findall("rect") if rect.get("class") == "wait"]
        if "background" not in title:
            waits.append(float(str(grey[0].get("width"))))
    theirs, ours = waits[1 : LONGS + SHORTS], waits[LONGS + SHORTS + 1 :]
    assert statistics.median(ours) < statistics.median(theirs) / 2
    assert compared.page.count("<tr") == 1 + len(compared.saved["figures"])


def span(page: str) -> tuple[int, int]:
    """Find the picture in its page."""
    return page.index("<svg"), page.index("</svg>") + len("</svg>")


def test_ctrl_c_leaves_no_worker(tmp_path: Path) -> None:
    with typed(tmp_path, *TYPED, "--save", str(tmp_path / "out.json")) as command:
        # The command itself, and of both workers the server and its guard.
        until = time.monotonic() + SOON_S
        while len(command.family()) < 5:
            assert command.process.poll() is None, command.err.read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        command.process.send_signal(signal.SIGINT)
        assert command.ends(SOON_S) == 130
        assert command.left() == []
    assert command.err.read_text() == "vllm-sched: interrupted; the workers have been stopped\n"
    assert not (tmp_path / "out.json").exists()


def test_a_worker_that_does_not_start_is_told_of_and_the_other_one_stopped(tmp_path: Path) -> None:
    with typed(tmp_path, *TYPED, "--candidate-arg=--no-such-flag") as command:
        assert command.ends(BOUND_S) == 1
        assert command.left() == []
    said = command.err.read_text()
    assert said.startswith("vllm-sched: candidate died with exit code ")
    assert "--no-such-flag" in said
