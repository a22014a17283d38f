"""Watch a pool's EndpointSlices at the Kubernetes API server.

A list, then a watch from where the list ended. A watch lasts half a minute, is opened again where
it ended, and is taken to be dead if the server does not end it in time: a connection that was
dropped on the way looks just like one on which nothing happens. Everything is listed again after
any trouble, when the server has forgotten the version (410 Gone), and every five minutes.

Each router watches for itself: there is nothing to agree on, so there is no leader.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.config import KubernetesConfig, PoolConfig
from proxy.discovery.endpoints import EndpointListener, read_slices
from proxy.errors import ProxyError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_S = 10.0  # for a page of a list
GRACE_S = 5.0  # that a watch may end late
PAGE = 500
MAX_EVENT_BYTES = 8 << 20  # a slice has 1,000 endpoints at most
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LONGEST_TEXT = 200

Slices = dict[str, Mapping[str, Any]]  # by name


class ApiError(ProxyError):
    """An API server that did not do as it was asked."""


class GoneError(ApiError):
    """There is nothing to go on from: list again."""


class Backoff:
    """Pauses that grow, each by chance a little longer or shorter than others'."""

    def __init__(self) -> None:
        self._most = FIRST_PAUSE_S

    def pause(self) -> float:
        """Return how long to wait now."""
        most, self._most = self._most, min(self._most * 2, LONGEST_PAUSE_S)
        return most * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._most = FIRST_PAUSE_S


class KubernetesSource:
    """Where a pool's workers are, by the API server."""

    def __init__(
        self,
        settings: KubernetesConfig,
        pool: PoolConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._clock = clock
        self._backoff = Backoff()
        self._trusted: tuple[int, ssl.SSLContext] | None = None  # with its file's date
        namespace = settings.namespace or _text(NAMESPACE_FILE) or "default"
        base = settings.url or in_cluster()
        self._url = f"{base}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    async def run(self, listener: EndpointListener) -> None:
        """Tell the listener until cancelled."""
        while True:
            try:
                async with self._session() as session:
                    await self._round(session, listener)
                continue
            except GoneError:
                pass
            except ApiError as error:
                listener.trouble(str(error))
            except TimeoutError:
                listener.trouble("the API server does not answer in time")
            except (aiohttp.ClientError, OSError) as error:
                listener.trouble(f"the API server: {_short(error) or type(error).__name__}")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                listener.trouble(f"the API server's answer is none: {error!r}")
            await asyncio.sleep(self._backoff.pause())

    async def _round(self, session: aiohttp.ClientSession, listener: EndpointListener) -> None:
        """List all, then watch until it is time to list again."""
        slices, version = await self._list(session)
        listener.told(read_slices(slices.values(), self._pool))
        until = self._clock() + self._settings.resync_s * random.uniform(0.9, 1.0)
        while self._clock() < until:
            version = await self._watch(session, slices, version, listener)
            listener.told(read_slices(slices.values(), self._pool))

    async def _list(self, session: aiohttp.ClientSession) -> tuple[Slices, str]:
        # Without a resourceVersion it is what a quorum says: a server that has just come up could
        # otherwise answer from a cache of long ago.
        slices: Slices = {}
        query = {"labelSelector": self._pool.selector or "", "limit": str(PAGE)}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        while True:
            async with session.get(
                self._url, params=query, headers=self._headers(), timeout=timeout
            ) as answer:
                await _refuse_errors(answer)
                page = orjson.loads(await answer.read())
            # An older server writes null for none; no items at all is not a list.
            slices |= {_name(item): item for item in page["items"] or ()}
            if not (more := page["metadata"].get("continue")):
                return slices, str(page["metadata"]["resourceVersion"])
            query["continue"] = more

    async def _watch(
        self,
        session: aiohttp.ClientSession,
        slices: Slices,
        version: str,
        listener: EndpointListener,
    ) -> str:
        """Follow changes until the server ends the watch; return the version it ended at."""
        lasts = math.ceil(self._settings.watch_s * random.uniform(0.8, 1.0))
        query = {
            "labelSelector": self._pool.selector or "",
            "watch": "1",
            "allowWatchBookmarks": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(lasts),
        }
        timeout = aiohttp.ClientTimeout(total=lasts + GRACE_S, sock_connect=REQUEST_S)
        enough = self._clock() + lasts / 2
        try:
            async with session.get(
                self._url, params=query, headers=self._headers(), timeout=timeout
            ) as answer:
                await _refuse_errors(answer)
                async for line in _lines(answer.content):
                    version = self._take(orjson.loads(line), slices)
                    listener.told(read_slices(slices.values(), self._pool))
        except aiohttp.ClientError as error:
            if self._clock() < enough:
                raise
            raise GoneError(str(error)) from None  # as connections go: no trouble
        finally:
            if lasted := self._clock() >= enough:
                self._backoff.reset()
        if not lasted:
            raise ApiError("the API server ended the watch early")
        return version

    def _take(self, event: Mapping[str, Any], slices: Slices) -> str:
        """Bring the slices up to date; return the version they have now."""
        kind, each = event["type"], event["object"]
        if kind == "ERROR":
            if each.get("code") == HTTPStatus.GONE:
                raise GoneError(str(each.get("message")))
            raise ApiError(f"the API server ended the watch: {_short(each.get('message'))}")
        if kind in ("ADDED", "MODIFIED"):
            slices[_name(each)] = each
        elif kind == "DELETED":
            slices.pop(_name(each), None)
        return str(each["metadata"]["resourceVersion"])

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._trust()), cookie_jar=aiohttp.DummyCookieJar()
        )

    def _trust(self) -> ssl.SSLContext | bool:
        """Say whom to trust: the bundle, read again when it was replaced."""
        ca = self._settings.ca_file
        try:
            changed = ca.stat().st_mtime_ns
        except FileNotFoundError:
            return True
        if self._trusted is None or self._trusted[0] != changed:
            self._trusted = changed, ssl.create_default_context(cafile=ca)
        return self._trusted[1]

    def _headers(self) -> dict[str, str]:
        # Tokens of service accounts are replaced within the hour.
        token = _text(self._settings.token_file)
        return {"Authorization": f"Bearer {token}"} if token else {}


def in_cluster() -> str:
    """Return the API server's address, as each pod is told it."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    if not host or not port:
        raise ProxyError(
            "discovery.kubernetes.url: is missing, and this is no pod of a cluster; give the API "
            "server's https://host:port, or that of a `kubectl proxy`"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Split a body into lines, which may be longer than aiohttp's own limit."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line.strip():
                    yield line
        elif len(rest) > MAX_EVENT_BYTES:
            raise ApiError(f"an event of more than {MAX_EVENT_BYTES} bytes")


async def _refuse_errors(answer: aiohttp.ClientResponse) -> None:
    if answer.status == HTTPStatus.OK:
        return
    text = await answer.content.read(64 * 1024)
    try:
        said = orjson.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        said = text.decode("utf-8", "replace")
    if answer.status == HTTPStatus.GONE:
        raise GoneError(_short(said))
    what = f"the API server answers {answer.status}: {_short(said)}"
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        what += "; the router needs a token, and leave to list and watch endpointslices"
    raise ApiError(what)


def _name(each: Mapping[str, Any]) -> str:
    return str(each["metadata"]["name"])


def _short(text: object) -> str:
    return " ".join(str(text).split())[:LONGEST_TEXT]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
