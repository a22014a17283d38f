"""Tokens per text, learned from prompts of known size.

Idea: tokens = fixed + per_byte * text + per_tool * tools. A Kalman filter attributes errors to
uncertain parameters: short prompts teach the template, long ones the rate.

Cost: thirty multiplications per prompt.

How it fails: mixed texts on one route widen the error band.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from proxy.core.learned.media_tokens import MediaSizes

BYTES_PER_TOKEN = 4.0
PER_BYTE = 1.0 / BYTES_PER_TOKEN
# Padding and indentation have the most bytes per token, odd characters the fewest.
MAX_BYTES_PER_TOKEN, MIN_BYTES_PER_TOKEN = 16.0, 0.5
FIRST_BAND, MIN_BAND, MAX_BAND = 0.5, 0.02, 0.6
FIRST_FIXED = 128.0  # typical chat template
MIN_FIXED, MAX_FIXED = -128.0, 4096.0
BAND_SPREADS = 3.0  # half width of the band, in mean errors
MIN_LEARNING_RATE = 0.05
FULL_WEIGHT_BYTES = 2000.0  # full weight for the rate
# Noise: tokens, and a share.
NOISE_TOKENS, NOISE_SHARE = 4.0, 0.1
MAX_DEVIATIONS = 4.0
UNCLAMPED_PROMPTS = 4
SPREAD_SLACK_TOKENS = 32.0
FIXED_VAR, BYTE_VAR = FIRST_FIXED**2, (FIRST_BAND * PER_BYTE) ** 2
# Drift per prompt: about twenty long texts make the rate.
FIXED_DRIFT, BYTE_DRIFT = 0.5**2, (0.005 * PER_BYTE) ** 2
USUAL_OUTPUT = 256  # until responses are seen


@dataclass(slots=True)
class LearnedSizes:
    """Sizes learned of one model, route and tenant."""

    fixed: float = 0.0  # tokens per prompt
    per_byte: float = PER_BYTE  # of text
    per_tool: float = PER_BYTE  # of tools
    fixed_var: float = FIXED_VAR
    byte_var: float = BYTE_VAR
    both_var: float = 0.0  # covariance of these two
    tool_var: float = BYTE_VAR
    spread: float = 0.0  # mean relative error
    weight: float = 0.0  # amount of text seen
    seen: int = 0  # requests
    output: float = USUAL_OUTPUT
    outputs: int = 0
    media: MediaSizes = field(default_factory=MediaSizes)

    @property
    def bytes_per_token(self) -> float:
        return 1.0 / self.per_byte

    def tokens(self, text: int, tools: int = 0, prompts: int = 1) -> float:
        return self.fixed * prompts + self.per_byte * text + self.per_tool * tools

    def error(self, text: int, tools: int = 0) -> float:
        size = self.per_byte * text + self.per_tool * tools
        var = self.fixed_var + (2.0 * self.both_var + self.byte_var * text) * text
        var = max(var + self.tool_var * tools * tools, 0.0)  # rounding
        wide = BAND_SPREADS * self.spread * size + sqrt(var)
        return min(max(wide, MIN_BAND * size), MAX_BAND * size + sqrt(self.fixed_var))

    def learn_prompt(self, text: int, tokens: int, tools: int = 0, prompts: int = 1) -> None:
        weight = min(text / FULL_WEIGHT_BYTES, 1.0)
        self._drift(weight, tools)
        fixed = self.fixed_var * prompts + self.both_var * text
        per_byte = self.both_var * prompts + self.byte_var * text
        tool = self.tool_var * tools
        size = self.per_byte * text + self.per_tool * tools
        noise = (NOISE_TOKENS * prompts + NOISE_SHARE * size) ** 2
        var = fixed * prompts + per_byte * text + tool * tools + noise
        off = tokens - self.fixed * prompts - size
        self._learn_spread(abs(off) / (size + SPREAD_SLACK_TOKENS * prompts), weight, noise / var)
        self.seen += 1
        if self.seen > UNCLAMPED_PROMPTS:
            limit = MAX_DEVIATIONS * sqrt(var)
            off = min(max(off, -limit), limit)
        by = off / var
        self._move(fixed * by, per_byte * by, tool * by, text, prompts)
        self.fixed_var = max(self.fixed_var - fixed * fixed / var, 0.0)
        self.both_var -= fixed * per_byte / var
        self.byte_var = max(self.byte_var - per_byte * per_byte / var, 0.0)
        self.tool_var = max(self.tool_var - tool * tool / var, 0.0)

    def _drift(self, weight: float, tools: int) -> None:
        if self.fixed_var < FIXED_VAR:
            self.fixed_var += FIXED_DRIFT
        if self.byte_var < BYTE_VAR:
            self.byte_var += BYTE_DRIFT * weight
        if tools and self.tool_var < BYTE_VAR:
            self.tool_var += BYTE_DRIFT

    def _move(self, fixed: float, per_byte: float, tool: float, text: int, prompts: int) -> None:
        if text < FULL_WEIGHT_BYTES:
            # A short text far off more likely has a large template.
            limit = self.per_byte * text / (FULL_WEIGHT_BYTES - text)
            kept = min(max(per_byte, -limit), limit)
            fixed += (per_byte - kept) * text / prompts
            per_byte = kept
        self.fixed = min(max(self.fixed + fixed, MIN_FIXED), MAX_FIXED)
        minimum, maximum = 1.0 / MAX_BYTES_PER_TOKEN, 1.0 / MIN_BYTES_PER_TOKEN
        self.per_byte = min(max(self.per_byte + per_byte, minimum), maximum)
        self.per_tool = min(max(self.per_tool + tool, 0.0), maximum)

    def _learn_spread(self, off: float, weight: float, chance: float) -> None:
        """Learn the mean error; `chance` excludes the expected part."""
        self.weight += weight
        if weight:
            step = max(weight / self.weight, MIN_LEARNING_RATE * weight) * chance
            self.spread += step * (min(off, 1.0) - self.spread)

    def learn_output(self, tokens: float) -> None:
        self.outputs += 1
        self.output += max(1.0 / self.outputs, MIN_LEARNING_RATE) * (tokens - self.output)
