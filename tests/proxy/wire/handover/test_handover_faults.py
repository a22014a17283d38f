"""Failures during a hand-over: what the client gets, and what happens to the blocks.

There are two prefill and two decode workers. The worker that would serve the request fails once.
`TABLE` has the outcome for each kind and moment of failure. In every case, parameters are used at
most once, blocks are freed, and nothing is left of the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from proxy.core.model.role import Role
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import DEADLINE_S, Answer, BrokenError
from tests.proxy.wire.site import eventually

P, D = Role.PREFILL, Role.DECODE
BEFORE, DURING, AFTER = "before", "during", "after"
# What the client gets: the whole response, a visibly broken one, or the worker's own 400.
WHOLE, TORN, THEIR_400 = "whole", "torn", "400"

# Failure                  before     during     after      ... the worker's part of a request
TABLE: dict[tuple[str, Role], tuple[str, str, str]] = {
    ("refuse", P):         (WHOLE,     WHOLE,     WHOLE),
    ("refuse", D):         (WHOLE,     WHOLE,     WHOLE),
    ("reset", P):          (WHOLE,     WHOLE,     WHOLE),
    ("reset", D):          (WHOLE,     TORN,      WHOLE),
    ("stall", P):          (WHOLE,     WHOLE,     WHOLE),
    ("stall", D):          (WHOLE,     TORN,      WHOLE),
    ("cut", P):            (WHOLE,     WHOLE,     WHOLE),
    ("cut", D):            (WHOLE,     TORN,      WHOLE),
    ("400", P):            (WHOLE,     WHOLE,     WHOLE),
    ("400", D):            (THEIR_400, THEIR_400, THEIR_400),
    ("429", P):            (WHOLE,     WHOLE,     WHOLE),
    ("429", D):            (WHOLE,     WHOLE,     WHOLE),
    ("500", P):            (WHOLE,     WHOLE,     WHOLE),
    ("500", D):            (WHOLE,     WHOLE,     WHOLE),
}  # fmt: skip
ENDS = {"reset": "reset", "stall": "stall", "cut": "close"}
REPLACEMENTS: dict[str, Script] = {
    "reset": scripts.reset,
    "stall": scripts.stall,
    "cut": scripts.hang_up,
    **{status: scripts.error(int(status), "no") for status in ("400", "429", "500")},
}
BEYOND_TIMEOUTS_S = 1000.0


@dataclass(frozen=True)
class Case:
    """A cell of the table, with or without streaming."""

    fault: str
    role: Role
    moment: str
    stream: bool
    outcome: str

    def __str__(self) -> str:
        how = "stream" if self.stream else "whole"
        return f"{self.fault}-{self.role}-{self.moment}-{how}"


def cases() -> Iterator[Case]:
    """Yield all cells."""
    for (fault, role), outcomes in TABLE.items():
        for moment, outcome in zip((BEFORE, DURING, AFTER), outcomes, strict=True):
            for stream in (True, False):
                yield Case(fault, role, moment, stream, outcome)


@pytest.mark.parametrize("case", [*cases()], ids=str)
async def test_failure_has_the_outcome_of_the_table(start: Start, case: Case) -> None:
    here = await pairs(start)
    body = chat_body(stream=case.stream)
    victim = here.victim(case.role, body)
    if case.moment == AFTER:  # the next request fails on a kept connection
        while not all(fake.connections for fake in here.site.fakes.values()):
            await here.check_served(body)
            body = chat_body(stream=case.stream)
        victim = here.victim(case.role, body)
    await prepare(here, victim, case)
    before = len(victim.served)
    outcome = await outcome_of(here, victim, body, case)
    assert outcome == case.outcome
    await here.settled()
    refused = case.fault == "refuse" and case.moment == BEFORE
    assert refused or len(victim.served) > before  # the failure happened
    await check_next(here, victim, case)


async def prepare(here: Pairs, victim: FakeWorker, case: Case) -> None:
    """Let the worker fail at the moment of the case."""
    if case.fault == "refuse":
        if case.moment != DURING:
            await victim.refuse()
            return
        usual = victim.script_for

        async def refuse_new(call: Call) -> None:
            await victim.refuse()
            await usual(call)(call)  # running requests end

        victim.then(refuse_new)
    elif case.moment != DURING:
        here.kv.inject(victim.name, Faults(before=REPLACEMENTS[case.fault]))
    elif case.fault in ENDS:
        here.kv.inject(victim.name, Faults(cut=(2, ENDS[case.fault])))
    else:
        here.kv.inject(victim.name, Faults(during=REPLACEMENTS[case.fault]))


async def outcome_of(here: Pairs, victim: FakeWorker, body: bytes, case: Case) -> str:
    """Send a request; return its outcome."""
    calls = len(victim.served)
    client = await here.send(body)
    stalls = case.fault == "stall"
    begins = stalls and case.moment == DURING
    if stalls:
        await victim.got(calls + 1)
    if begins and case.role is P:
        await eventually(here.prefill_has_begun)
    if stalls and not (begins and case.role is D):
        here.site.skip(BEYOND_TIMEOUTS_S)
    head = await client.head()
    if begins and case.role is D:
        here.site.skip(BEYOND_TIMEOUTS_S)
    try:
        async with asyncio.timeout(DEADLINE_S):
            answer = Answer(head.version, head.status, head.headers, await client.body(head))
    except (BrokenError, ConnectionError):
        assert not case.stream, "a stream ends with an error event"
        return TORN
    if answer.status == 400:
        assert answer.error()["message"] == "no"
        return THEIR_400
    assert answer.status == 200, answer
    if case.stream and b'"error"' in answer.body:
        check_torn(answer, body)
        return TORN
    assert words(answer) == expected(body)
    return WHOLE


def check_torn(answer: Answer, body: bytes) -> None:
    """Check that a partial stream ends with an error event."""
    *events, last = answer.body.split(b"\n\n")[:-1]
    assert json.loads(last[6:])["error"]["message"]
    seen = [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events]
    assert seen in (expected(body)[:1], expected(body)[:2])


async def check_next(here: Pairs, victim: FakeWorker, case: Case) -> None:
    """Check that the next request is handed over."""
    if case.fault == "refuse":
        await victim.listen()
    await here.check_served(stream=case.stream)
