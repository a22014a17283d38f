"""The clients, and the batches that run at the same time."""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import openai

from tests.faults.batch_run import BatchRun
from tests.faults.clients import ClientLoad
from tests.faults.faulty_fleet import KEYS

T = TypeVar("T")

BATCH_TIMEOUT_S = 300.0  # a line that failed is retried after up to a minute
INSUFFICIENT_STORAGE = 507


async def run_clients(args: argparse.Namespace) -> None:
    """Run the clients, and print the outcomes of their requests each second."""
    keys = tuple(KEYS.values()) if args.tenants else ()
    tls = ssl.create_default_context(cafile=args.ca) if args.ca else None
    load = ClientLoad(args.clients_of, args.seed, keys=keys, tls=tls)
    until = time.monotonic() + args.minutes * 60 - 5

    def is_over() -> bool:
        return time.monotonic() > until

    def report() -> None:
        counts = {"sent": load.sent, "slowest": load.slowest_s, "wrong": load.wrong[:20]}
        tables = {"outcomes": load.outcomes, "statuses": load.statuses}
        print(json.dumps(counts | tables), flush=True)

    async def report_each_second() -> None:
        while not is_over():
            report()
            await asyncio.sleep(1.0)

    plays = (load.play(number, is_over) for number in range(args.clients))
    await asyncio.gather(report_each_second(), *plays)
    report()


async def run_batch(url: str, seed: int, tls: ssl.SSLContext | bool, *statuses: int) -> str:
    """Run a batch; return what is wrong with its results. Requests with `statuses` are repeated."""
    batch = BatchRun(url, seed, tls)
    try:
        async with asyncio.timeout(BATCH_TIMEOUT_S):
            await retry(batch.begin, *statuses)
            while not await retry(batch.is_done, *statuses):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            await retry(batch.judge, *statuses)
    except (AssertionError, openai.APIStatusError) as error:
        return repr(error)[:500]
    except TimeoutError:
        return f"a batch did not end within {BATCH_TIMEOUT_S:g} s"
    finally:
        await batch.close()
    return ""


async def retry(call: Callable[[], Awaitable[T]], *statuses: int) -> T:
    """Return what a call returns, once the router is up and its disk has room."""
    while True:
        try:
            return await call()
        except openai.APIConnectionError:
            await asyncio.sleep(0.2)
        except openai.InternalServerError as error:
            if error.status_code not in (INSUFFICIENT_STORAGE, *statuses):
                raise
            await asyncio.sleep(0.2)
