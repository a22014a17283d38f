"""Many requests at once, and many faults at once."""

from __future__ import annotations

import asyncio
import random

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import BrokenError, chat
from tests.proxy.wire.site import Fake, Site, eventually

STREAMS, TOKENS = 200, 10


async def echo(call: Call) -> None:
    """Stream the prompt back, token by token."""
    text = call.json()["messages"][0]["content"]
    await scripts.stream(TOKENS, gap_s=0.01, text=f"{text}-")(call)


async def test_concurrent_streams_do_not_mix(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(echo)
    clients = [await site.client() for _ in range(STREAMS)]
    for number, client in enumerate(clients):
        await client.send(chat(f"q{number}", stream=True))
    answers = await asyncio.gather(*(client.answer(within=20.0) for client in clients))
    for number, answer in enumerate(answers):
        tokens = [scripts.token(f"q{number}-{n}") for n in range(TOKENS)]
        assert answer.body == b"".join(tokens) + scripts.DONE
    assert max(len(fake.connections) for fake in site.fakes.values()) < STREAMS


async def send_one(site: Site, dice: random.Random) -> str:
    """Send one request; return its outcome."""
    client = await site.client()
    stream = dice.random() < 0.5
    await client.send(chat(f"hi {dice.random()}", stream=stream))
    if dice.random() < 0.2:
        await asyncio.sleep(dice.random() * 0.05)
        client.reset()
        return "left"
    try:
        answer = await client.answer()
    except (BrokenError, ConnectionError):
        return "broken"
    finally:
        client.close()
    if answer.one(b"content-type").startswith(b"application/json"):
        answer.json()
        return "done" if answer.status == 200 else "error"
    if b'"error"' in answer.body:
        assert b"[DONE]" not in answer.body
        return "broken"
    assert answer.body.endswith(scripts.DONE)
    return "done"


async def test_faults_of_all_kinds_leave_no_charge_or_connection(start: Start) -> None:
    """The fixture checks that no charge, ticket, task or socket is left."""
    dice = random.Random(7)
    site = await start(
        *(Fake(f"w{n}", max_requests=8) for n in range(4)),
        router={"queue_requests": 50},
        wire={"first_byte_s": 0.3, "idle_s": 0.3},
    )
    faults = [
        scripts.reset,
        scripts.hang_up,
        scripts.stall,
        scripts.error(500),
        scripts.error(503, "busy", (b"Retry-After", b"0")),
        scripts.error(400),
        scripts.stream(3, end="reset"),
        scripts.stream(3, end="close"),
        scripts.stream(0, end="stall"),
        scripts.answer(framing="close"),
    ]

    async def fail_now_and_then(call: Call) -> None:
        await asyncio.sleep(dice.random() * 0.02)
        serve = scripts.obey("well")
        await (dice.choice(faults) if dice.random() < 0.15 else serve)(call)

    site.always(fail_now_and_then)
    outcomes = await asyncio.gather(*(send_one(site, dice) for _ in range(300)))
    assert outcomes.count("done") > 50
    assert outcomes.count("left") > 20
    await site.settled()
    await eventually(lambda: not site.wire.clients)
    site.always(scripts.obey("well"))
    site.skip(3600)
    assert (await site.ask(chat())).status == 200
