"""Connects each prefill worker to each decode worker before clients' requests need the connection.

The first transfer of a pair needs a handshake, which can take seconds. When both workers are up,
the router sends them a tiny request in two legs. Until it succeeds, the pair gets no hand-over (see
`kv_links`).

A decode worker may compute the prompt itself without an error, so its metrics must show that it
fetched blocks. A pair that fails is tried again after one to ten minutes, or when a worker
restarts. If a worker requires a key that the router does not have, the pair counts as connected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy.core.fleet.kv_links import Lives, start_times
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.types import RequestInfo
from proxy.core.router import Router
from proxy.errors import ProxyError
from proxy.health.probe_client import ProbeClient, ProbeError
from proxy.health.worker_metrics import values
from proxy.metrics.handovers import HandoverCounters
from proxy.transfer.legs import decode_body, prefill_body
from proxy.transfer.types import Connector, Pair, PrefillResult, Side

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.1
MAX_CONCURRENT = 8
TRIES, PAUSE_S, LEG_TIMEOUT_S = 3, 1.0, 20.0
# Between its legs, a try that is cut leaves blocks on the prefill worker until their lease ends.
FINISH_S = 3.0
ROUTE = "completions"
KEY_REQUIRED = frozenset([HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN])
DONE, FAILED, BARE, NO_KEY = "done", "failed", "bare", "no_key"
NEEDS_NO_RETRY = DONE, NO_KEY
RECOMPUTED = "recomputed"  # the decode worker computed the prompt
RETRY_S, MAX_RETRY_S = 60.0, 600.0
FETCHED = b"vllm:external_prefix_cache_hits_total{"  # tokens
COUNT_READS, COUNT_WAIT_S = 5, 0.1  # until the count of fetched tokens is up to date

Link = tuple[Worker, Worker]


class LegError(ProxyError): ...


class NoKeyError(LegError):
    """A worker requires a key, and the router has none for it."""


@dataclass(frozen=True, slots=True)
class LinkRetry:
    """When a failed link is tried again; earlier if a worker restarts."""

    lives: Lives
    at: float
    pause_s: float


class Warmup:
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
        self._room = asyncio.Semaphore(MAX_CONCURRENT)
        self._version = -1  # of the fleet, at the last check
        # By model: the pool's state, and the links to make in it.
        self._unmade: dict[str, tuple[object, list[Link]]] = {}
        self._retries: dict[Link, LinkRetry] = {}  # failed links
        self._tries: set[asyncio.Task[str]] = set()  # in flight
        router.placer.links.are_made = connector.connects

    async def run(self) -> None:
        if not self._connector.connects:
            return
        tasks: dict[Link, asyncio.Task[None]] = {}
        try:
            while True:
                tasks = {link: task for link, task in tasks.items() if not task.done()}
                for link in self._links_to_make(self.clock()):
                    if link not in tasks:
                        tasks[link] = asyncio.create_task(self._make_link(*link))
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            await _cancel_tasks(tasks.values())
            if self._tries:
                await asyncio.wait(self._tries, timeout=FINISH_S)
            await _cancel_tasks(self._tries)

    def _links_to_make(self, now: float) -> Iterator[Link]:
        """Yield the links to make; list all links only when the pool changed."""
        roster, kv_links = self._router.fleet.roster, self._router.placer.links
        if roster.version != self._version:
            self._version = roster.version
            workers = {*roster}
            kv_links.keep_only(workers)
            self._retries = {k: v for k, v in self._retries.items() if workers.issuperset(k)}
        for model in roster.models():
            pool = roster.pool(model)
            if not pool.prefills or not pool.num_decodes:
                continue
            decodes = [w for w in pool.all if w.role is Role.DECODE]
            state = pool, [w.up_since for w in (*pool.prefills, *decodes)]
            state_before, unmade = self._unmade.get(model, (None, []))
            if state_before != state:
                unmade = [(prefill, decode) for prefill in pool.prefills for decode in decodes]
            unmade = [link for link in unmade if not kv_links.is_warm(*link)]
            self._unmade[model] = state, unmade
            yield from (link for link in unmade if self._is_due(link, now))

    def _is_due(self, link: Link, now: float) -> bool:
        retry = self._retries.get(link)
        return retry is None or retry.at <= now or retry.lives != start_times(*link)

    async def _make_link(self, prefill: Worker, decode: Worker) -> None:
        started, lives = self.clock(), start_times(prefill, decode)
        last_retry = self._retries.get((prefill, decode))
        if last_retry is not None and last_retry.lives != lives:
            last_retry = None
        for attempt in range(TRIES if last_retry is None else 1):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            async with self._room:  # per try, so that a hung worker blocks few others
                outcome, why = await self._try_link(prefill, decode)
            self._counts.count_warmup(outcome)
            if outcome in NEEDS_NO_RETRY:
                break
        if start_times(prefill, decode) != lives:
            return  # a worker restarted during the try
        links = self._router.placer.links
        if outcome in NEEDS_NO_RETRY:
            self._retries.pop((prefill, decode), None)
            links.record_success(prefill, decode)
            links.set_warm(prefill, decode)
        else:
            pause_s = RETRY_S if last_retry is None else min(2 * last_retry.pause_s, MAX_RETRY_S)
            self._retries[prefill, decode] = LinkRetry(lives, self.clock() + pause_s, pause_s)
            links.set_unmade(prefill, decode)
            self._counts.count_barred(prefill.name, decode.name)
        self._log(prefill, decode, outcome, why, self.clock() - started)

    async def _try_link(self, prefill: Worker, decode: Worker) -> tuple[str, str]:
        """Return the outcome of a try, and the error if there is one."""
        attempt = asyncio.create_task(self._transfer(prefill, decode))
        self._tries.add(attempt)
        attempt.add_done_callback(self._tries.discard)
        try:
            return await asyncio.shield(attempt), ""  # it goes on if this task is cancelled
        except NoKeyError as error:
            return NO_KEY, str(error)
        except LegError as error:
            return FAILED, str(error)
        except Exception as error:  # a bug in a connector
            logger.exception("warm-up of a pair failed")
            return FAILED, type(error).__name__

    def _log(self, prefill: Worker, decode: Worker, outcome: str, why: str, seconds: float) -> None:
        link = f"{prefill.name} to {decode.name}"
        if outcome == DONE:
            logger.info("transfers from %s: ready in %.2f s", link, seconds)
            return
        if outcome == NO_KEY:
            logger.warning(
                "transfers from %s: not tested, because %s, and the router has none; the first "
                "request waits for the connection; give the worker's api_key in the fleet file",
                link,
                why,
            )
            return
        what = {
            BARE: f"{prefill.name} returned no transfer parameters; start it with the "
            f"{self._connector.name} connector",
            RECOMPUTED: "the decode worker computed the prompt itself; check that both have the "
            "same model and vLLM version and reach each other's side channels, and see their logs",
        }.get(outcome, f"the first transfer failed: {why}")
        logger.warning(
            "transfers from %s: %s; the pair gets no hand-overs until a transfer succeeds; the "
            "next try is in %g s",
            link,
            what,
            self._retries[prefill, decode].pause_s,
        )

    async def _transfer(self, prefill: Worker, decode: Worker) -> str:
        connector = self._connector
        mark = os.urandom(16).hex()  # so that no part of the prompt is cached
        pair = Pair(_side(prefill), _side(decode), f"warmup-{mark}")
        request_id = connector.request_id(pair) or pair.id.encode()
        fields = {"model": prefill.model, "prompt": f"warm up {mark}", "max_tokens": 1}
        # If the first token ended the sequence, there would be no blocks to fetch.
        body = orjson.dumps({**fields, "ignore_eos": True})
        info = RequestInfo("warmup", ROUTE, prefill.model, 0, 1, 0, 1, 1)
        first = prefill_body(connector, pair, info, body)
        result = connector.valid_result(pair, await _post(prefill, first, request_id))
        if result.params is None and connector.needs_params:
            return BARE
        if warning := connector.warning(pair, result):
            logger.warning("%s %s", prefill.name, warning)
        fetched_before = await _fetched(decode)
        try:
            second = decode_body(connector, pair, result, info, body)
            await _post(decode, second, request_id)
        except LegError:
            await self._release(decode, result)
            raise
        for _ in range(COUNT_READS if fetched_before is not None else 0):
            if await _fetched(decode) not in (fetched_before, None):
                return DONE
            await asyncio.sleep(COUNT_WAIT_S)
        if fetched_before is None:
            return DONE
        await self._release(decode, result)
        return RECOMPUTED

    async def _release(self, decode: Worker, result: PrefillResult) -> None:
        if (body := self._connector.release(result)) is not None:
            with suppress(LegError):  # a refusal is expected; otherwise the blocks expire
                await _post(decode, body, b"warmup")


async def _cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _client(worker: Worker) -> ProbeClient:
    spec = worker.spec
    return ProbeClient(spec.url, spec.api_key, LEG_TIMEOUT_S, spec.tls)


async def _fetched(worker: Worker) -> float | None:
    with closing(_client(worker)) as client:
        try:
            counts = [*values(await client.metrics(), FETCHED)]
        except ProbeError:
            return None
    return sum(counts) if counts else None


async def _post(worker: Worker, body: bytes, request_id: bytes) -> dict[str, Any]:
    try:
        with closing(_client(worker)) as client:
            status, text = await client.post("/v1/completions", body, request_id)
        parsed = orjson.loads(text) if status == HTTPStatus.OK else None
    except (ProbeError, ValueError) as error:
        raise LegError(f"{worker.name}: {error}") from None
    if status in KEY_REQUIRED and not worker.spec.api_key:
        raise NoKeyError(f"{worker.name} requires a key (status {status})")
    if status != HTTPStatus.OK:
        raise LegError(f"{worker.name}: status {status}")
    if type(parsed) is not dict:
        raise LegError(f"{worker.name}: the response is not a JSON object")
    return parsed


def _side(worker: Worker) -> Side:
    return Side(worker.name, urlsplit(worker.url).hostname or "")
