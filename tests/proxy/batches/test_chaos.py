"""Anything may go wrong, by seed: each line still has one result."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.batches.office import DEADLINE_S, Office, lines
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.site import Fake

COUNT = 60


@pytest.mark.parametrize("seed", range(4))
async def test_each_line_has_one_result(start: Start, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    site = await start(Fake("w0", max_requests=16), Fake("w1", max_requests=16))
    office = Office(site, tmp_path, concurrency=12)
    await office.open()
    answers = [
        *[scripts.obey("w")] * 12,
        scripts.error(400),
        scripts.error(500),
        scripts.error(503),
        scripts.error(429),
        scripts.reset,
        scripts.hang_up,
        scripts.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", end="reset"),
        scripts.raw(b"nonsense\r\n\r\n", end="close"),
    ]

    async def anything(call: Any) -> None:
        await asyncio.sleep(chance.random() * 0.01)
        await chance.choice(answers)(call)

    site.always(anything)
    batches = [await office.begin(lines(COUNT, prefix), window="7d") for prefix in "ab"]
    over: dict[str, Any] = {}
    async with asyncio.timeout(4 * DEADLINE_S):
        while len(over) < len(batches):
            await asyncio.sleep(chance.random() * 0.1)
            match chance.randrange(6):
                case 0:
                    await office.reopen()
                case 1:
                    office.batches.lane.stop()  # all that was in flight is forgotten
                case 2:
                    await office.batches.lane.turn()
                case _:
                    office.skip(90.0)  # breakers and rests are over
            for batch in batches:
                now = await office.client.batches.retrieve(batch.id)
                if now.status == "completed":
                    over[batch.id] = now
    for batch, prefix in zip(batches, "ab", strict=True):
        done = over[batch.id]
        good = await office.lines_of(done.output_file_id)
        bad = await office.lines_of(done.error_file_id)
        found = Counter(each["custom_id"] for each in [*good, *bad])
        assert found == {f"{prefix}{n}": 1 for n in range(COUNT)}
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (COUNT, len(good), len(bad))
        assert all(each["response"]["status_code"] == 200 for each in good)
        assert {each["response"] and each["response"]["status_code"] for each in bad} <= {
            None, 400, 500, 502, 504,
        }  # fmt: skip
    await office.close()
    await site.settled()
