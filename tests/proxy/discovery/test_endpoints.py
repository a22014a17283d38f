"""Reading EndpointSlices."""

from __future__ import annotations

from typing import Any

from proxy.config import PoolConfig
from proxy.discovery.endpoints import MAX_NAME_CHARS, Endpoint, name_of, read_slices
from tests.proxy.discovery.api_server import Json, endpoint, endpoint_slice


def read(*slices: Json, **fields: Any) -> list[Endpoint]:
    """Read slices for a pool of these fields."""
    pool = PoolConfig(name="short", selector="pool=short", **fields)
    return list(read_slices(slices, pool).values())


def test_a_pod_is_a_worker_of_its_name() -> None:
    found = read(endpoint_slice("a", endpoint("s-1", "10.0.0.7"), port=8080))
    assert found == [Endpoint("s-1", "10.0.0.7", 8080)]
    assert found[0].url == "http://10.0.0.7:8080"


def test_an_unstated_condition_is_a_good_one() -> None:
    (found,) = read(endpoint_slice("a", endpoint("s-1", ready=None)))
    assert found.ready
    assert not found.leaving


def test_one_that_terminates_leaves_whatever_else_is_said() -> None:
    # publishNotReadyAddresses has the ready condition stay true.
    (found,) = read(endpoint_slice("a", endpoint("s-1", ready=True, terminating=True)))
    assert found.leaving


def test_a_placeholder_is_nobody() -> None:
    assert read(endpoint_slice("a"), {**endpoint_slice("b"), "ports": None}) == []


def test_a_pod_with_two_addresses_is_one_worker() -> None:
    six = endpoint_slice("a", endpoint("s-1", "fd00::1"), family="IPv6")
    four = endpoint_slice("b", endpoint("s-1", "10.0.0.1"))
    assert [each.host for each in read(six, four)] == ["10.0.0.1"]
    assert read(six)[0].url == "http://[fd00::1]:8000"


def test_the_pod_that_came_anew_is_preferred_to_the_one_that_leaves() -> None:
    old = endpoint_slice("a", endpoint("s-1", "10.0.0.1", ready=False, terminating=True))
    new = endpoint_slice("b", endpoint("s-1", "10.0.0.9", ready=False))
    assert [each.host for each in read(old, new)] == ["10.0.0.9"]
    assert [each.host for each in read(new, old)] == ["10.0.0.9"]


def test_the_port_by_number_by_name_and_by_being_the_only_one() -> None:
    both = endpoint_slice("a", endpoint("s-1"))
    both["ports"] = [{"name": "metrics", "port": 9}, {"name": "http", "port": 8080}]
    assert read(both, port="metrics")[0].port == 9
    assert read(both, port=7)[0].port == 7
    assert read(both)[0].port == 8000
    assert read(both, port="nccl") == []


def test_who_has_no_pod_is_named_by_address() -> None:
    slices = endpoint_slice("a", endpoint("", "10.0.0.1"), endpoint("", "fd00::1"))
    assert [each.name for each in read(slices)] == ["short-10.0.0.1", "short-fd00--1"]


def test_long_names_are_cut_and_stay_different() -> None:
    one, two = name_of("a" * 100 + "1"), name_of("a" * 100 + "2")
    assert one != two
    assert len(one) == len(two) == MAX_NAME_CHARS
    assert name_of("a" * MAX_NAME_CHARS) == "a" * MAX_NAME_CHARS
