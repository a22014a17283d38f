"""List and watch against an API server that misbehaves."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from proxy.config import KubernetesConfig, PoolConfig
from proxy.discovery import kubernetes
from proxy.discovery.kubernetes import Backoff, KubernetesSource, in_cluster
from proxy.errors import ProxyError
from tests.proxy.discovery.api_server import (
    DEADLINE_S,
    ApiServer,
    RecordingListener,
    api_server,
    endpoint,
    endpoint_slice,
)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kubernetes, "MAX_PAUSE_S", 0.05)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        await server.apply(endpoint_slice("a", endpoint("s-1"), endpoint("s-2")))
        yield server


@pytest.fixture
async def listener(api: ApiServer) -> AsyncIterator[RecordingListener]:
    """Return a listener of a source with watches of ten seconds."""
    listener = RecordingListener()
    async with watching(api, listener, watch_s=10.0):
        await listener.wait_for("s-1", "s-2")
        await api.wait_for_watches(1)
        yield listener


@asynccontextmanager
async def watching(
    api: ApiServer, listener: RecordingListener, **settings: Any
) -> AsyncIterator[None]:
    options = {"url": api.url, "namespace": "llm", "token_file": Path("/none")} | settings
    pool = PoolConfig(name="short", selector="pool=short")
    task = asyncio.create_task(KubernetesSource(KubernetesConfig(**options), pool).run(listener))
    yield
    assert not task.done(), "the source must run until it is cancelled"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_changes_of_the_selected_slices_are_reported(
    api: ApiServer, listener: RecordingListener
) -> None:
    await api.apply(endpoint_slice("z", endpoint("l-1"), pool="long"))
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await listener.wait_for("s-1", "s-2", "s-3")
    assert api.lists[0]["labelSelector"] == api.watches[0]["labelSelector"] == "pool=short"
    await api.apply(endpoint_slice("a", endpoint("s-1", ready=False)))
    await listener.wait_for("s-1", "s-3")
    assert not listener.updates[-1]["s-1"].ready
    await api.delete("a")
    await listener.wait_for("s-3")
    assert (len(api.lists), len(api.watches), listener.failures) == (1, 1, [])


async def test_list_is_read_in_pages(api: ApiServer) -> None:
    api.pages = 1
    await api.apply(endpoint_slice("b", endpoint("s-3")), endpoint_slice("c", endpoint("s-4")))
    listener = RecordingListener()
    async with watching(api, listener):
        await listener.wait_for("s-1", "s-2", "s-3", "s-4")
    assert len(api.lists) == 3


async def test_ended_watch_continues_at_the_last_bookmark(api: ApiServer) -> None:
    listener = RecordingListener()
    async with watching(api, listener, watch_s=1.0), asyncio.timeout(DEADLINE_S):
        await api.wait_for_watches(1)
        await api.bookmark()
        await api.apply(endpoint_slice("z", endpoint("l-1"), pool="long"))
        await api.bookmark()
        bookmarked = str(api.version)
        # On a slow machine, more than one watch may have ended before.
        while bookmarked not in (begun := [watch["resourceVersion"] for watch in api.watches]):
            await api.wait_for_watches(len(begun) + 1)
    assert (len(api.lists), listener.failures) == (1, [])


@pytest.mark.parametrize("as_event", [True, False])
async def test_410_gone_causes_a_new_list(
    api: ApiServer, listener: RecordingListener, as_event: bool
) -> None:
    api.gone_as_event = as_event
    api.slices["b"] = endpoint_slice("b", endpoint("s-3"))  # without an event
    api.forget()
    api.drop()
    await listener.wait_for("s-1", "s-2", "s-3")
    # Now at the start of a watch: the list is older than the server's history.
    lists = len(api.lists)
    api.forgotten = api.version + 1
    api.drop()
    await listener.wait_until(lambda: len(api.lists) > lists + 1)
    api.forgotten = 0
    await api.apply(endpoint_slice("b", endpoint("s-4")))
    await listener.wait_for("s-1", "s-2", "s-4")
    assert all(
        "early" in why or "payload" in why or "isconnect" in why for why in listener.failures
    )


async def test_dropped_watch_loses_no_change(api: ApiServer, listener: RecordingListener) -> None:
    api.drop()
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await listener.wait_for("s-1", "s-2", "s-3")
    assert len(listener.failures) == 1


async def test_silent_watch_times_out(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_GRACE_S", 0.05)
    listener = RecordingListener()
    api.silent = True
    async with watching(api, listener, watch_s=1.0):
        await listener.wait_for("s-1", "s-2")
        await api.apply(endpoint_slice("b", endpoint("s-3")))
        await listener.wait_for("s-1", "s-2", "s-3")
    # One per watch; on a slow machine, there may be two.
    assert set(listener.failures) == {"the API server does not respond in time"}


async def test_list_is_repeated_after_resync_s(api: ApiServer) -> None:
    listener = RecordingListener()
    async with watching(api, listener, watch_s=1.0, resync_s=0.01):
        await listener.wait_for("s-1", "s-2")
        api.slices["b"] = endpoint_slice("b", endpoint("s-3"))  # without an event
        await listener.wait_for("s-1", "s-2", "s-3")
    assert listener.failures == []


async def test_watches_that_end_early_are_paused(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[Backoff] = []
    pause = Backoff.pause
    monkeypatch.setattr(Backoff, "pause", lambda self: pauses.append(self) or pause(self))
    listener = RecordingListener()
    api.hasty = True
    async with watching(api, listener):
        await listener.wait_until(lambda: len(listener.failures) >= 3)
    assert len(pauses) >= 3
    assert len(api.watches) <= len(pauses) + 1
    assert "ended the watch early" in listener.failures[0]


async def test_failed_api_server_changes_nothing_but_an_empty_list_does(
    api: ApiServer, listener: RecordingListener
) -> None:
    api.status = 503, "etcd is electing"
    api.drop()
    await listener.wait_until(lambda: "503: etcd is electing" in " ".join(listener.failures))
    assert listener.names == ["s-1", "s-2"]
    api.status = None
    await api.apply(endpoint_slice("b", endpoint("s-3")))
    await listener.wait_for("s-1", "s-2", "s-3")
    await api.lose_everything()
    await listener.wait_for()


async def test_403_names_the_missing_permission(api: ApiServer) -> None:
    api.status = 403, 'endpointslices is forbidden: User "x" cannot list'
    listener = RecordingListener()
    async with watching(api, listener):
        await listener.wait_until(lambda: bool(listener.failures))
    assert "403" in listener.failures[0]
    assert "permission to list and watch endpointslices" in listener.failures[0]
    assert listener.updates == []


async def test_malformed_list_is_a_failure(
    api: ApiServer, listener: RecordingListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_list", lambda _: web.json_response({"items": ["a", 7]}))
    api.drop()
    await listener.wait_until(lambda: any("invalid response" in why for why in listener.failures))
    assert listener.names == ["s-1", "s-2"]


MANY = [endpoint(f"s-{n}", f"10.0.{n // 250}.{n % 250}") for n in range(1000)]


async def test_slice_longer_than_a_line_of_aiohttp_is_read(
    api: ApiServer, listener: RecordingListener
) -> None:
    await api.apply(endpoint_slice("a", *MANY))
    await listener.wait_until(lambda: len(listener.names or ()) == 1000)
    assert listener.failures == []


async def test_event_above_the_limit_is_a_failure(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_EVENT_BYTES", 1 << 16)
    listener = RecordingListener()
    async with watching(api, listener):
        await api.wait_for_watches(1)
        await api.apply(endpoint_slice("a", *MANY))
        await listener.wait_until(lambda: bool(listener.failures))
    assert "the API server: " in listener.failures[0]


async def test_token_is_read_for_each_request(api: ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    listener = RecordingListener()
    async with watching(api, listener, token_file=token, watch_s=10.0):
        await listener.wait_for("s-1", "s-2")
        await api.wait_for_watches(1)
        token.write_text("new")
        api.drop()
        await api.wait_for_watches(2)
    assert api.tokens[0] == "Bearer old"
    assert api.tokens[-1] == "Bearer new"


async def test_server_certificate_is_verified_with_the_bundle(tmp_path: Path) -> None:
    authority, impostor = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bundle = tmp_path / "ca.crt"
    impostor.cert_pem.write_to_path(bundle)
    listener = RecordingListener()
    async with api_server(context) as api:
        await api.apply(endpoint_slice("a", endpoint("s-1")))
        async with watching(api, listener, ca_file=bundle):
            await listener.wait_until(lambda: bool(listener.failures))
            assert "certificate" in listener.failures[0].lower()
            assert listener.updates == []
            authority.cert_pem.write_to_path(bundle)  # replaced, as in a rotation
            await listener.wait_for("s-1")


def test_pauses_are_random_and_limited() -> None:
    backoff = Backoff()
    pauses = [backoff.pause() for _ in range(20)]
    assert pauses[0] <= kubernetes.FIRST_PAUSE_S
    assert max(pauses) <= kubernetes.MAX_PAUSE_S
    assert len(set(pauses)) == len(pauses)
    backoff.reset()
    assert backoff.pause() <= kubernetes.FIRST_PAUSE_S


def test_api_server_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert in_cluster() == "https://10.96.0.1:443"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert in_cluster() == "https://[fd00::1]:443"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ProxyError, match=r"discovery\.kubernetes\.url"):
        in_cluster()
