"""Prefill workers that refuse what others then serve."""

from __future__ import annotations

import logging

import pytest

from proxy.core.fleet.kv_links import BARRED_S, FAILURES_TO_BAR
from proxy.core.model.role import Role
from tests.proxy.metrics.scraped import scraped
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import Pairs, ask, chat_body, pairs

NO = "no"
ITS_OWN = [401, 403, 404, 405]
ANY_TIMES = 20


def refuses(here: Pairs, name: str, status: int, times: int = ANY_TIMES) -> None:
    """Have a worker refuse."""
    here.kv.wrong(name, *[Faults(before=scripts.error(status, NO))] * times)


def kinds(here: Pairs) -> list[str]:
    """List the legs, without the decode workers' names."""
    legs = [leg.split() for leg in here.legs()]
    return [f"{kind} {name}" if kind == "prefill" else kind for kind, name in legs]


BARE = scripts.answer(body=b'{"choices": [], "kv_transfer_params": {}}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "said", "note"),
    [
        (
            scripts.error(400, NO),
            "p0 refuses prefills that other workers serve, the last with status 400",
            "it refuses",
        ),
        (BARE, "p0 returns prefills without transfer parameters", ""),
    ],
    ids=["refused", "bare"],
)
async def test_one_whose_prefills_are_of_no_use_is_left_alone(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    wrong: scripts.Script,
    said: str,
    note: str,
    stream: bool,
) -> None:
    here = await pairs(start, prefills=1)
    here.kv.wrong("p0", *[Faults(before=wrong)] * (FAILURES_TO_BAR + 1))
    for _ in range(FAILURES_TO_BAR + 2):
        await here.serves(stream=stream)
    assert kinds(here) == [*["prefill p0", "whole"] * FAILURES_TO_BAR, "whole", "whole"]
    assert here.site.metrics.handovers.bars == {("p0", "any"): 1}
    assert 'proxy_handover_bars_total{prefill="p0",decode="any"} 1' in scraped(here.site.metrics)
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(said)
    scores = {score.worker: score.note for score in here.would_serve(chat_body()).scores}
    assert scores["p0"].startswith(f"prefills nothing for now: {note}")
    here.site.skip(BARRED_S)
    for found in (["prefill p0", "whole"], ["whole"]):  # one more will do
        await here.serves(stream=stream)
        assert kinds(here)[-len(found) :] == found
    here.site.skip(BARRED_S)  # one more tells that it is well again
    await here.serves(stream=stream)
    assert kinds(here)[-2:] == ["prefill p0", "decode"]
    assert not here.site.router.placer.links.bars


async def test_a_worker_that_refuses_does_not_draw_all_prefills(start: Start) -> None:
    here = await pairs(start)
    here.site.worker("p1").pace.token_s *= 2  # so that the other is better liked
    refuses(here, "p0", 400)
    for _ in range(FAILURES_TO_BAR + 5):
        await here.serves()
    assert kinds(here)[: 2 * FAILURES_TO_BAR] == ["prefill p0", "whole"] * FAILURES_TO_BAR
    assert kinds(here)[2 * FAILURES_TO_BAR :] == ["prefill p1", "decode"] * 5


@pytest.mark.parametrize("status", ITS_OWN)
async def test_what_it_may_lack_is_asked_of_another_first(start: Start, status: int) -> None:
    here = await pairs(start, retry_budget=0.0)
    here.site.worker("p1").pace.token_s *= 2
    refuses(here, "p0", status)
    for _ in range(FAILURES_TO_BAR + 1):
        await here.serves()
    assert kinds(here) == [
        *["prefill p0", "prefill p1", "decode"] * FAILURES_TO_BAR,
        *["prefill p1", "decode"],
    ]


@pytest.mark.parametrize("prefills", [1, 3])
async def test_one_other_prefill_worker_is_asked(start: Start, prefills: int) -> None:
    here = await pairs(start, prefills=prefills, max_attempts=5)
    here.kv.wrong("prefill", *[Faults(before=scripts.error(401, NO))] * prefills)
    await here.serves()
    asked = [leg.split()[0] for leg in here.legs()]
    assert asked == ["prefill"] * min(prefills, 2) + ["whole"]
    assert here.site.router.placer.handovers["tiny", "refused_prefill"] == 1


async def test_what_everybody_refuses_is_held_against_nobody(start: Start) -> None:
    here = await pairs(start, prefills=1)
    for role in (Role.PREFILL, Role.DECODE):
        here.kv.wrong(role.value, *[Faults(before=scripts.error(400, NO))] * (FAILURES_TO_BAR + 1))
    for _ in range(FAILURES_TO_BAR + 1):
        assert (await ask(here, chat_body())).status == 400
    assert kinds(here) == ["prefill p0", "whole"] * (FAILURES_TO_BAR + 1)
    assert not here.site.router.placer.links.bars


async def test_refusals_now_and_then_bar_nobody(start: Start) -> None:
    here = await pairs(start, prefills=1)
    for _ in range(FAILURES_TO_BAR + 1):
        refuses(here, "p0", 400, 1)
        await here.serves()
        await here.serves()
    assert kinds(here) == ["prefill p0", "whole", "prefill p0", "decode"] * (FAILURES_TO_BAR + 1)
    assert here.site.metrics.handovers.bars == {}
