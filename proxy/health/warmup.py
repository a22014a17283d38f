"""Connect each prefill worker to each decode worker before users need it.

The first transfer between two takes a handshake, seconds perhaps. As soon as both are up they are
given a tiny request in two legs, past the router's own port, so that it is in nobody's metrics;
until that is done the core leaves the pair alone (see `core/links`).

A decode worker that can fetch nothing may compute the prompt itself, and its answer is as good as
any. So its metrics are asked whether it has fetched anything. A link over which nothing came is no
link. One that does not come about in a few tries stays cold, and is tried again: after a minute,
then after twice as long each time, up to ten; at once where either worker was started anew. Only
where workers want a key that the router hasn't got the first connection is left to users, who may.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from proxy.core.model.role import Role
from proxy.core.model.types import RequestInfo
from proxy.errors import ProxyError
from proxy.health.probe_client import ProbeClient, ProbeError
from proxy.health.worker_metrics import values
from proxy.net.tls import TlsError, to_worker
from proxy.transfer.legs import decode_body, prefill_body
from proxy.transfer.types import Connector, Pair, PrefillResult, Side

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.core.router import Router
    from proxy.metrics.handovers import HandoverCounters

logger = logging.getLogger(__name__)

LOOK_AROUND_S = 0.1
AT_ONCE = 8
TRIES, PAUSE_S, LEG_S = 3, 1.0, 20.0
ROUTE = "completions"
MAX_ANSWER = 8 << 20
WANTS_KEY = frozenset([HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN])
DONE, FAILED, BARE = "done", "failed", "bare"
NO_KEY = "no_key"
RECOMPUTED = "recomputed"  # the decode worker did it all itself
AGAIN_S, LONGEST_S = 60.0, 600.0
FETCHED = b"vllm:external_prefix_cache_hits_total{"  # tokens, over all of a decode worker's links
LOOKS, LOOK_S = 5, 0.1  # for the count to be shown


Link = tuple["Worker", "Worker"]


class LegError(ProxyError):
    """A leg of a warm-up that came to nothing."""


class NoKeyError(LegError):
    """A worker wants a key, and the router was given none for it."""


@dataclass(frozen=True, slots=True)
class LinkRetry:
    """When a link that did not come about is tried again, unless a worker comes up before."""

    lives: tuple[float, float]  # since when each of two is up
    at: float
    pause_s: float


HARMLESS = (LegError, TlsError, aiohttp.ClientError, TimeoutError, OSError, ValueError)


class Warmup:
    """Makes the connections of a router's fleet."""

    def __init__(
        self,
        router: Router,
        connector: Connector,
        counts: HandoverCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._router = router
        self._connector = connector
        self._counts = counts
        self._room = asyncio.Semaphore(AT_ONCE)
        self._version = -1  # of the fleet, when last looked at
        self._left: dict[str, tuple[object, list[Link]]] = {}  # by model; since when, and which
        self._again: dict[Link, LinkRetry] = {}  # of those that did not come about
        router.links.are_made = connector.connects

    async def run(self) -> None:
        """Watch for pairs until cancelled."""
        if not self._connector.connects:
            return
        tasks: dict[tuple[Worker, Worker], asyncio.Task[None]] = {}
        async with _session() as session:
            try:
                while True:
                    tasks = {pair: task for pair, task in tasks.items() if not task.done()}
                    for pair in self._cold(self.clock()):
                        if pair not in tasks:
                            tasks[pair] = asyncio.create_task(self._warm(*pair, session))
                    await asyncio.sleep(LOOK_AROUND_S)
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _cold(self, now: float) -> Iterator[Link]:
        """Name those to connect. All pairs are looked at when somebody has come up, or left."""
        fleet, links = self._router.fleet, self._router.links
        if fleet.version != self._version:
            self._version = fleet.version
            here = {*fleet}
            links.keep(here)
            self._again = {k: v for k, v in self._again.items() if here.issuperset(k)}
        for model in fleet.models():
            pool = fleet.pool(model)
            if not pool.prefills or not pool.decodes:
                continue
            decodes = [w for w in pool.all if w.role is Role.DECODE]
            since = pool, [w.up_since for w in (*pool.prefills, *decodes)]
            before, left = self._left.get(model, (None, []))
            if before != since:
                left = [(prefill, decode) for prefill in pool.prefills for decode in decodes]
            left = [pair for pair in left if not links.knows(*pair)]
            self._left[model] = since, left
            yield from (pair for pair in left if self._is_due(pair, now))

    def _is_due(self, pair: Link, now: float) -> bool:
        again = self._again.get(pair)
        return again is None or again.at <= now or again.lives != _lives(*pair)

    async def _warm(self, prefill: Worker, decode: Worker, session: aiohttp.ClientSession) -> None:
        """Connect two; give up for a while after a few tries, later on after one."""
        started, lives = self.clock(), _lives(prefill, decode)
        before = self._again.get((prefill, decode))
        if before is not None and before.lives != lives:
            before = None
        for attempt in range(TRIES if before is None else 1):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            why = ""
            async with self._room:  # one try at a time: a worker that hangs holds up few others
                try:
                    how = await self._once(prefill, decode, session)
                except NoKeyError as error:
                    how, why = NO_KEY, str(error)
                except HARMLESS as error:
                    how, why = FAILED, str(error) or type(error).__name__
                except Exception as error:  # a connector's fault: tried again as seldom as others
                    logger.exception("a connection could not be made")
                    how, why = FAILED, type(error).__name__
            self._counts.warmed(how)
            if how in (DONE, NO_KEY):
                break
        if _lives(prefill, decode) != lives:
            return  # it was another that was tried
        links = self._router.links
        if how in (DONE, NO_KEY):
            self._again.pop((prefill, decode), None)
            links.worked(prefill, decode)
            links.warm(prefill, decode)
        else:
            pause_s = AGAIN_S if before is None else min(2 * before.pause_s, LONGEST_S)
            self._again[prefill, decode] = LinkRetry(lives, self.clock() + pause_s, pause_s)
            links.unmade(prefill, decode)
            self._counts.barred(prefill.name, decode.name)
        self._say(prefill, decode, how, why, self.clock() - started)

    def _say(self, prefill: Worker, decode: Worker, how: str, why: str, seconds: float) -> None:
        link = f"{prefill.name} to {decode.name}"
        if how == DONE:
            logger.info("transfers from %s: ready in %.2f s", link, seconds)
            return
        if how == NO_KEY:
            logger.warning(
                "transfers from %s: no first one, for %s, and the router has none; the first user "
                "waits for their connection; give the worker its api_key in the fleet file",
                link,
                why,
            )
            return
        what = {
            BARE: f"{prefill.name} tells nothing to fetch by: is it started with the "
            f"{self._connector.name} connector?",
            RECOMPUTED: "nothing came, and the prompt was computed again: are both of one model "
            "and one vLLM, and do they reach each other's side channels? Their logs know",
        }.get(how, f"no first one: {why}")
        logger.warning(
            "transfers from %s: %s; prompts are not handed over there until one succeeds, the "
            "next try is in %g s",
            link,
            what,
            self._again[prefill, decode].pause_s,
        )

    async def _once(self, prefill: Worker, decode: Worker, session: aiohttp.ClientSession) -> str:
        connector = self._connector
        mark = os.urandom(16).hex()  # so that nothing of it is cached
        pair = Pair(_side(prefill), _side(decode), f"warmup-{mark}")
        request_id = connector.request_id(pair) or pair.id.encode()
        asked = {"model": prefill.model, "prompt": f"warm up {mark}", "max_tokens": 1}
        # A prompt whose first token is the end leaves nothing to fetch.
        body = orjson.dumps({**asked, "ignore_eos": True})
        ask = _ask(prefill.model)
        first = prefill_body(connector, pair, ask, body)
        taken = connector.taken(pair, await _post(session, prefill, first, request_id))
        if taken.params is None and connector.needs_params:
            return BARE
        if doubt := connector.doubt(pair, taken):
            logger.warning("%s %s", prefill.name, doubt)
        before = await _fetched(decode)
        try:
            second = decode_body(connector, pair, taken, ask, body)
            await _post(session, decode, second, request_id)
        except HARMLESS:
            await self._release(session, decode, taken)
            raise
        for _ in range(LOOKS if before is not None else 0):
            if await _fetched(decode) not in (before, None):
                return DONE
            await asyncio.sleep(LOOK_S)
        if before is None:
            return DONE
        await self._release(session, decode, taken)
        return RECOMPUTED

    async def _release(
        self, session: aiohttp.ClientSession, decode: Worker, taken: PrefillResult
    ) -> None:
        body = self._connector.release(taken)
        if body is None:
            return
        try:
            await _post(session, decode, body, b"warmup")
        except (LegError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return  # it is meant to be refused; and if it was not, the blocks expire


def _session() -> aiohttp.ClientSession:
    """Open a client for all workers: no limit on connections, or a few hung ones block the rest."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        # Nor would we want to unpack a bomb.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


async def _fetched(worker: Worker) -> float | None:
    """Read how many tokens a decode worker has fetched so far; None where it doesn't tell."""
    spec = worker.spec
    with closing(ProbeClient(spec.url, spec.api_key, LEG_S, spec.tls)) as questions:
        try:
            told = [*values(await questions.metrics(), FETCHED)]
        except ProbeError:
            return None
    return sum(told) if told else None


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
        ssl=to_worker(worker.spec.tls) or True,
    ) as answer:
        text = bytearray()
        async for chunk in answer.content.iter_any():
            text += chunk
            if len(text) > MAX_ANSWER:
                raise LegError(f"{worker.name}: more than {MAX_ANSWER} bytes")
        if answer.status in WANTS_KEY and not worker.spec.api_key:
            raise NoKeyError(f"{worker.name} wants a key (status {answer.status})")
        if answer.status != HTTPStatus.OK:
            raise LegError(f"{worker.name}: status {answer.status}")
    found = orjson.loads(text)
    if type(found) is not dict:
        raise LegError(f"{worker.name}: its answer is no JSON object")
    return found


def _lives(prefill: Worker, decode: Worker) -> tuple[float, float]:
    return prefill.up_since, decode.up_since


def _side(worker: Worker) -> Side:
    return Side(worker.name, urlsplit(worker.url).hostname or "")


def _ask(model: str) -> RequestInfo:
    return RequestInfo("warmup", ROUTE, model, 0, 1, 0, 1, 1)
