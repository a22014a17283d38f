"""Batches with separate prefill and decode workers."""

from __future__ import annotations

from pathlib import Path

from tests.proxy.batches.harness import BatchHarness, line
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.pairs import pairs

LONG = "word " * 12_000
# Enough for LONG at one token per character, which is how the fakes count.
CONTEXT = 100_000


async def test_long_line_is_handed_over(start: Start, tmp_path: Path) -> None:
    here = await pairs(start, prefills=1, decodes=1, max_model_len=CONTEXT, disaggregate_above=1000)
    harness = BatchHarness(here.site, tmp_path)
    await harness.open()
    done = await harness.until(await harness.begin([line("long", LONG), line("short")]))
    [long, short] = sorted(
        await harness.lines_of(done.output_file_id), key=lambda x: x["custom_id"]
    )
    assert (long["response"]["status_code"], short["response"]["status_code"]) == (200, 200)
    assert sorted(here.legs()) == ["decode d0", "prefill p0", "whole d0"]
    await harness.close()
    await here.settled()
