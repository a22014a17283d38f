"""The comparison under the sessions of coding agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.agents import play as playing
from benchmarks.agents import real, report
from benchmarks.agents.__main__ import main
from benchmarks.agents.peers import CacheAware, queue_scores
from benchmarks.agents.play import Figures, Load, fleet_of, play
from benchmarks.agents.sessions import sessions
from benchmarks.agents.sides import OURS, ROUND_ROBIN, SCORES, SESSIONS, SIDES
from benchmarks.agents.targets import TTFT_S, Alone
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.models import of_profile

SOME = Figures(1.0, 0.9, 1.1, 60, 90, 1.2, 1.5, 0.2, 1.0, 5.0, 0.03, 0.9, 1e5, 0, 0.05, 0.1, 0)


def test_sessions_are_under_way_at_the_start() -> None:
    under_way, coming = sessions(20, 3, seed=1)
    assert len(under_way) == 20
    assert sum(session[0].request.turn > 0 for session in under_way) > 10
    following = list(coming)
    assert [session[0].request.turn for session in following] == [0, 0, 0]
    names = [session[0].request.session for session in (*under_way, *following)]
    assert len(set(names)) == 23
    assert sessions(20, 3, seed=1)[0] == under_way


def test_a_turn_is_in_time_by_its_new_tokens() -> None:
    alone = Alone(of_profile(playing.PROFILE))
    turn = Request(0.0, "", 200_000, 500, context_tokens=199_000)
    whole = replace(turn, context_tokens=0)
    assert TTFT_S < alone.ttft_limit_s(turn) < 2 * TTFT_S
    assert alone.ttft_limit_s(whole) > 5 * alone.ttft_limit_s(turn)
    assert alone.turn_s(whole) - alone.turn_s(turn) == pytest.approx(
        alone.ttft_s(whole) - alone.ttft_s(turn)
    )


def test_cache_aware_follows_long_matches_until_loads_are_uneven() -> None:
    fleet = fleet_of(SIDES["cache_aware"], Load(6, 3, 1, fluid=True))
    rule = fleet.router.placer.rule
    assert isinstance(rule, CacheAware)
    first = Request(0.0, "", 10_000, 10, shared=(("s", 10_010),), session="s")
    again = replace(first, prompt_tokens=11_000, shared=(("s", 11_010),))
    other = replace(first, shared=(("t", 10_010),), session="t")
    used = []
    for request in (first, again, other):
        fleet._under_way[len(fleet._outcomes)] = None  # type: ignore[assignment]
        fleet._arrive(request, 0.0, None)
        used.append(fleet._outcomes[-1].worker)
    assert used[0] == used[1] != used[2]
    assert queue_scores([3, 1, 2]) == [0.0, 1.0, 0.5]
    assert queue_scores([2, 2]) == [1.0, 1.0]


def test_a_router_that_knows_caches_has_more_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "WARM_UP_S", 0.0)
    found = {side: play((side, Load(6, 3, 1, fluid=True))) for side in (ROUND_ROBIN, SESSIONS)}
    assert not any(each.failed for each in found.values())
    assert found[SESSIONS].hit > found[ROUND_ROBIN].hit + 0.03
    assert found[SESSIONS].in_time > found[ROUND_ROBIN].in_time


def test_the_load_where_the_peers_rule_first_misses() -> None:
    served = replace(SOME, in_time=0.96)
    better = replace(SOME, goodput=1.4, in_time=0.99)
    found = {16: {SCORES: [served], OURS: [served]}, 24: {SCORES: [SOME], OURS: [better]}}
    assert report.first_miss(found, SCORES) == 24
    lines = list(report.verdicts(found))
    assert "24 sessions at once" in lines[0]
    assert lines[1].startswith(f"{OURS}: 1.40x")
    assert "missed" not in lines[1]
    found[24][OURS] = [replace(better, goodput=1.2)]
    assert "missed" in list(report.verdicts(found))[1]
    assert list(report.verdicts({16: found[16]})) == ["a peers' rule serves every load"]
    (line,) = report.verdicts({16: {OURS: [SOME]}})
    assert line.startswith("no peers' rule was played")
    none_in_time = {SCORES: [SOME, replace(SOME, goodput=0.0)], OURS: [SOME, SOME]}
    assert "no ratio" in list(report.verdicts({24: none_in_time}))[1]


def test_too_few_sessions_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--sessions=1", "--at-once=1", "--seeds=4", "--rows=ours", "--jobs=1"]
    assert main(["--fluid", *few]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "agents: no turn was sent after the warm-up of 315 s; play more --sessions"


async def test_the_sides_play_sessions_of_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A table of sessions of one turn has no later turns.
    played = real.Played([real.Turn(0, 0.5, 100, 0)], [1.0])
    assert real.table({"ours": played}).row_count == 1
    monkeypatch.setattr(real, "THINK_S", 0.0)
    sent: dict[str, list[tuple[int, int]]] = {}

    class Client:
        """Stands for OpenAI's client, and for the part that creates completions."""

        def __init__(self) -> None:
            self.chat = SimpleNamespace(completions=self)

        async def create(
            self, messages: list[Any], max_tokens: int, extra_headers: Any, **_: Any
        ) -> AsyncIterator[Any]:
            words = len(messages[-1]["content"].split())
            name = extra_headers["X-Session-Id"]
            sent.setdefault(name, []).append((words, max_tokens))

            async def events() -> AsyncIterator[Any]:
                usage = SimpleNamespace(prompt_tokens=words, prompt_tokens_details=None)
                yield SimpleNamespace(usage=usage, choices=[])

            return events()

    client: Any = Client()
    for side in ("a", "b"):
        await real.session(client, side, "0/1", 2, seed=1)
    assert list(sent) == ["a/0/1", "b/0/1"]
    assert sent["a/0/1"] == sent["b/0/1"]
