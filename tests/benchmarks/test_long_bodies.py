"""The benchmark of long prompts."""

from __future__ import annotations

import pytest

from benchmarks import long_bodies
from benchmarks.long_bodies import bodies, index_bytes, steps_ms

BODIES = list(bodies(300_000))
KINDS = [kind for kind, _ in BODIES]


def test_index_knows_all_sessions() -> None:
    held, known = index_bytes(20, moves=2)
    assert held >= 0
    assert known == 20


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=KINDS)
def test_steps_of_each_body_are_timed(
    kind: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_bodies, "ROUNDS", 1)
    steps = steps_ms(body)
    assert len(steps) == 3, kind
    assert min(steps) >= 0
