"""Watches a pool's EndpointSlices at the Kubernetes API server.

A list is followed by watches, each from the version at which the previous one ended. A watch has a
fixed duration, because a broken connection looks like an idle one. The router lists everything
again after an error, after 410 Gone, and at a fixed interval.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import ssl
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp.http import HttpProcessingError

from proxy.config import KubernetesConfig, PoolConfig, WorkerTlsConfig
from proxy.discovery.endpoints import read_slices
from proxy.discovery.reconcile import DiscoveredPool
from proxy.errors import ProxyError
from proxy.net.tls import TlsError, to_worker

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_TIMEOUT_S = 10.0  # for a page of a list
WATCH_GRACE_S = 5.0
PAGE_SIZE = 500
MAX_EVENT_BYTES = 8 << 20  # a slice has 1,000 endpoints at most
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MAX_TEXT_CHARS = 200

Slices = dict[str, Mapping[str, Any]]  # by name


class ApiError(ProxyError):
    """An error of the API server."""


class GoneError(ApiError):
    """The watch can't be continued: list again."""


class Backoff:
    """Exponential pauses with jitter."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def pause(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, MAX_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._pause_s = FIRST_PAUSE_S


class KubernetesSource:
    def __init__(self, settings: KubernetesConfig, pool: PoolConfig) -> None:
        self._settings = settings
        self._pool = pool
        self._backoff = Backoff()
        namespace = settings.namespace or _text(NAMESPACE_FILE) or "default"
        base = settings.url or in_cluster()
        self._url = f"{base}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    async def run(self, listener: DiscoveredPool) -> None:
        while True:
            try:
                async with self._session() as session:
                    await self._round(session, listener)
                continue
            except GoneError:
                pass
            except (ApiError, TlsError) as error:
                listener.fail(str(error))
            except TimeoutError:
                listener.fail("the API server does not respond in time")
            except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
                listener.fail(f"the API server: {_short(error) or type(error).__name__}")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                listener.fail(f"invalid response of the API server: {error!r}")
            await asyncio.sleep(self._backoff.pause())

    async def _round(self, session: aiohttp.ClientSession, listener: DiscoveredPool) -> None:
        slices, version = await self._list(session)
        listener.update(read_slices(slices.values(), self._pool))
        until = time.monotonic() + self._settings.resync_s * random.uniform(0.9, 1.0)
        while time.monotonic() < until:
            version = await self._watch(session, slices, version, listener)
            listener.update(read_slices(slices.values(), self._pool))

    async def _list(self, session: aiohttp.ClientSession) -> tuple[Slices, str]:
        # Without a resourceVersion the list is consistent; otherwise it may come from an old cache.
        slices: Slices = {}
        query = {"labelSelector": self._pool.selector or "", "limit": str(PAGE_SIZE)}
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        while True:
            async with session.get(
                self._url, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                await _refuse_errors(response)
                page = orjson.loads(await response.read())
            # Older servers write null for an empty list; a missing `items` is an error.
            slices |= {_name(item): item for item in page["items"] or ()}
            if not (more := page["metadata"].get("continue")):
                return slices, str(page["metadata"]["resourceVersion"])
            query["continue"] = more

    async def _watch(
        self, session: aiohttp.ClientSession, slices: Slices, version: str, listener: DiscoveredPool
    ) -> str:
        """Apply changes until the server ends the watch; return the last version."""
        lasts = math.ceil(self._settings.watch_s * random.uniform(0.8, 1.0))
        query = {
            "labelSelector": self._pool.selector or "",
            "watch": "1",
            "allowWatchBookmarks": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(lasts),
        }
        timeout = aiohttp.ClientTimeout(total=lasts + WATCH_GRACE_S, sock_connect=REQUEST_TIMEOUT_S)
        enough = time.monotonic() + lasts / 2
        try:
            async with session.get(
                self._url, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                await _refuse_errors(response)
                async for line in response.content:
                    version = self._apply(orjson.loads(line), slices)
                    listener.update(read_slices(slices.values(), self._pool))
        except aiohttp.ClientError as error:
            if time.monotonic() < enough:
                raise
            raise GoneError(str(error)) from None  # a late disconnect is normal
        finally:
            if lasted := time.monotonic() >= enough:
                self._backoff.reset()
        if not lasted:
            raise ApiError("the API server ended the watch early")
        return version

    def _apply(self, event: Mapping[str, Any], slices: Slices) -> str:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == HTTPStatus.GONE:
                raise GoneError(str(item.get("message")))
            raise ApiError(f"the API server ended the watch: {_short(item.get('message'))}")
        if kind in ("ADDED", "MODIFIED"):
            slices[_name(item)] = item
        elif kind == "DELETED":
            slices.pop(_name(item), None)
        return str(item["metadata"]["resourceVersion"])

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls()),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=MAX_EVENT_BYTES // 2,  # aiohttp's lines are up to twice as long
        )

    def _tls(self) -> ssl.SSLContext | bool:
        ca = self._settings.ca_file
        return to_worker(WorkerTlsConfig(ca_file=ca) if ca.exists() else None) or True

    def _headers(self) -> dict[str, str]:
        # Read each time: Kubernetes replaces service account tokens within the hour.
        token = _text(self._settings.token_file)
        return {"Authorization": f"Bearer {token}"} if token else {}


def in_cluster() -> str:
    """Return the API server's URL from a pod's environment."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    if not host or not port:
        raise ProxyError(
            "discovery.kubernetes.url: is missing, and the router does not run in a pod; give "
            "https://host:port of the API server, or http://host:port of a `kubectl proxy`"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


async def _refuse_errors(response: aiohttp.ClientResponse) -> None:
    if response.status == HTTPStatus.OK:
        return
    text = await response.content.read(64 * 1024)
    try:
        message = orjson.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text.decode("utf-8", "replace")
    if response.status == HTTPStatus.GONE:
        raise GoneError(_short(message))
    what = f"the API server returned {response.status}: {_short(message)}"
    if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        what += "; the router needs a token, and permission to list and watch endpointslices"
    raise ApiError(what)


def _name(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


def _short(text: object) -> str:
    return " ".join(str(text).split())[:MAX_TEXT_CHARS]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
