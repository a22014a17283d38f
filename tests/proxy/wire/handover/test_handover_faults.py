"""What a client sees of a worker that fails during a hand-over, and what becomes of the blocks.

Two prefill and two decode workers; the one that would serve the request fails once, the others are
well. `TABLE` says for each way and moment of failing what is expected. In every case parameters are
used at most once, blocks are freed, and nothing is left of the request.
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
# What the client gets: the whole answer; an answer that visibly ends early; the worker's own 400.
WHOLE, TORN, THEIR_400 = "whole", "torn", "400"

# How it fails             before     during     after      ... the worker's part of a request
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
INSTEAD: dict[str, Script] = {
    "reset": scripts.reset,
    "stall": scripts.stall,
    "cut": scripts.hang_up,
    **{status: scripts.error(int(status), "no") for status in ("400", "429", "500")},
}
LONG_AGO_S = 1000.0  # beyond all patience of the router with a worker


@dataclass(frozen=True)
class Case:
    """One cell of the table, for a stream or not."""

    fault: str
    role: Role
    moment: str
    stream: bool
    outcome: str

    def __str__(self) -> str:
        how = "stream" if self.stream else "whole"
        return f"{self.fault}-{self.role}-{self.moment}-{how}"


def cases() -> Iterator[Case]:
    """List all cells."""
    for (fault, role), outcomes in TABLE.items():
        for moment, outcome in zip((BEFORE, DURING, AFTER), outcomes, strict=True):
            for stream in (True, False):
                yield Case(fault, role, moment, stream, outcome)


@pytest.mark.parametrize("case", [*cases()], ids=str)
async def test_the_table(start: Start, case: Case) -> None:
    here = await pairs(start)
    body = chat_body(stream=case.stream)
    victim = here.victim(case.role, body)
    if case.moment == AFTER:  # the next request finds it so, on a connection kept open
        while not all(fake.connections for fake in here.site.fakes.values()):
            await here.serves(body)
            body = chat_body(stream=case.stream)
        victim = here.victim(case.role, body)
    await prepare(here, victim, case)
    before = len(victim.served)
    outcome = await outcome_of(here, victim, body, case)
    assert outcome == case.outcome
    await here.settled()
    refused = case.fault == "refuse" and case.moment == BEFORE
    assert refused or len(victim.served) > before  # it did fail
    await is_well_again(here, victim, case)


async def prepare(here: Pairs, victim: FakeWorker, case: Case) -> None:
    """Let it fail when the time has come."""
    if case.fault == "refuse":
        if case.moment != DURING:
            await victim.refuse()
            return
        usual = victim.script_for

        async def refuses(call: Call) -> None:
            await victim.refuse()
            await usual(call)(call)  # what it has begun, it ends

        victim.then(refuses)
    elif case.moment != DURING:
        here.kv.wrong(victim.name, Faults(before=INSTEAD[case.fault]))
    elif case.fault in ENDS:
        here.kv.wrong(victim.name, Faults(cut=(2, ENDS[case.fault])))
    else:
        here.kv.wrong(victim.name, Faults(during=INSTEAD[case.fault]))


async def outcome_of(here: Pairs, victim: FakeWorker, body: bytes, case: Case) -> str:
    """Ask, and put a word to what comes of it."""
    calls = len(victim.served)
    client = await here.send(body)
    stalls = case.fault == "stall"
    begins = stalls and case.moment == DURING
    if stalls:
        await victim.got(calls + 1)
    if begins and case.role is P:
        await eventually(here.has_begun)
    if stalls and not (begins and case.role is D):
        here.site.skip(LONG_AGO_S)
    head = await client.head()
    if begins and case.role is D:
        here.site.skip(LONG_AGO_S)
    try:
        async with asyncio.timeout(DEADLINE_S):
            answer = Answer(head.version, head.status, head.headers, await client.body(head))
    except (BrokenError, ConnectionError):
        assert not case.stream, "a stream can say that it failed"
        return TORN
    if answer.status == 400:
        assert answer.error()["message"] == "no"
        return THEIR_400
    assert answer.status == 200, answer
    if case.stream and b'"error"' in answer.body:
        is_torn(answer, body)
        return TORN
    assert words(answer) == expected(body)
    return WHOLE


def is_torn(answer: Answer, body: bytes) -> None:
    """Check that a stream says that it fails, after what there was of it."""
    *events, last = answer.body.split(b"\n\n")[:-1]
    assert json.loads(last[6:])["error"]["message"]
    seen = [json.loads(each[6:])["choices"][0]["delta"]["content"] for each in events]
    assert seen in (expected(body)[:1], expected(body)[:2])


async def is_well_again(here: Pairs, victim: FakeWorker, case: Case) -> None:
    """See that one failure leaves the others able to hand over."""
    if case.fault == "refuse":
        await victim.listen()
    await here.serves(stream=case.stream)
