"""What a client may not say, whatever the fleet."""

from __future__ import annotations

import json
from typing import Any

from proxy.core.types import Role
from tests.proxy.wire.client import request
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.pairs import ask, chat_body, pairs
from tests.proxy.wire.site import Fake, Site

STEERING_ID = b"___prefill_addr_10.6.6.6:1___decode_addr_10.6.6.7:2_x"
READ_ME = {"do_remote_prefill": True, "remote_host": "10.6.6.6"}


def body(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "kv_transfer_params, said a prompt"}]
    return json.dumps({"model": "tiny", "messages": messages} | fields).encode()


async def test_an_operator_may_allow_it(start: Start) -> None:
    site = await start(router={"allow_client_kv_transfer": True})
    sent = body(kv_transfer_params=READ_ME)
    assert (await site.ask(request(sent, b"X-Request-Id: " + STEERING_ID))).status == 200
    [call] = site.served()
    assert call.body == sent
    assert call.all(b"x-request-id") == [STEERING_ID]


async def test_where_it_is_allowed_it_is_served_whole(start: Start) -> None:
    here = await pairs(start, allow_client_kv_transfer=True)
    sent = chat_body(kv_transfer_params={"do_remote_decode": False})
    assert (await ask(here, sent)).status == 200
    assert here.kinds() == ["whole"]


async def test_an_id_that_names_addresses_is_replaced(site: Site) -> None:
    answer = await site.ask(request(body(), b"X-Request-Id: " + STEERING_ID))
    [call] = site.served()
    [own] = call.all(b"x-request-id")
    assert b"addr" not in own
    assert answer.one(b"x-request-id") == own


async def test_prefill_workers_alone_are_not_ready(start: Start) -> None:
    site = await start(Fake("p0", Role.PREFILL), Fake("d0", Role.DECODE, up=False))
    assert (await site.ask(request(b"", method="GET", path="/ready"))).status == 503
    site.up("d0")
    assert (await site.ask(request(b"", method="GET", path="/ready"))).status == 200
