"""Reconciliation of a discovered pool."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proxy.config import PoolConfig
from proxy.discovery.endpoints import Endpoint, Endpoints
from proxy.discovery.reconcile import DiscoveredPool, key_of
from proxy.errors import ProxyError


def endpoints(*names: str, ready: bool = True, leaving: bool = False) -> Endpoints:
    """Return equal endpoints with these names."""
    return {n: Endpoint(n, f"10.0.0.{n[-1]}", 8000, ready, leaving) for n in names}


class WatchedPool:
    """A pool that counts its changes."""

    def __init__(self) -> None:
        self.changes = 0
        self.pool = DiscoveredPool(PoolConfig(name="short", selector="a=b"), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def usable(self) -> dict[str, bool]:
        """Return whether each member may get requests."""
        return {endpoint.name: usable for endpoint, usable in self.pool.members()}


@pytest.fixture
def watched() -> WatchedPool:
    return WatchedPool()


def test_equal_update_is_no_change(watched: WatchedPool) -> None:
    for _ in range(3):
        watched.pool.update(endpoints("s-1"))
    assert watched.changes == 1


def test_not_ready_and_leaving_members_get_no_requests(watched: WatchedPool) -> None:
    """Readiness is ignored if no member is ready."""
    leaving = endpoints("s-3", leaving=True)
    watched.pool.update(endpoints("s-1") | endpoints("s-2", ready=False) | leaving)
    assert watched.usable == {"s-1": True, "s-2": False, "s-3": False}
    watched.pool.update(endpoints("s-1", "s-2", ready=False) | leaving)
    assert watched.usable == {"s-1": True, "s-2": True, "s-3": False}


def test_empty_update_keeps_all_members(
    watched: WatchedPool, caplog: pytest.LogCaptureFixture
) -> None:
    watched.pool.update(endpoints("s-1", "s-2") | endpoints("s-3", leaving=True))
    for _ in range(3):
        watched.pool.update({})
    assert watched.usable == {"s-1": True, "s-2": True}
    assert watched.pool.kept == {"s-1", "s-2"}
    assert len([r for r in caplog.records if "all 2 workers disappeared" in r.message]) == 1


def test_empty_pool_is_logged_once(watched: WatchedPool, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        watched.pool.update({})
    assert [r.message for r in caplog.records] == ["discovery of pool short: no worker found yet"]


@pytest.mark.parametrize("names", [("s-9",), ("s-1", "s-2")], ids=["new", "returned"])
def test_members_end_the_distrust(watched: WatchedPool, names: tuple[str, ...]) -> None:
    watched.pool.update(endpoints("s-1", "s-2"))
    watched.pool.update({})
    watched.pool.update(endpoints(*names))
    assert watched.usable == dict.fromkeys(names, True)
    assert not watched.pool.kept


def test_pool_scaled_to_zero_is_emptied(watched: WatchedPool) -> None:
    watched.pool.update(endpoints("s-1", "s-2"))
    watched.pool.update(endpoints("s-1", "s-2", leaving=True))
    assert watched.usable == {"s-1": False, "s-2": False}
    watched.pool.update({})
    assert watched.usable == {}


def test_vanished_member_is_kept_if_all_others_leave(watched: WatchedPool) -> None:
    watched.pool.update(endpoints("s-1", "s-2"))
    watched.pool.update(endpoints("s-2", leaving=True))
    assert watched.usable == {"s-1": True, "s-2": False}


def test_kept_members_are_given_up_one_by_one(watched: WatchedPool) -> None:
    watched.pool.update(endpoints("s-1", "s-2"))
    watched.pool.update({})
    watched.pool.give_up(frozenset({"s-1"}))
    assert watched.usable == {"s-2": True}
    watched.pool.update({})
    assert watched.usable == {"s-2": True}


def test_failure_and_its_end_are_logged_once(
    watched: WatchedPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched.pool.update(endpoints("s-1"))
    for _ in range(3):
        watched.pool.fail("it is down")
    watched.pool.update(endpoints("s-1"))
    assert watched.usable == {"s-1": True}
    messages = [record.message for record in caplog.records]
    assert messages == [
        "discovery of pool short: it is down; 1 known workers stay",
        "discovery of pool short: works again",
    ]


def test_api_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    pool = PoolConfig(name="short", selector="a=b", api_key_file=file)
    for text, message in (
        (None, "can't be read"),
        ("", "has no valid key"),
        ("two words", "without spaces"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ProxyError, match=message):
            key_of(pool)
    file.write_text("hush\n")
    assert key_of(pool) == "hush"
    assert key_of(PoolConfig(name="short", selector="a=b", api_key="hash")) == "hash"
    assert key_of(PoolConfig(name="short", selector="a=b")) is None
