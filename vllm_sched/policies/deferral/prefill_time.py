"""The predicted time of the prefill chunks in one step."""

from __future__ import annotations

from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.step_time import Chunk


class PrefillTime:
    """The chunks of one step and their predicted seconds."""

    def __init__(self, fit: OnlineFit) -> None:
        self.admitted = 0
        self.total_s = 0.0
        self._fit = fit
        self._chunks: dict[str, tuple[Chunk, float]] = {}

    def set_chunk(self, name: str, chunk: Chunk) -> None:
        if (model := self._fit.model) is None:
            return
        seconds = model.chunk_seconds(chunk) if chunk.tokens else 0.0
        before = self._chunks.get(name)
        self.total_s += seconds - (before[1] if before is not None else 0.0)
        self._chunks[name] = chunk, seconds

    def take_back(self, name: str, tokens: int) -> None:
        if (given := self._chunks.get(name)) is not None:
            chunk, _ = given
            self.set_chunk(name, chunk._replace(tokens=chunk.tokens - tokens))

    def admit(self, name: str, rest: Chunk) -> None:
        """Count an admission; without chunked prefill `rest` is the request's only chunk."""
        self.admitted += 1
        if name not in self._chunks:
            self.set_chunk(name, rest)
