"""Prefill workers that refuse requests which other workers serve."""

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
WORKER_STATUSES = [401, 403, 404, 405]
ANY_TIMES = 20


def refuse(here: Pairs, name: str, status: int, times: int = ANY_TIMES) -> None:
    """Let a worker refuse its next requests."""
    here.kv.inject(name, *[Faults(before=scripts.error(status, NO))] * times)


def legs_of(here: Pairs) -> list[str]:
    """Return the legs, without names of decode workers."""
    legs = [leg.split() for leg in here.legs()]
    return [f"{kind} {name}" if kind == "prefill" else kind for kind, name in legs]


BARE = scripts.answer(body=b'{"choices": [], "kv_transfer_params": {}}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message", "note"),
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
async def test_useless_prefill_worker_is_barred_and_logged(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    wrong: scripts.Script,
    message: str,
    note: str,
    stream: bool,
) -> None:
    here = await pairs(start, prefills=1)
    here.kv.inject("p0", *[Faults(before=wrong)] * (FAILURES_TO_BAR + 1))
    for _ in range(FAILURES_TO_BAR + 2):
        await here.check_served(stream=stream)
    assert legs_of(here) == [*["prefill p0", "whole"] * FAILURES_TO_BAR, "whole", "whole"]
    assert here.site.metrics.handovers.bars == {("p0", "any"): 1}
    assert 'proxy_handover_bars_total{prefill="p0",decode="any"} 1' in scraped(here.site.metrics)
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(message)
    scores = {score.worker: score.note for score in here.explain(chat_body()).scores}
    assert scores["p0"].startswith(f"prefills nothing for now: {note}")
    here.site.skip(BARRED_S)
    for legs in (["prefill p0", "whole"], ["whole"]):  # one more failure bars it again
        await here.check_served(stream=stream)
        assert legs_of(here)[-len(legs) :] == legs
    here.site.skip(BARRED_S)  # one success ends the bar
    await here.check_served(stream=stream)
    assert legs_of(here)[-2:] == ["prefill p0", "decode"]
    assert not here.site.router.placer.links.has_failures


async def test_refusing_worker_does_not_attract_prefills(start: Start) -> None:
    here = await pairs(start)
    here.site.worker("p1").pace.token_s *= 2  # so that p0 is preferred
    refuse(here, "p0", 400)
    for _ in range(FAILURES_TO_BAR + 5):
        await here.check_served()
    assert legs_of(here)[: 2 * FAILURES_TO_BAR] == ["prefill p0", "whole"] * FAILURES_TO_BAR
    assert legs_of(here)[2 * FAILURES_TO_BAR :] == ["prefill p1", "decode"] * 5


@pytest.mark.parametrize("status", WORKER_STATUSES)
async def test_refusal_for_the_workers_own_reason_is_retried_on_another(
    start: Start, status: int
) -> None:
    here = await pairs(start, retry_budget=0.0)
    here.site.worker("p1").pace.token_s *= 2
    refuse(here, "p0", status)
    for _ in range(FAILURES_TO_BAR + 1):
        await here.check_served()
    assert legs_of(here) == [
        *["prefill p0", "prefill p1", "decode"] * FAILURES_TO_BAR,
        *["prefill p1", "decode"],
    ]


@pytest.mark.parametrize("prefills", [1, 3])
async def test_refused_prefill_is_tried_on_one_other_worker(start: Start, prefills: int) -> None:
    here = await pairs(start, prefills=prefills, max_attempts=5)
    here.kv.inject("prefill", *[Faults(before=scripts.error(401, NO))] * prefills)
    await here.check_served()
    tried = [leg.split()[0] for leg in here.legs()]
    assert tried == ["prefill"] * min(prefills, 2) + ["whole"]
    assert here.site.router.placer.handovers["tiny", "refused_prefill"] == 1


async def test_request_refused_everywhere_bars_no_worker(start: Start) -> None:
    here = await pairs(start, prefills=1)
    for role in (Role.PREFILL, Role.DECODE):
        here.kv.inject(role.value, *[Faults(before=scripts.error(400, NO))] * (FAILURES_TO_BAR + 1))
    for _ in range(FAILURES_TO_BAR + 1):
        assert (await ask(here, chat_body())).status == 400
    assert legs_of(here) == ["prefill p0", "whole"] * (FAILURES_TO_BAR + 1)
    assert not here.site.router.placer.links.has_failures


async def test_refusal_of_a_prefill_passes_if_no_other_worker_takes_the_request(
    here: Pairs,
) -> None:
    refuse = here.site.fakes["p0"].hold_next(scripts.error(400, "theirs"))
    client = await here.send(chat_body())
    await here.site.fakes["p0"].got(1)
    here.site.fleet.roster.drain("d0")
    refuse.set()
    answer = await client.answer()
    assert (answer.status, answer.error()["message"]) == (400, "theirs")


async def test_occasional_refusals_bar_no_worker(start: Start) -> None:
    here = await pairs(start, prefills=1)
    for _ in range(FAILURES_TO_BAR + 1):
        refuse(here, "p0", 400, 1)
        await here.check_served()
        await here.check_served()
    assert legs_of(here) == ["prefill p0", "whole", "prefill p0", "decode"] * (FAILURES_TO_BAR + 1)
    assert here.site.metrics.handovers.bars == {}
