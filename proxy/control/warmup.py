"""Connect each prefill worker to each decode worker before users need it.

The first transfer between two takes a handshake, seconds perhaps. As soon as both are up they are
given a tiny request in two legs, past the router's own port, so that it is in nobody's metrics;
until that is done, or has failed a few times, the core leaves the pair alone (see `core/links`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from proxy.control.questions import open_session
from proxy.core.types import Ask, Role
from proxy.errors import ProxyError
from proxy.transfer.legs import decode_body, prefill_body
from proxy.transfer.types import Connector, Pair, Side, Taken

if TYPE_CHECKING:
    from proxy.control.handovers import Handovers
    from proxy.core.router import Router
    from proxy.core.worker import Worker

logger = logging.getLogger(__name__)

LOOK_AROUND_S = 0.1
AT_ONCE = 8
TRIES, PAUSE_S, LEG_S = 3, 1.0, 20.0
ROUTE = "completions"
MAX_ANSWER = 8 << 20
DONE, FAILED, BARE = "done", "failed", "bare"


class LegError(ProxyError):
    """A leg of a warm-up that came to nothing."""


class Warmup:
    """Makes the connections of a router's fleet."""

    def __init__(
        self,
        router: Router,
        connector: Connector,
        counts: Handovers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._router = router
        self._connector = connector
        self._counts = counts
        self._room = asyncio.Semaphore(AT_ONCE)
        router.links.are_made = connector.connects

    async def run(self) -> None:
        """Watch for pairs until cancelled."""
        if not self._connector.connects:
            return
        tasks: dict[tuple[Worker, Worker], asyncio.Task[None]] = {}
        async with open_session() as session:
            try:
                while True:
                    tasks = {pair: task for pair, task in tasks.items() if not task.done()}
                    for pair in self._cold():
                        if pair not in tasks:
                            tasks[pair] = asyncio.create_task(self._warm(*pair, session))
                    await asyncio.sleep(LOOK_AROUND_S)
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _cold(self) -> Iterator[tuple[Worker, Worker]]:
        fleet = self._router.fleet
        for model in fleet.models():
            pool = fleet.pool(model)
            decodes = [w for w in pool.all if w.role is Role.DECODE] if pool.prefills else []
            for prefill in pool.prefills:
                for decode in decodes:
                    if not self._router.links.knows(prefill, decode):
                        yield prefill, decode

    async def _warm(self, prefill: Worker, decode: Worker, session: aiohttp.ClientSession) -> None:
        """Connect two; give up after a few tries."""
        async with self._room:
            started = self.clock()
            for attempt in range(TRIES):
                if attempt:
                    await asyncio.sleep(PAUSE_S * attempt)
                try:
                    how = await self._once(prefill, decode, session)
                except (LegError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    how = FAILED
                    why = error
                self._counts.warmed(how)
                if how != FAILED:
                    break
        link = f"{prefill.name} to {decode.name}"
        if how == DONE:
            logger.info("transfers from %s: ready in %.2f s", link, self.clock() - started)
        elif how == BARE:
            logger.warning(
                "%s tells nothing to fetch by: is it started with the %s connector?",
                prefill.name,
                self._connector.name,
            )
        else:
            logger.warning("transfers from %s: no first one in %d tries: %s", link, TRIES, why)
        self._router.links.warm(prefill, decode)

    async def _once(self, prefill: Worker, decode: Worker, session: aiohttp.ClientSession) -> str:
        connector = self._connector
        mark = os.urandom(16).hex()  # so that nothing of it is cached
        pair = Pair(_side(prefill), _side(decode), f"warmup-{mark}")
        request_id = connector.request_id(pair) or pair.id.encode()
        body = orjson.dumps({"model": prefill.model, "prompt": f"warm up {mark}", "max_tokens": 1})
        first = prefill_body(connector, pair, _ask(prefill.model), body)
        taken = connector.take(pair, await _post(session, prefill, first, request_id))
        if taken.params is None and connector.needs_params:
            return BARE
        if doubt := connector.doubt(pair, taken):
            logger.warning("%s %s", prefill.name, doubt)
        try:
            await _post(session, decode, decode_body(connector, pair, taken, body), request_id)
        except BaseException:
            await self._release(session, decode, taken)
            raise
        return DONE

    async def _release(self, session: aiohttp.ClientSession, decode: Worker, taken: Taken) -> None:
        body = self._connector.release(taken)
        if body is None:
            return
        try:
            await _post(session, decode, body, b"warmup")
        except (LegError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return  # it is meant to be refused; and if it was not, the blocks expire


async def _post(
    session: aiohttp.ClientSession, worker: Worker, body: bytes, request_id: bytes
) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id.decode()}
    if worker.spec.api_key:
        headers["Authorization"] = f"Bearer {worker.spec.api_key}"
    async with session.post(
        f"{worker.url}/v1/completions",
        data=body,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=LEG_S),
        allow_redirects=False,
    ) as answer:
        text = await answer.content.read(MAX_ANSWER)
        if answer.status != HTTPStatus.OK:
            raise LegError(f"{worker.name}: status {answer.status}")
    found = orjson.loads(text)
    if type(found) is not dict:
        raise LegError(f"{worker.name}: its answer is no JSON object")
    return found


def _side(worker: Worker) -> Side:
    return Side(worker.name, urlsplit(worker.url).hostname or "")


def _ask(model: str) -> Ask:
    return Ask("warmup", ROUTE, model, 0, 1, 0, 1, 1)
