"""The benchmark of streams whose workers are killed."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import continued_streams


@pytest.mark.parametrize("drain", [False, True])
async def test_all_streams_are_whole(monkeypatch: pytest.MonkeyPatch, drain: bool) -> None:
    monkeypatch.setattr(continued_streams, "GAP_S", 0.02)
    arguments = Namespace(
        streams=12, workers=4, seconds=1.5, every=0.3, words=40, attempts=10, seed=0, drain=drain
    )
    result = await continued_streams.run(arguments)
    assert result["drains" if drain else "kills"] >= 2
    assert result["continued"] > 0
    assert result["whole"] >= 12
    assert "lost" not in result
    assert "wrong" not in result


def test_lost_and_repeated_tokens_are_told_apart() -> None:
    text = b'data: {"choices":[{"delta":{"content":"0 "}}]}\n\ndata: [DONE]\n\n'
    assert list(continued_streams.pieces(text)) == ["0 "]
