"""Parsing of EndpointSlices."""

from __future__ import annotations

from typing import Any

from proxy.config import PoolConfig
from proxy.discovery.endpoints import MAX_NAME_CHARS, Endpoint, name_of, read_slices
from tests.proxy.discovery.api_server import Json, endpoint, endpoint_slice


def read(*slices: Json, **fields: Any) -> list[Endpoint]:
    pool = PoolConfig(name="short", selector="pool=short", **fields)
    return list(read_slices(slices, pool).values())


def test_endpoint_has_the_name_of_its_pod() -> None:
    found = read(endpoint_slice("a", endpoint("s-1", "10.0.0.7"), port=8080))
    assert found == [Endpoint("s-1", "10.0.0.7", 8080)]
    assert found[0].url == "http://10.0.0.7:8080"


def test_conditions_of_an_endpoint() -> None:
    """A missing one means ready. With publishNotReadyAddresses, a leaving endpoint is ready."""
    (found,) = read(endpoint_slice("a", endpoint("s-1", ready=None)))
    assert (found.ready, found.leaving) == (True, False)
    (found,) = read(endpoint_slice("a", endpoint("s-1", ready=True, terminating=True)))
    assert found.leaving


def test_slice_without_endpoints_or_ports_is_empty() -> None:
    assert read(endpoint_slice("a"), {**endpoint_slice("b"), "ports": None}) == []


def test_pod_with_two_families_is_one_endpoint() -> None:
    six = endpoint_slice("a", endpoint("s-1", "fd00::1"), family="IPv6")
    four = endpoint_slice("b", endpoint("s-1", "10.0.0.1"))
    assert [endpoint.host for endpoint in read(six, four)] == ["10.0.0.1"]
    assert read(six)[0].url == "http://[fd00::1]:8000"


def test_new_pod_is_preferred_to_a_leaving_one() -> None:
    old = endpoint_slice("a", endpoint("s-1", "10.0.0.1", ready=False, terminating=True))
    new = endpoint_slice("b", endpoint("s-1", "10.0.0.9", ready=False))
    assert [endpoint.host for endpoint in read(old, new)] == ["10.0.0.9"]
    assert [endpoint.host for endpoint in read(new, old)] == ["10.0.0.9"]


def test_port_is_chosen_by_number_or_name() -> None:
    both = endpoint_slice("a", endpoint("s-1"))
    both["ports"] = [{"name": "metrics", "port": 9}, {"name": "http", "port": 8080}]
    assert read(both, port="metrics")[0].port == 9
    assert read(both, port=7)[0].port == 7
    assert read(both)[0].port == 8000
    assert read(both, port="nccl") == []


def test_port_named_journal_is_that_of_the_journal() -> None:
    both = endpoint_slice("a", endpoint("s-1"), endpoint("s-2", "fd00::1"))
    both["ports"] = [{"name": "journal", "port": 5700}, {"name": "http", "port": 8080}]
    four, six = read(both)
    assert (four.port, six.port) == (8080, 8080)
    assert four.journal == (f"tcp://{four.host}:5700",)
    assert six.journal == ("tcp://[fd00::1]:5700",)
    both["ports"] = [{"name": "http", "port": 8080}]
    assert read(both)[0].journal == ()


def test_endpoint_without_a_pod_is_named_by_address() -> None:
    slices = endpoint_slice("a", endpoint("", "10.0.0.1"), endpoint("", "fd00::1"))
    assert [endpoint.name for endpoint in read(slices)] == ["short-10.0.0.1", "short-fd00--1"]


def test_long_names_are_cut_and_stay_unique() -> None:
    one, two = name_of("a" * 100 + "1"), name_of("a" * 100 + "2")
    assert one != two
    assert len(one) == len(two) == MAX_NAME_CHARS
    assert name_of("a" * MAX_NAME_CHARS) == "a" * MAX_NAME_CHARS
