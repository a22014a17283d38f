"""Virtual groups, closed at the end of a test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from proxy.core.model.specs import WorkerSpec
from tests.proxy.processes.virtual_group import AloneGroup, HostGroup, MakeGroup, VirtualGroup


@pytest.fixture
def make_any() -> Iterator[MakeGroup]:
    """Return a function that makes virtual groups of a class."""
    groups: list[VirtualGroup] = []

    def make(
        kind: type[VirtualGroup], size: int, *specs: WorkerSpec, **settings: object
    ) -> VirtualGroup:
        groups.append(kind(size, *specs, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture(params=[VirtualGroup, HostGroup])
def make_group(request: pytest.FixtureRequest, make_any: MakeGroup) -> MakeGroup:
    """Make groups of processes, and of hosts in a second run of the test."""
    return partial(make_any, request.param)


@pytest.fixture(params=[VirtualGroup, HostGroup, AloneGroup])
def make_all(request: pytest.FixtureRequest, make_any: MakeGroup) -> MakeGroup:
    """Make groups of processes, groups of hosts, and one router for what all of these must do."""
    return partial(make_any, request.param)


@pytest.fixture
def make_processes(make_any: MakeGroup) -> MakeGroup:
    """Make groups of processes, which see each other's changes at once."""
    return partial(make_any, VirtualGroup)
