"""The Perfetto trace of a simulation."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.sim.making import fleet_of
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.perfetto import CLIENTS, write


def traced(path: Path, count: int, *workers: dict[str, Any], trace: bool) -> tuple[Any, Any]:
    """Play and write a trace; return the played fleet and the events."""
    fleet = SimulatedFleet(*fleet_of(*workers), partial(ExactEngine, traced=trace))
    played = fleet.play(Schedule(source=find("azure-conv"), rate=20.0, count=count))
    write(path, fleet.engines, played.outcomes, played.duration)
    return played, json.loads(path.read_text())["traceEvents"]


def test_trace_has_all_workers_and_requests(tmp_path: Path) -> None:
    played, events = traced(tmp_path / "t.json", 30, {}, {}, trace=True)
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(set(groups.values())) == len(groups) == 5
    assert sum("w1" in name for name in groups.values()) == 2
    assert {event["pid"] for event in events} == groups.keys()
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():  # Perfetto nests slices that overlap
        track.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(track))
    clients = [e for e in events if e["pid"] == CLIENTS and e["ph"] == "X"]
    assert sum("until the first token" in event["name"] for event in clients) == 30
    steps = [e for e in events if e["name"] in ("prefill", "decode", "mixed") and e["tid"] == 1]
    counted = sum(facts["steps"] for facts in played.facts["workers"].values())
    assert sum("step" in event["args"] for event in steps) == counted
    assert max(e["ts"] + e["dur"] for e in clients) == round(played.duration * 1e6)
    # Engines without a trace are left out.
    _, events = traced(tmp_path / "t.json", 3, {}, trace=False)
    assert {event["pid"] for event in events} == {CLIENTS}
