"""What a transfer takes, learnt from streams over links of known speed, in the router's time."""

from __future__ import annotations

from statistics import median

import pytest

from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.pairs import Pairs, ask, chat_body, expected, pairs, words

SIZES = (400, 2000, 8000, 16_000)  # of prompts, in characters
# Seconds before the first byte of a KV cache, and per character of the prompt.
LINKS = {"d0": (2.0, 4e-4), "d1": (8.0, 4e-5)}


def linked(here: Pairs, fake: FakeWorker) -> Script:
    """Answer as a decode worker does, once the prompt's KV cache is there."""
    usual = here.kv.worker(fake, "decode")

    async def run(call: Call) -> None:
        body = call.json()
        if (body.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            here.site.skip(takes_s(fake.name, body["messages"][0]["content"]))
        await usual(call)

    return run


def takes_s(name: str, text: str) -> float:
    """Say how long the transfer of a prompt takes."""
    fixed_s, character_s = LINKS[name]
    return fixed_s + character_s * len(text)


def chat(size: int) -> tuple[bytes, str]:
    """Write a chat of some size; return its text too."""
    text = f"{size}: " + "z" * size
    return chat_body(stream=True, messages=[{"role": "user", "content": text}]), text


@pytest.mark.parametrize("name", LINKS)
async def test_the_median_is_predicted_within_thirty_per_cent(start: Start, name: str) -> None:
    """Of each pair, however fast the others are."""
    here = await pairs(start, prefills=1, decodes=2, prefix_affinity=False)
    for each in LINKS:
        here.site.fakes[each].always(linked(here, here.site.fakes[each]))
    real: list[float] = []
    predicted: list[float] = []
    for turn in range(48):
        body, text = chat(SIZES[turn // 2 % len(SIZES)])
        aim = ("d0", "d1")[turn % 2]
        here.site.fleet.drain("d1" if aim == "d0" else "d0")
        handover = here.would_serve(body).handover
        assert words(await ask(here, body)) == expected(body)
        for each in LINKS:
            here.site.fleet.drain(each, draining=False)
        if aim == name and turn >= 32:
            assert handover is not None
            real.append(takes_s(name, text))
            predicted.append(handover.transfer_s)
    await here.settled()
    assert here.legs()[-1] == "decode d1"
    assert median(predicted) == pytest.approx(median(real), rel=0.3)
    off = [each / true for each, true in zip(predicted, real, strict=True)]
    assert 0.7 < median(off) < 1.3
