"""How long a step takes, from what it computes: a straight line for each of three kinds of step.

- decode alone: fixed + per sequence + per token of context;
- prefill alone: fixed + per prompt + per token + per pair of tokens that attend to each other + per
  token of a prompt that was computed in steps before and is read again, however small the chunk;
- both together: the decode part, an extra fixed part (other kernels, no full CUDA graph: `delta`
  in the literature's terms) and the prefill part without its own fixed one.

Where a step with prefill is bound by memory, more of its tokens cost nothing: the floor.

Source: the linear models of DistServe and of deferred prefill. How it fails: real steps bend where
memory-bound turns into compute-bound, which one floor only roughly follows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple, Self

from vllm_sched.errors import UsageError

# More than any step's budget: what fits where a token costs nothing.
UNBOUNDED = 1 << 30


class Chunk(NamedTuple):
    """A part of a prompt computed in one step."""

    tokens: int
    context: int  # tokens before it

    @property
    def attention(self) -> float:
        """Pairs of tokens that attend to each other."""
        return self.tokens * (self.context + self.tokens / 2)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    prefill_tokens: int = 0
    pairs: float = 0.0  # of prefill tokens that attend to each other, as `Chunk.attention`
    decodes: int = 0
    context_tokens: int = 0  # of those that decode, together
    prompts: int = 0  # that the prefill tokens are of; 0 = what one costs is not told apart
    read_tokens: int = 0  # of those prompts, computed in steps before

    @classmethod
    def of(cls, chunks: Sequence[Chunk], decodes: int, context_tokens: int) -> Self:
        """Add up the chunks of a step."""
        return cls(
            sum([chunk.tokens for chunk in chunks]),
            sum([chunk.attention for chunk in chunks]),
            decodes,
            context_tokens,
            len(chunks),
            sum([chunk.context for chunk in chunks]),
        )

    @property
    def mixed(self) -> bool:
        """Whether it does both."""
        return self.prefill_tokens > 0 and self.decodes > 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """The coefficients, in seconds; none is negative."""

    decode_fixed_s: float = 0.0  # c_d
    decode_s: float = 0.0  # t_d, per sequence
    context_s: float = 0.0  # per token of context of those that decode
    prefill_fixed_s: float = 0.0  # c_p, of a step with prefill alone
    prefill_s: float = 0.0  # t_p, per token
    pair_s: float = 0.0  # per pair of tokens that attend to each other
    mixed_s: float = 0.0  # delta: what a step pays for doing both
    floor_s: float = 0.0  # no step with prefill is shorter
    prompt_fixed_s: float = 0.0  # per prompt, whatever its length: taken in, sampled from
    read_s: float = 0.0  # per token of a prompt that was computed in steps before

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        for name, value in self.to_json().items():
            if not 0 <= value <= sys.float_info.max:
                raise UsageError(
                    f"{name}={value!r} must be a number of seconds from 0 up; "
                    "measure again or correct it"
                )

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""
        if not shape.prefill_tokens:
            return self._decode(shape.decodes, shape.context_tokens) if shape.decodes else 0.0
        work = self.prefill_s * shape.prefill_tokens + self.pair_s * shape.pairs
        work += self.prompt_fixed_s * shape.prompts + self.read_s * shape.read_tokens
        return max(self.floor_s, self._before(shape.decodes, shape.context_tokens) + work)

    def prefill_within(
        self, seconds: float, decodes: int, context_tokens: int, context: int
    ) -> int:
        """Size the largest chunk, after `context` tokens of its prompt, that fits into a step."""
        left = seconds - self._before(decodes, context_tokens) - self._once(context)
        if left <= 0 or seconds < self.floor_s:
            return 0
        # The positive root of: pair_s/2 x² + (prefill_s + pair_s context) x = left
        linear = self.prefill_s + self.pair_s * context
        divisor = linear + math.sqrt(linear * linear + 2 * self.pair_s * left)
        return int(min(2 * left / divisor, UNBOUNDED)) if divisor > 0 else UNBOUNDED

    def chunk_seconds(self, chunk: Chunk) -> float:
        """How much longer a step takes for one more part of a prompt."""
        work = self.prefill_s * chunk.tokens + self.pair_s * chunk.attention
        return work + self._once(chunk.context)

    def to_json(self) -> dict[str, float]:
        """Give the coefficients by name."""
        return {name: getattr(self, name) for name in COEFFICIENTS}

    @classmethod
    def from_json(cls, given: object) -> Self:
        """Read them back; the error is one line."""
        if not isinstance(given, Mapping):
            raise UsageError(f"a step's time must be an object of {', '.join(COEFFICIENTS)}")
        for name, value in given.items():
            if name not in COEFFICIENTS:
                raise UsageError(f"unknown coefficient {name!r}; valid: {', '.join(COEFFICIENTS)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name}={value!r} must be a number of seconds from 0 up")
        return cls(**given)

    def _once(self, context: int) -> float:
        """Return what a prompt takes beside its tokens."""
        return self.prompt_fixed_s + self.read_s * context

    def _decode(self, decodes: int, context_tokens: int) -> float:
        return self.decode_fixed_s + self.decode_s * decodes + self.context_s * context_tokens

    def _before(self, decodes: int, context_tokens: int) -> float:
        """Return what a step with prefill takes before the first prefill token."""
        if not decodes:
            return self.prefill_fixed_s
        return self.mixed_s + self._decode(decodes, context_tokens)


COEFFICIENTS: Final = tuple(field.name for field in fields(StepTime))
