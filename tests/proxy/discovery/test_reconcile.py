"""What is believed of a pool, and what is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proxy.config import PoolConfig
from proxy.discovery.endpoints import Endpoint, Endpoints
from proxy.discovery.reconcile import DiscoveredPool, key_of
from proxy.errors import ProxyError


def endpoints(*names: str, ready: bool = True, leaving: bool = False) -> Endpoints:
    """Make some alike."""
    return {n: Endpoint(n, f"10.0.0.{n[-1]}", 8000, ready, leaving) for n in names}


class Seen:
    """A pool, and how often it said that something changed."""

    def __init__(self) -> None:
        self.changes = 0
        self.pool = DiscoveredPool(PoolConfig(name="short", selector="a=b"), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def useful(self) -> dict[str, bool]:
        """Who is there, and may be given anything."""
        return {endpoint.name: useful for endpoint, useful in self.pool.members()}


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_the_same_again_is_no_change(seen: Seen) -> None:
    for _ in range(3):
        seen.pool.update(endpoints("s-1"))
    assert seen.changes == 1


def test_not_ready_and_leaving_ones_get_nothing_new(seen: Seen) -> None:
    seen.pool.update(
        endpoints("s-1") | endpoints("s-2", ready=False) | endpoints("s-3", leaving=True)
    )
    assert seen.useful == {"s-1": True, "s-2": False, "s-3": False}


def test_where_nobody_is_ready_readiness_is_not_believed(seen: Seen) -> None:
    seen.pool.update(endpoints("s-1", "s-2", ready=False) | endpoints("s-3", leaving=True))
    assert seen.useful == {"s-1": True, "s-2": True, "s-3": False}


def test_an_empty_answer_keeps_everybody(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    seen.pool.update(endpoints("s-1", "s-2") | endpoints("s-3", leaving=True))
    for _ in range(3):
        seen.pool.update({})
    assert seen.useful == {"s-1": True, "s-2": True}
    assert seen.pool.kept == {"s-1", "s-2"}
    assert len([r for r in caplog.records if "all 2 workers disappeared" in r.message]) == 1


def test_an_empty_pool_is_said_once(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        seen.pool.update({})
    assert [r.message for r in caplog.records] == ["discovery of pool short: no worker found yet"]


def test_somebody_new_ends_the_doubt(seen: Seen) -> None:
    seen.pool.update(endpoints("s-1", "s-2"))
    seen.pool.update({})
    seen.pool.update(endpoints("s-9"))
    assert seen.useful == {"s-9": True}
    assert not seen.pool.kept


def test_those_that_come_back_are_no_longer_doubted(seen: Seen) -> None:
    seen.pool.update(endpoints("s-1", "s-2"))
    seen.pool.update({})
    seen.pool.update(endpoints("s-1", "s-2"))
    assert seen.useful == {"s-1": True, "s-2": True}
    assert not seen.pool.kept


def test_a_pool_that_is_scaled_to_nothing_is_left_by_all(seen: Seen) -> None:
    seen.pool.update(endpoints("s-1", "s-2"))
    seen.pool.update(endpoints("s-1", "s-2", leaving=True))
    assert seen.useful == {"s-1": False, "s-2": False}
    seen.pool.update({})
    assert seen.useful == {}


def test_one_left_leaving_does_not_hide_that_the_others_vanished(seen: Seen) -> None:
    seen.pool.update(endpoints("s-1", "s-2"))
    seen.pool.update(endpoints("s-2", leaving=True))
    assert seen.useful == {"s-1": True, "s-2": False}


def test_those_kept_are_given_up_one_by_one(seen: Seen) -> None:
    seen.pool.update(endpoints("s-1", "s-2"))
    seen.pool.update({})
    seen.pool.give_up(frozenset({"s-1"}))
    assert seen.useful == {"s-2": True}
    seen.pool.update({})
    assert seen.useful == {"s-2": True}


def test_trouble_and_its_end_are_said_once(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen.pool.update(endpoints("s-1"))
    for _ in range(3):
        seen.pool.fail("it is down")
    seen.pool.update(endpoints("s-1"))
    assert seen.useful == {"s-1": True}
    messages = [record.message for record in caplog.records]
    assert messages == [
        "discovery of pool short: it is down; 1 known workers stay",
        "discovery of pool short: works again",
    ]


def test_a_key_comes_from_its_file(tmp_path: Path) -> None:
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
