"""A Kubernetes API server for EndpointSlices that can misbehave."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from proxy.discovery.endpoints import Endpoints

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
Json = dict[str, Any]
DEADLINE_S = 60.0


def endpoint(
    pod: str, address: str = "", *, ready: bool | None = True, terminating: bool = False
) -> Json:
    """Return an endpoint; its address ends with the pod's last digit."""
    target = {"targetRef": {"kind": "Pod", "name": pod}} if pod else {}
    conditions = {"ready": ready, "terminating": terminating}
    return {
        "addresses": [address or f"10.0.0.{pod.rpartition('-')[2]}"],
        "conditions": {key: value for key, value in conditions.items() if value is not None},
        **target,
    }


def endpoint_slice(
    name: str, *endpoints: Json, pool: str = "short", port: int = 8000, family: str = "IPv4"
) -> Json:
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"pool": pool}},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


class RecordingListener:
    """Records updates and failures; tests can wait for them."""

    def __init__(self) -> None:
        self.updates: list[Endpoints] = []
        self.failures: list[str] = []
        self._changed = asyncio.Event()

    def update(self, endpoints: Endpoints) -> None:
        self.updates.append(endpoints)
        self._changed.set()

    def fail(self, why: str) -> None:
        self.failures.append(why)
        self._changed.set()

    @property
    def names(self) -> list[str] | None:
        """The names of the last update, or None."""
        return list(self.updates[-1]) if self.updates else None

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_for(self, *names: str) -> None:
        await self.wait_until(lambda: self.names == list(names))


class ApiServer:
    """Serves lists and watches; its failures may be set at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.version = 100
        self.slices: dict[str, Json] = {}
        self.history: list[tuple[int, Json]] = []
        self.forgotten = 0  # watches from earlier versions are refused
        self.gone_as_event = True  # as new servers do; old ones answer 410
        self.status: tuple[int, str] | None = None  # the response to all requests
        self.silent = False  # watches never get an event
        self.hasty = False  # watches end at once
        self.pages = 500
        self.lists: list[Json] = []  # received queries
        self.watches: list[Json] = []
        self.tokens: list[str | None] = []
        self._changed = asyncio.Condition()
        self._open: list[web.Request] = []
        self._closing = asyncio.Event()

    # Events of the cluster

    async def apply(self, *slices: Json) -> None:
        for item in slices:
            name = item["metadata"]["name"]
            await self._record("MODIFIED" if name in self.slices else "ADDED", name, item)

    async def delete(self, name: str) -> None:
        await self._record("DELETED", name, self.slices[name])

    async def _record(self, kind: str, name: str, item: Json) -> None:
        self.version += 1
        metadata = {**item["metadata"], "resourceVersion": str(self.version)}
        item = {**item, "metadata": metadata}
        if kind == "DELETED":
            del self.slices[name]
        else:
            self.slices[name] = item
        await self._publish({"type": kind, "object": item})

    async def bookmark(self) -> None:
        """Move all watches to a new version without changes."""
        self.version += 1
        version = {"metadata": {"resourceVersion": str(self.version)}}
        await self._publish({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", **version}})

    async def _publish(self, event: Json) -> None:
        self.history.append((self.version, event))
        async with self._changed:
            self._changed.notify_all()

    # Failures of the server

    def forget(self) -> None:
        """Compact: watches from earlier versions fail."""
        self.version += 1
        self.forgotten = self.version

    def drop(self) -> None:
        for request in list(self._open):
            if request.transport is not None:
                request.transport.abort()

    async def lose_everything(self) -> None:
        """Restart with an empty store and without delete events."""
        self.slices.clear()
        self.forget()
        self.drop()

    async def wait_for_watches(self, times: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.watches) >= times)

    def close(self) -> None:
        """End hanging watches."""
        self._closing.set()

    # Responses

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        if self.status is not None:
            code, message = self.status
            return web.json_response({"kind": "Status", "message": message}, status=code)
        query = dict(request.query)
        if "watch" not in query:
            return self._list(query)
        self._open.append(request)
        try:
            return await self._watch(request, query)
        finally:
            self._open.remove(request)

    def _list(self, query: Json) -> web.Response:
        self.lists.append(query)
        chosen = [item for item in self.slices.values() if _matches(item, query["labelSelector"])]
        begin = int(query.get("continue", 0))
        end = begin + min(self.pages, int(query["limit"]))
        more = {"continue": str(end)} if end < len(chosen) else {}
        metadata = {"resourceVersion": str(self.version), **more}
        items = chosen[begin:end] or None
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, query: Json) -> web.StreamResponse:
        version = int(query["resourceVersion"])
        gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
        async with self._changed:
            self.watches.append(query)
            self._changed.notify_all()
        if version < self.forgotten and not self.gone_as_event:
            return web.json_response(gone, status=410)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        if self.silent:
            await self._closing.wait()
        elif version < self.forgotten:
            await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        elif not self.hasty:
            await self._follow(answer, version, query)
        return answer

    async def _follow(self, answer: web.StreamResponse, version: int, query: Json) -> None:
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while not self._closing.is_set():
                    news = [event_ for event_ in self.history if event_[0] > version]
                    for version, event in news:  # noqa: B007 - the last version is used
                        if event["type"] == "BOOKMARK" or _matches(
                            event["object"], query["labelSelector"]
                        ):
                            await answer.write(json.dumps(event).encode() + b"\n")
                    async with self._changed:
                        await self._changed.wait_for(lambda v=version: self.version > v)
        except (TimeoutError, ConnectionError):
            pass


def _matches(item: Json, selector: str) -> bool:
    key, _, value = selector.partition("=")
    return bool(item["metadata"]["labels"].get(key) == value)


@asynccontextmanager
async def api_server(context: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get(PATH, server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    scheme = "https" if context else "http"
    server.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.close()
        await runner.cleanup()
