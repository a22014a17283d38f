"""How long a step takes here and now, learnt from the steps that were run."""

from __future__ import annotations

from dataclasses import dataclass

# One step says little; a few say enough. An outlier moves an estimate by half at most.
GAIN = 0.3
CLIP = 0.5
# Below this many prefill tokens a step's time is mostly fixed cost and noise.
ENOUGH_TOKENS = 16


def _blend(old: float | None, new: float) -> float:
    if old is None:
        return new
    bound = CLIP * old
    return old + GAIN * max(-bound, min(bound, new - old))


@dataclass(slots=True)
class StepPace:
    """Seconds of a step without prefill, and seconds that each prefill token adds to it."""

    base: float | None = None
    per_token: float | None = None

    def observe(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Take in one finished step."""
        if prefill_tokens == 0:
            if decode_tokens:
                self.base = _blend(self.base, seconds)
        elif self.base is not None and prefill_tokens >= ENOUGH_TOKENS:
            added = max(seconds - self.base, 0.1 * seconds)
            self.per_token = _blend(self.per_token, added / prefill_tokens)

    def tokens_within(self, seconds: float) -> int | None:
        """How many prefill tokens fit into a step of that length; None while unknown."""
        if self.base is None or self.per_token is None:
            return None
        return max(int((seconds - self.base) / self.per_token), 0)
