"""Batches with separate prefill and decode workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.proxy.batches.harness import BatchHarness, line
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import Pairs, chat_body, pairs
from tests.proxy.wire.raw_client import request
from tests.proxy.wire.site import eventually

LONG = "word " * 12_000
# Enough for LONG at one token per character, which is how the fakes count.
CONTEXT = 100_000


async def harness_of(here: Pairs, folder: Path) -> BatchHarness:
    """Return a started harness."""
    harness = BatchHarness(here.site, folder / "batches")
    await harness.open()
    return harness


async def test_long_line_is_handed_over(start: Start, tmp_path: Path) -> None:
    here = await pairs(start, prefills=1, decodes=1, max_model_len=CONTEXT, disaggregate_above=1000)
    harness = await harness_of(here, tmp_path)
    done = await harness.until(await harness.begin([line("long", LONG), line("short")]))
    [long, short] = sorted(
        await harness.lines_of(done.output_file_id), key=lambda x: x["custom_id"]
    )
    assert (long["response"]["status_code"], short["response"]["status_code"]) == (200, 200)
    assert sorted(here.legs()) == ["decode d0", "prefill p0", "whole d0"]
    await harness.close()
    await here.settled()


async def test_only_long_lines_wait_for_a_prefill_worker(start: Start, tmp_path: Path) -> None:
    here = await pairs(start, prefills=1, decodes=1, max_model_len=CONTEXT, disaggregate_above=1000)
    harness = await harness_of(here, tmp_path)
    busy = asyncio.Event()
    usual = here.site.fakes["p0"].script_for

    async def prefill_slowly(call: object) -> None:
        await busy.wait()
        await usual(call)(call)  # type: ignore[arg-type]

    here.site.fakes["p0"].then(prefill_slowly)
    client = await here.site.client()
    await client.send(request(chat_body(messages=[{"role": "user", "content": "now " + LONG}])))
    await here.site.fakes["p0"].got(1)
    here.kv.inject("d0", Faults(before=scripts.stall))  # keeps the decode worker busy
    other = await here.site.client()
    await other.send(request(chat_body()))
    await here.site.fakes["d0"].got(1)
    batch = await harness.begin([line(f"s{n}") for n in range(3)] + [line("long", LONG)])
    await eventually(lambda: here.legs().count("whole d0") == 4, here.legs, within=10.0)
    assert here.legs().count("prefill p0") == 1
    assert here.site.router.queue.length <= 1
    busy.set()
    assert (await client.answer()).status == 200
    done = await harness.until(batch)
    assert (done.request_counts and done.request_counts.completed) == 4
    assert here.legs().count("prefill p0") == 2
    other.close()
    await harness.close()
    await here.settled()
