"""Random faults: each line still has one result."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import DEADLINE_S, lines
from tests.proxy.wire import scripts
from tests.proxy.wire.site import Fake

COUNT = 60


@pytest.mark.parametrize(
    ("seed", "database"),
    [(0, "sqlite"), (1, "sqlite"), (2, "postgres"), (3, "postgres")],
    indirect=["database"],
)
async def test_each_line_has_one_result_under_random_faults(
    open_harness: OpenHarness, seed: int, database: str | None
) -> None:
    rng = random.Random(seed)
    workers = [Fake(name, max_requests=16) for name in ("w0", "w1")]
    harness = await open_harness(*workers, database=database, concurrency=12)
    answers = [
        *[scripts.obey("w")] * 12,
        *map(scripts.error, (400, 500, 503, 429)),
        scripts.reset,
        scripts.hang_up,
        scripts.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", end="reset"),
        scripts.raw(b"nonsense\r\n\r\n", end="close"),
    ]

    async def answer_at_random(call: Any) -> None:
        await asyncio.sleep(rng.random() * 0.01)
        await rng.choice(answers)(call)

    harness.site.always(answer_at_random)
    batches = [await harness.begin(lines(COUNT, prefix), window="7d") for prefix in "ab"]
    ended: dict[str, Any] = {}
    async with asyncio.timeout(4 * DEADLINE_S):
        while len(ended) < len(batches):
            await asyncio.sleep(rng.random() * 0.1)
            match rng.randrange(6):
                case 0:
                    await harness.reopen()
                case 1:
                    harness.batches.scheduler.stop()  # drops all running lines
                case 2:
                    await harness.batches.scheduler.turn()
                case _:
                    harness.skip(90.0)  # lets breakers close
            for batch in batches:
                now = await harness.client.batches.retrieve(batch.id)
                if now.status == "completed":
                    ended[batch.id] = now
    for batch, prefix in zip(batches, "ab", strict=True):
        done = ended[batch.id]
        good = await harness.lines_of(done.output_file_id)
        bad = await harness.lines_of(done.error_file_id)
        found = Counter(entry["custom_id"] for entry in [*good, *bad])
        assert found == {f"{prefix}{n}": 1 for n in range(COUNT)}
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (COUNT, len(good), len(bad))
        assert all(entry["response"]["status_code"] == 200 for entry in good)
        assert {entry["response"] and entry["response"]["status_code"] for entry in bad} <= {
            None, 400, 500, 502, 504,
        }  # fmt: skip
