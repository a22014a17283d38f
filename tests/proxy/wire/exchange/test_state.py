"""The states of an exchange and their transitions."""

from __future__ import annotations

import pytest

from proxy.wire.exchange.state import NEXT, ExchangeState, may_follow
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually

READING, DONE = ExchangeState.READING, ExchangeState.DONE
QUEUED, SENT = ExchangeState.QUEUED, ExchangeState.SENT


def test_every_state_can_be_reached_and_may_end() -> None:
    assert NEXT.keys() == {state.value for state in ExchangeState}
    for state in ExchangeState:
        assert may_follow(state, DONE) is (state is not DONE)
        assert state is READING or any(may_follow(before, state) for before in ExchangeState)
    assert NEXT["done"] == ()
    assert set(NEXT["answering"]) == {QUEUED, SENT, DONE}  # only a continuation


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
