"""Sessions against an endpoint: a prompt repeats the last prompt and the real answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.bench.fake_openai import FakeOpenAI, serving
from tests.sim.making import ListedSessions
from vllm_sched.bench.client.endpoint import CHAT, EndpointOptions, probe_endpoint
from vllm_sched.bench.client.player import PlayedRun, play
from vllm_sched.bench.client.wire import COMPLETIONS
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Session, Turn

SYSTEM = ("system", 40)


async def played(
    fake: FakeOpenAI, *sessions: Session, path: str = COMPLETIONS, **settings: Any
) -> PlayedRun:
    schedule = Schedule(source=ListedSessions(*sessions), **settings)
    async with serving(fake):
        return await play(await probe_endpoint(EndpointOptions(fake.url, path=path)), schedule)


def prompts(fake: FakeOpenAI) -> list[str]:
    return [
        body["prompt"]
        if "prompt" in body
        else " ".join(message["content"].strip() for message in body["messages"])
        for body in fake.played
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_prompt_extends_the_last_prompt_and_answer(path: str) -> None:
    fake = FakeOpenAI(ttft_s=0.05)
    turns = (Turn(60, 4), Turn(20, 3, think_s=0.2), Turn(30, 2))
    run = await played(fake, Session("s", turns, (SYSTEM,)), path=path)
    first, second, third = (" ".join(text.split()) for text in prompts(fake))
    assert second.startswith(f"{first} a a a a ")
    assert third.startswith(f"{second} a a a ")
    sent = [outcome.prompt_tokens for outcome in run.outcomes]
    assert sent == pytest.approx([100, 128, 164], abs=14)  # an answer's token is a word of two
    assert [outcome.context_tokens for outcome in run.outcomes] == [0, sent[0] + 4, sent[1] + 3]
    (task,) = run.sessions
    assert (task.done, task.failed) == (3, False)
    assert task.seconds is not None
    assert run.outcomes[1].at >= run.outcomes[0].end + 0.2
    assert fake.most_under_way == 1
    if path == COMPLETIONS:  # with another space, no cache would have the answer's tokens
        one, two, _ = prompts(fake)
        assert two.startswith(f"{one} a a a a ")
        assert "  " not in two
    if path == CHAT:
        roles = [[message["role"] for message in body["messages"]] for body in fake.played]
        assert roles[1:] == [["user", *["assistant", "user"] * turn] for turn in (1, 2)]


async def test_early_ends_of_answers_are_no_repeated_tokens() -> None:
    fake = FakeOpenAI(longest_answer=2)
    run = await played(fake, Session("s", (Turn(60, 400), Turn(20, 400))))
    first, second = run.outcomes
    assert second.context_tokens == first.prompt_tokens + 2 <= second.prompt_tokens


async def test_sub_agents_run_at_once_and_repeat_their_parents_prompt() -> None:
    fake = FakeOpenAI(ttft_s=0.05)
    forks = tuple(Session(f"s.{n}", (Turn(10, 2),)) for n in range(3))
    fresh = Session("s.f", (Turn(12, 2),), fresh=True)
    run = await played(fake, Session("s", (Turn(40, 2, forks=(*forks, fresh)), Turn(10, 2))))
    assert fake.most_under_way == 4
    first, *children, last = (" ".join(text.split()) for text in prompts(fake))
    assert sum(child.startswith(f"{first} a a ") for child in children) == 3
    assert len(set(children)) == 4
    assert last.startswith(f"{first} a a ")
    (task,) = run.sessions
    assert (task.done, task.sub_agents) == (2, 4)
    assert max(outcome.at for outcome in run.outcomes) == run.outcomes[-1].at


async def test_think_time_is_that_which_the_task_waited_for() -> None:
    slow = Session("s.0", (Turn(5, 2, think_s=0.3), Turn(5, 2, think_s=0.2)))
    fast = Session("s.1", (Turn(5, 2, think_s=0.1),))
    turns = (Turn(40, 2, forks=(slow, fast)), Turn(5, 2, think_s=0.1))
    run = await played(FakeOpenAI(), Session("s", turns))
    (task,) = run.sessions
    assert task.think_s == pytest.approx(0.6)
    assert task.seconds is not None
    assert task.seconds >= 0.6


async def test_turns_name_their_session_and_prefixes_are_shared() -> None:
    fake = FakeOpenAI(cached_tokens=16)
    sessions = [Session(f"s{n}", (Turn(30, 2), Turn(10, 2)), (SYSTEM,)) for n in range(2)]
    run = await played(fake, *sessions, concurrency=1)
    ids = [headers.get("X-Session-Id") for headers in fake.headers[-4:]]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 2
    a, _, b, _ = (text.split() for text in prompts(fake))
    assert a[:20] == b[:20]
    assert a[20:] != b[20:]
    assert {outcome.cached_tokens for outcome in run.outcomes} == {16}


async def test_a_failed_turn_ends_its_session_only() -> None:
    fake = FakeOpenAI(failing=(2,))
    sessions = [Session(f"s{n}", (Turn(30, 2), Turn(10, 2), Turn(10, 2))) for n in range(2)]
    run = await played(fake, *sessions, concurrency=1)
    assert [(task.failed, task.done) for task in run.sessions] == [(True, 1), (False, 3)]


async def test_no_turn_is_sent_after_the_duration() -> None:
    turns = tuple(Turn(10, 2, think_s=0.05) for _ in range(1000))
    run = await played(FakeOpenAI(), Session("s", turns), duration_s=0.4, concurrency=1)
    (task,) = run.sessions
    assert task.done < 10
    assert (task.end, task.failed, run.interrupted) == (None, False, False)


async def test_a_stopped_run_keeps_its_sessions() -> None:
    stop = asyncio.Event()
    fake = FakeOpenAI(hangs=True)
    schedule = Schedule(source=ListedSessions(Session("s", (Turn(10, 2), Turn(10, 2)))))
    async with serving(fake):
        endpoint = await probe_endpoint(EndpointOptions(fake.url))
        running = asyncio.create_task(play(endpoint, schedule, stop=stop))
        await fake.begun.wait()
        stop.set()
        run = await running
    assert run.interrupted
    assert [task.end for task in run.sessions] == [None]


async def test_what_exceeds_the_models_context_is_compacted() -> None:
    fake = FakeOpenAI(max_model_len=400)
    run = await played(fake, Session("s", (Turn(200, 4), Turn(150, 4), Turn(150, 4))))
    assert run.cut == 1
    assert max(outcome.prompt_tokens for outcome in run.outcomes) < 400
    assert "compacted" in " ".join(run.warnings())


@pytest.mark.parametrize("prefix", [100, 380])
async def test_messages_that_the_plan_does_not_count_are_compacted(prefix: int) -> None:
    fake = FakeOpenAI(max_model_len=400, message_tokens=12)
    fork = Session("s.1", (Turn(20, 2), Turn(20, 2)), (("system", prefix),))
    turns = (*[Turn(2, 2)] * 20, Turn(2, 2, forks=(fork,)), *[Turn(2, 2)] * 20)
    run = await played(fake, Session("s", turns, (("system", prefix),)), path=CHAT)
    sent = [outcome.prompt_tokens + outcome.output_tokens for outcome in run.outcomes]
    assert 300 < max(sent) <= 400
    assert run.cut
    assert [task.done for task in run.sessions] == [41]
    if prefix == 100:  # a compacted prompt begins with the shared prefix
        assert len({tuple(text.split()[:40]) for text in prompts(fake)}) == 1
        assert all(outcome.context_tokens for outcome in run.outcomes[1:])
