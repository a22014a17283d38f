"""Step time as a linear function of the work.

- decode: fixed + per sequence + per token of context;
- prefill: fixed + per prompt + per token + per pair of attending tokens + per token of earlier
  chunks, which is read again;
- mixed: decode + extra fixed term (other kernels, no full CUDA graph; `delta` in the literature)
  + prefill without its fixed term.

Source: DistServe and deferred prefill. How it fails: one floor follows the gradual change from
memory-bound to compute-bound only roughly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from vllm_sched.errors import UsageError

# More than any step's token budget.
UNBOUNDED = 1 << 30


StepKind = Literal["decode", "prefill", "mixed"]
STEP_KINDS: Final[tuple[StepKind, ...]] = get_args(StepKind)


class Chunk(NamedTuple):
    tokens: int
    context: int  # tokens before it

    @property
    def attention(self) -> float:
        return self.tokens * (self.context + self.tokens / 2)


@dataclass(frozen=True, slots=True)
class StepShape:
    prefill_tokens: int = 0
    pairs: float = 0.0  # sum of `Chunk.attention`
    decodes: int = 0
    context_tokens: int = 0  # of all decodes
    prompts: int = 0  # 0 = unknown
    read_tokens: int = 0  # computed in earlier steps

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], decodes: int, context_tokens: int) -> Self:
        return cls(
            sum([chunk.tokens for chunk in chunks]),
            sum([chunk.attention for chunk in chunks]),
            decodes,
            context_tokens,
            len(chunks),
            sum([chunk.context for chunk in chunks]),
        )

    @property
    def kind(self) -> StepKind:
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decodes else "prefill"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step whose time was measured, or sampled from a source."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    decode_fixed_s: float = 0.0  # c_d
    decode_s: float = 0.0  # t_d, per sequence
    context_s: float = 0.0  # per token of the decodes' context
    prefill_fixed_s: float = 0.0  # c_p, of a prefill-only step
    prefill_s: float = 0.0  # t_p, per token
    pair_s: float = 0.0  # per pair of attending tokens
    mixed_s: float = 0.0  # delta, extra of a mixed step
    floor_s: float = 0.0  # least time of a step with prefill
    prompt_fixed_s: float = 0.0  # per prompt
    read_s: float = 0.0  # per token computed in earlier steps

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not 0 <= value <= sys.float_info.max:
                raise UsageError(
                    f"{name}={value!r} must be a number of seconds from 0 up; "
                    "measure again or correct it"
                )

    def seconds(self, shape: StepShape) -> float:
        prefill, decodes = shape.prefill_tokens, shape.decodes
        if not prefill and not decodes:
            return 0.0
        work = self.curve_seconds(prefill + decodes)
        if not prefill:
            return self._decode_seconds(decodes, shape.context_tokens) + work
        work += self.prefill_s * prefill + self.pair_s * shape.pairs
        work += self.prompt_fixed_s * shape.prompts + self.read_s * shape.read_tokens
        return max(self.floor_s, self._base_seconds(decodes, shape.context_tokens) + work)

    def prefill_within(
        self, seconds: float, decodes: int, context_tokens: int, context: int
    ) -> int:
        """Return the largest chunk after `context` tokens that fits in a step."""
        left = seconds - self._base_seconds(decodes, context_tokens) - self._prompt_seconds(context)
        if left <= 0 or seconds < self.floor_s:
            return 0
        # The positive root of: pair_s/2 x² + (prefill_s + pair_s context) x = left
        linear = self.prefill_s + self.pair_s * context
        divisor = linear + math.sqrt(linear * linear + 2 * self.pair_s * left)
        return int(min(2 * left / divisor, UNBOUNDED)) if divisor > 0 else UNBOUNDED

    def chunk_seconds(self, chunk: Chunk) -> float:
        work = self.prefill_s * chunk.tokens + self.pair_s * chunk.attention
        return work + self._prompt_seconds(chunk.context)

    def curve_seconds(self, tokens: float) -> float:  # noqa: ARG002
        """Return the curve's part of a step's time (see `curved_step_time`); 0 without a curve."""
        return 0.0

    def least_curve_seconds(self, tokens: float, steps: float) -> float:  # noqa: ARG002
        """Return a lower bound of the curve's part of `steps` steps with these tokens in all."""
        return 0.0

    def linear_near(self, decodes: int, tokens: int) -> StepTime:  # noqa: ARG002
        return self

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COEFFICIENTS}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Return the step time of a JSON object, or raise a one-line `UsageError`."""
        if not isinstance(content, Mapping):
            raise UsageError(f"a step time must be an object with {', '.join(COEFFICIENTS)}")
        for name, value in content.items():
            if name not in COEFFICIENTS:
                raise UsageError(f"unknown coefficient {name!r}; valid: {', '.join(COEFFICIENTS)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name}={value!r} must be a number of seconds from 0 up")
        return cls(**content)

    def _prompt_seconds(self, context: int) -> float:
        return self.prompt_fixed_s + self.read_s * context

    def _decode_seconds(self, decodes: int, context_tokens: int) -> float:
        return self.decode_fixed_s + self.decode_s * decodes + self.context_s * context_tokens

    def _base_seconds(self, decodes: int, context_tokens: int) -> float:
        if not decodes:
            return self.prefill_fixed_s
        return self.mixed_s + self._decode_seconds(decodes, context_tokens)


COEFFICIENTS: Final = tuple(field.name for field in fields(StepTime))
