"""The trace of the engine, and its file for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.engine.trace import (
    ENGINE,
    REQUESTS,
    VARIABLE,
    EngineTrace,
    TracedArrival,
    TracedStep,
    TraceFile,
    chrome_trace,
    from_environment,
)

Event = dict[str, Any]


def step(
    number: int,
    start: float,
    end: float,
    prefill: dict[str, tuple[int, int]] | None = None,
    decode: dict[str, int] | None = None,
    **more: Any,
) -> TracedStep:
    """Return a step of prefills (tokens, context) and decodes (tokens)."""
    prefill, decode = prefill or {}, decode or {}
    tokens = {name: tokens for name, (tokens, _) in prefill.items()} | decode
    contexts = {name: context for name, (_, context) in prefill.items()}
    return TracedStep(number, start, end, 64, tokens, contexts, len(tokens), 0, **more)


def events(log: list[TracedArrival | TracedStep], now: float) -> list[Event]:
    """Write a log, check the file's invariants, and return its events."""
    file = json.loads("".join(chrome_trace(log, now)))
    assert file["otherData"] == {"clock": "monotonic"}
    check(file["traceEvents"])
    return list(file["traceEvents"])


def slices(found: list[Event], process: int) -> dict[str, list[Event]]:
    """Return each track's slices by the track's name."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    tracks: dict[str, list[Event]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X" and event["pid"] == process:
            tracks[names[event["pid"], event["tid"]]].append(event)
    return tracks


def check(found: list[Event]) -> None:
    """Check that slices do not overlap, and that requests' tokens add up to the steps'."""
    for process in (ENGINE, REQUESTS):
        for name, track in slices(found, process).items():
            assert all(e["dur"] >= 0 for e in track), name
            for one, other in pairwise(sorted(track, key=lambda e: e["ts"])):
                assert one["ts"] + one["dur"] <= other["ts"], f"{name}: {one} and {other}"
    of_steps = defaultdict(int)
    for event in slices(found, ENGINE).get("steps", []):
        of_steps[event["ts"]] += event["args"]["tokens"]
    of_requests = defaultdict(int)
    for track in slices(found, REQUESTS).values():
        for event in track:
            if event["name"] in ("prefill", "decode"):
                of_requests[event["ts"]] += event["args"]["tokens"]
    assert of_requests == of_steps


def slices_of(track: list[Event]) -> list[tuple[str, int, int, int | None]]:
    """Return a track's slices: name, start and end in microseconds, tokens."""
    return [(e["name"], e["ts"], e["ts"] + e["dur"], e["args"].get("tokens")) for e in track]


def test_request_has_slices_for_wait_chunks_and_decodes() -> None:
    log = [
        TracedArrival(1.0, "r", 100),
        step(1, 2.0, 3.0, {"r": (64, 0)}),
        step(2, 3.0, 3.5, {"r": (36, 64)}),
        step(3, 3.5, 3.6, decode={"r": 1}),
    ]
    found = events(log, 4.0)
    (name, track), *rest = slices(found, REQUESTS).items()
    assert (name, rest) == ("r (100 tokens)", [])
    assert slices_of(track) == [
        ("waiting", 1_000_000, 2_000_000, None),
        ("prefill", 2_000_000, 3_000_000, 64),
        ("prefill", 3_000_000, 3_500_000, 36),
        ("decode", 3_500_000, 3_600_000, 1),
    ]
    assert [e["args"].get("computed_before") for e in track] == [None, 0, 64, None]
    steps = slices(found, ENGINE)["steps"]
    assert [e["name"] for e in steps] == ["prefill", "prefill", "decode"]
    assert steps[1]["args"] == {
        "step": 2, "budget": 64, "tokens": 36, "prefill_tokens": 36, "prefills": 1, "decodes": 0,
    }  # fmt: skip


def test_mixed_step_has_counters_of_prefill_and_decode() -> None:
    found = events([step(1, 0.0, 1.0, {"p": (30, 0)}, {"d": 1, "e": 3})], 1.0)
    assert slices(found, ENGINE)["steps"][0]["name"] == "mixed"
    counters = {e["name"]: e["args"] for e in found if e["ph"] == "C"}
    assert counters == {
        "tokens": {"prefill": 30, "decode": 4},
        "budget": {"tokens": 64},
        "requests": {"running": 3, "waiting": 0},
    }


