"""List and watch, against an API server with everything that can happen to one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from proxy.config import KubernetesConfig, PoolConfig
from proxy.discovery import kubernetes
from proxy.discovery.endpoints import Endpoints
from proxy.discovery.kubernetes import Backoff, KubernetesSource, in_cluster
from proxy.errors import ProxyError
from tests.proxy.discovery.api_server import ApiServer, api_server, endpoint, endpoint_slice

DEADLINE_S = 10.0


class Ear:
    """Hears what is told, and lets tests wait for it."""

    def __init__(self) -> None:
        self.endpoints: Endpoints | None = None
        self.troubles: list[str] = []
        self._news = asyncio.Event()

    def update(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self._news.set()

    def fail(self, why: str) -> None:
        self.troubles.append(why)
        self._news.set()

    @property
    def names(self) -> list[str] | None:
        """Who was told last; None before anything was."""
        return None if self.endpoints is None else list(self.endpoints)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(DEADLINE_S):
            while not true():
                self._news.clear()
                await self._news.wait()

    async def hears(self, *names: str) -> None:
        """Wait until these are told."""
        await self.until(lambda: self.names == list(names))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kubernetes, "MAX_PAUSE_S", 0.05)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        await server.apply(endpoint_slice("a", endpoint("s-1"), endpoint("s-2")))
        yield server


@pytest.fixture
async def ear(api: ApiServer) -> AsyncIterator[Ear]:
    """Somebody who is told of the pool, by watches of ten seconds."""
    listener = Ear()
    async with watching(api, listener, watch_s=10.0):
        await listener.hears("s-1", "s-2")
        await api.watched(1)
        yield listener


class watching:  # noqa: N801 - used like a function
    """Run a source for as long as the block lasts."""

    def __init__(self, api: ApiServer, ear: Ear, **settings: Any) -> None:
        given = {"url": api.url, "namespace": "llm", "token_file": Path("/none")} | settings
        pool = PoolConfig(name="short", selector="pool=short")
        self._source = KubernetesSource(KubernetesConfig(**given), pool)
        self._ear = ear

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._source.run(self._ear))

    async def __aexit__(self, *_: object) -> None:
        assert not self._task.done(), "it runs until it is cancelled, whatever happens"
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def test_changes_are_told_as_they_happen(api: ApiServer, ear: Ear) -> None:
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await ear.hears("s-1", "s-2", "s-3")
    await api.apply(endpoint_slice("a", endpoint("s-1", ready=False)))
    await ear.hears("s-1", "s-3")
    assert ear.endpoints is not None
    assert not ear.endpoints["s-1"].ready
    await api.delete("a")
    await ear.hears("s-3")
    assert (len(api.lists), len(api.watches), ear.troubles) == (1, 1, [])


async def test_others_slices_are_not_asked_for(api: ApiServer, ear: Ear) -> None:
    await api.apply(endpoint_slice("z", endpoint("l-1"), pool="long"))
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await ear.hears("s-1", "s-2", "s-3")
    assert api.lists[0]["labelSelector"] == api.watches[0]["labelSelector"] == "pool=short"


async def test_a_list_comes_in_pages(api: ApiServer) -> None:
    api.pages = 1
    await api.apply(endpoint_slice("b", endpoint("s-3")), endpoint_slice("c", endpoint("s-4")))
    ear = Ear()
    async with watching(api, ear):
        await ear.hears("s-1", "s-2", "s-3", "s-4")
    assert len(api.lists) == 3


async def test_a_watch_that_ends_in_time_goes_on_where_it_ended(api: ApiServer) -> None:
    ear = Ear()
    async with watching(api, ear, watch_s=1.0), asyncio.timeout(DEADLINE_S):
        await api.watched(1)
        await api.bookmark()
        await api.apply(endpoint_slice("z", endpoint("l-1"), pool="long"))
        await api.bookmark()
        bookmarked = str(api.version)
        # The second one, unless this machine was so slow that the first one ended before.
        while bookmarked not in (begun := [each["resourceVersion"] for each in api.watches]):
            await api.watched(len(begun) + 1)
    assert (len(api.lists), ear.troubles) == (1, [])


@pytest.mark.parametrize("as_event", [True, False])
async def test_410_gone_lists_again(api: ApiServer, ear: Ear, as_event: bool) -> None:
    api.gone_as_event = as_event
    api.slices["b"] = endpoint_slice("b", endpoint("s-3"))  # its event is lost with the rest
    api.forget()
    api.drop()
    await ear.hears("s-1", "s-2", "s-3")
    # Once more, now at a watch's beginning: the list is older than what the server remembers.
    lists = len(api.lists)
    api.forgotten = api.version + 1
    api.drop()
    await ear.until(lambda: len(api.lists) > lists + 1)
    api.forgotten = 0
    await api.apply(endpoint_slice("b", endpoint("s-4")))
    await ear.hears("s-1", "s-2", "s-4")
    assert all("early" in why or "payload" in why or "isconnect" in why for why in ear.troubles)


async def test_a_dropped_watch_loses_nothing(api: ApiServer, ear: Ear) -> None:
    api.drop()
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await ear.hears("s-1", "s-2", "s-3")
    assert len(ear.troubles) == 1


async def test_a_silent_watch_is_dead(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_GRACE_S", 0.05)
    ear = Ear()
    api.silent = True
    async with watching(api, ear, watch_s=1.0):
        await ear.hears("s-1", "s-2")
        await api.apply(endpoint_slice("b", endpoint("s-3")))
        await ear.hears("s-1", "s-2", "s-3")
    # Of each watch; a slow machine may be at the second one by now.
    assert set(ear.troubles) == {"the API server does not respond in time"}


async def test_everything_is_listed_again_now_and_then(api: ApiServer) -> None:
    ear = Ear()
    async with watching(api, ear, watch_s=1.0, resync_s=0.01):
        await ear.hears("s-1", "s-2")
        api.slices["b"] = endpoint_slice("b", endpoint("s-3"))  # and no event of it
        await ear.hears("s-1", "s-2", "s-3")
    assert ear.troubles == []


async def test_hasty_watches_are_paused(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[Backoff] = []
    pause = Backoff.pause
    monkeypatch.setattr(Backoff, "pause", lambda self: paused.append(self) or pause(self))
    ear = Ear()
    api.hasty = True
    async with watching(api, ear):
        await ear.until(lambda: len(ear.troubles) >= 3)
    assert len(paused) >= 3
    assert len(api.watches) <= len(paused) + 1
    assert "ended the watch early" in ear.troubles[0]


async def test_an_api_server_that_is_down_changes_nothing(api: ApiServer, ear: Ear) -> None:
    api.status = 503, "etcd is electing"
    api.drop()
    await ear.until(lambda: "503: etcd is electing" in " ".join(ear.troubles))
    assert ear.names == ["s-1", "s-2"]
    api.status = None
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await ear.hears("s-1", "s-2", "s-3")


async def test_an_empty_answer_is_told_as_one(api: ApiServer, ear: Ear) -> None:
    # What to make of it is not for the messenger to decide: see test_discovered.
    await api.lost_everything()
    await ear.hears()


async def test_a_refusal_says_what_is_missing(api: ApiServer) -> None:
    api.status = 403, 'endpointslices is forbidden: User "x" cannot list'
    ear = Ear()
    async with watching(api, ear):
        await ear.until(lambda: bool(ear.troubles))
    assert "403" in ear.troubles[0]
    assert "permission to list and watch endpointslices" in ear.troubles[0]
    assert ear.endpoints is None


async def test_a_nonsense_answer_is_trouble_and_nothing_more(
    api: ApiServer, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_list", kubernetes_nonsense)
    api.drop()
    await ear.until(lambda: any("invalid response" in why for why in ear.troubles))
    assert ear.names == ["s-1", "s-2"]


def kubernetes_nonsense(_: object) -> Any:
    from aiohttp import web

    return web.json_response({"items": ["a", 7]})


async def test_a_slice_longer_than_aiohttps_lines(api: ApiServer, ear: Ear) -> None:
    many = [endpoint(f"s-{n}", f"10.0.{n // 250}.{n % 250}") for n in range(1000)]
    await api.apply(endpoint_slice("a", *many))
    await ear.until(lambda: len(ear.names or ()) == 1000)
    assert ear.troubles == []


async def test_the_token_is_read_anew_for_each_request(api: ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    ear = Ear()
    async with watching(api, ear, token_file=token, watch_s=10.0):
        await ear.hears("s-1", "s-2")
        await api.watched(1)
        token.write_text("new")
        api.drop()
        await api.watched(2)
    assert api.tokens[0] == "Bearer old"
    assert api.tokens[-1] == "Bearer new"


async def test_only_whom_the_bundle_names_is_believed(tmp_path: Path) -> None:
    authority, impostor = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bundle = tmp_path / "ca.crt"
    impostor.cert_pem.write_to_path(bundle)
    ear = Ear()
    async with api_server(context) as api:
        await api.apply(endpoint_slice("a", endpoint("s-1")))
        async with watching(api, ear, ca_file=bundle):
            await ear.until(lambda: bool(ear.troubles))
            assert "certificate" in ear.troubles[0].lower()
            assert ear.endpoints is None
            authority.cert_pem.write_to_path(bundle)  # replaced, as when a cluster's is rotated
            await ear.hears("s-1")


def test_pauses_grow_to_a_limit_and_are_never_the_same() -> None:
    pauses = Backoff()
    taken = [pauses.pause() for _ in range(20)]
    assert taken[0] <= kubernetes.FIRST_PAUSE_S
    assert max(taken) <= kubernetes.MAX_PAUSE_S
    assert len(set(taken)) == len(taken)
    pauses.reset()
    assert pauses.pause() <= kubernetes.FIRST_PAUSE_S


def test_the_address_comes_from_the_pods_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert in_cluster() == "https://10.96.0.1:443"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert in_cluster() == "https://[fd00::1]:443"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ProxyError, match=r"discovery\.kubernetes\.url"):
        in_cluster()
