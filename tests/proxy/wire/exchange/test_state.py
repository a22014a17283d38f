"""The states of an exchange and their transitions."""

from __future__ import annotations

import pytest

from proxy.wire.exchange.state import NEXT, ExchangeState, may_follow
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually

READING, DONE = ExchangeState.READING, ExchangeState.DONE


def test_every_state_has_transitions() -> None:
    assert NEXT.keys() == {state.value for state in ExchangeState}


@pytest.mark.parametrize("state", [state for state in ExchangeState if state is not DONE])
def test_every_state_may_end_and_can_be_reached(state: ExchangeState) -> None:
    assert may_follow(state, DONE)
    assert state is READING or any(may_follow(before, state) for before in ExchangeState)


def test_done_allows_no_retry_and_answering_only_a_continuation() -> None:
    assert not any(may_follow(DONE, state) for state in ExchangeState)
    assert [state for state in ExchangeState if may_follow(ExchangeState.ANSWERING, state)] == [
        ExchangeState.QUEUED,
        ExchangeState.SENT,
        DONE,
    ]


async def test_repr_of_an_exchange_shows_its_state(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1))
    gate = site.hold()
    clients = [await site.send(chat("hi", b"X-Request-Id: %d" % n)) for n in range(2)]
    await eventually(lambda: len(site.wire.queued) == 1)
    shown = sorted(repr(exchange) for exchange in site.wire.exchanges)
    assert shown == [
        "<Exchange 0 chat/completions SENT>", "<Exchange 1 chat/completions QUEUED>",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="no transition"):
        next(iter(site.wire.exchanges)).set_state(READING)
    gate.set()
    assert [(await client.answer()).status for client in clients] == [200, 200]