def test_preempted_request_has_a_slice_until_it_runs_again() -> None:
    log = [
        step(1, 0.0, 1.0, decode={"a": 1, "b": 1}),
        step(2, 1.0, 2.0, decode={"a": 1}, preempted={"b"}),
        step(3, 2.0, 3.0, {"b": (20, 0)}, {"a": 1}),
    ]
    track = slices(events(log, 3.0), REQUESTS)["b (came before)"]
    assert slices_of(track) == [
        ("decode", 0, 1_000_000, 1),
        ("preempted", 1_000_000, 2_000_000, None),
        ("prefill", 2_000_000, 3_000_000, 20),
    ]


def test_waiting_slice_ends_now_or_at_the_abort() -> None:
    log = [
        TracedArrival(0.5, "stays", 9),
        TracedArrival(0.5, "leaves", 9),
        step(1, 1.0, 2.0, decode={"a": 1}, ended={"leaves", "never seen"}),
    ]
    tracks = slices(events(log, 4.0), REQUESTS)
    assert slices_of(tracks["stays (9 tokens)"]) == [("waiting", 500_000, 4_000_000, None)]
    assert slices_of(tracks["leaves (9 tokens)"]) == [("waiting", 500_000, 1_000_000, None)]


def test_reused_name_gets_another_track() -> None:
    log = [
        TracedArrival(0.0, "r", 1),
        step(1, 0.0, 1.0, {"r": (1, 0)}),
        TracedArrival(1.5, "r", 2),
        step(2, 2.0, 3.0, {"r": (2, 0)}, ended=()),
    ]
    found = events([log[0], log[1], step(9, 1.0, 1.0, ended={"r"}), *log[2:]], 3.0)
    assert set(slices(found, REQUESTS)) == {"r (1 tokens)", "r (2 tokens)"}
    tids = {e["tid"] for e in found if e["ph"] == "X" and e["pid"] == REQUESTS}
    assert len(tids) == 2


def test_names_are_escaped() -> None:
    name = 'r"\n\\{0}'
    log = [TracedArrival(0.0, name, 1), step(1, 0.0, 1.0, {name: (1, 0)})]
    assert set(slices(events(log, 1.0), REQUESTS)) == {f"{name} (1 tokens)"}


def test_oldest_entries_are_dropped() -> None:
    trace = EngineTrace(max_entries=50)
    trace.record_arrival(0.0, "a", 10)
    for i in range(100):
        trace.record_step(step(i, i, i + 1.0, decode={"a": 1, "b": 1, "c": 1}))
        assert len(trace) <= 50
    kept = trace.copy()
    assert [entry.number for entry in kept if isinstance(entry, TracedStep)] == [*range(88, 100)]
    found = events(kept, 100.0)
    assert set(slices(found, REQUESTS)) == {f"{name} (came before)" for name in "abc"}
    # A step that is larger than the limit is not kept.
    trace.record_step(step(100, 100, 101, decode={str(number): 1 for number in range(50)}))
    assert (len(trace), trace.copy()) == (0, [])


def test_write_replaces_the_file_atomically(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "out.json")
    file.trace.record_arrival(0.0, "a", 1)
    file.write(1.0)
    file.trace.record_arrival(0.0, "b", 1)
    file.write_in_thread(1.0).join()
    check(found := json.loads((tmp_path / "out.json").read_text())["traceEvents"])
    assert set(slices(found, REQUESTS)) == {"a (1 tokens)", "b (1 tokens)"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_unwritable_path_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path / "gone" / "out.json")
    with caplog.at_level("ERROR", "vllm.vllm_sched"):
        file.write(1.0)
    assert "could not be written" in caplog.text


def test_each_engine_has_the_file_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert from_environment(0, 1) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "t.json"))
    for engine, engines, name in ((0, 1, "t.json"), (1, 2, "t.engine1.json")):
        trace_file = from_environment(engine, engines)
        assert trace_file is not None
        assert trace_file.path == tmp_path / name
