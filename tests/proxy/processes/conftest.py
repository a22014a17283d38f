"""Tables are given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from proxy.core.model.specs import WorkerSpec
from tests.proxy.processes.making import Crew


@pytest.fixture
def crews() -> Iterator[Callable[..., Crew]]:
    """Make crews."""
    made: list[Crew] = []

    def make(size: int, *specs: WorkerSpec, **settings: object) -> Crew:
        made.append(Crew(size, *specs, **settings))
        return made[-1]

    yield make
    for crew in made:
        crew.table.close()
