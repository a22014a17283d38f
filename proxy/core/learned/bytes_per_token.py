"""How many tokens a text comes to, learnt from prompts of known size.

Assumed: a prompt has so many tokens whatever its text is (what its template prints, beyond what was
reckoned), so many per byte of text, and so many per byte of tools, which a template may leave out.

Idea: a Kalman filter. Each of the three has a value and a variance; what a prompt says is shared
out by what was uncertain. So a "hi" teaches what the template prints and next to nothing of the
rate, a long text the rate; and the variance of a prediction is wide for texts far longer than those
that were learnt from, as for all of them at first. The values drift, so that new texts count.

Cost: some thirty multiplications per prompt learnt from, a root per estimate. How it fails: kinds
of text that are mixed on one route are taken for noise, and widen the band; of the tools' share
only the variance is kept, not what it has in common with the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from proxy.core.learned.media_tokens import MediaSizes

BYTES_PER_TOKEN = 4.0
PER_BYTE = 1.0 / BYTES_PER_TOKEN
# No text is taken to have fewer tokens than one in so many bytes: there are words of more, but few
# texts of such words; padding and indentation come nearest. Nor one with more than its bytes, but
# for what a tokenizer may make of an odd character.
MOST_PER_TOKEN, LEAST_PER_TOKEN = 16.0, 0.5
FIRST_BAND, LEAST_BAND, MOST_BAND = 0.5, 0.02, 0.6
FIRST_FIXED = 128.0  # tokens that a template may well print unseen
LEAST_FIXED, MOST_FIXED = -128.0, 4096.0
SPREADS = 3.0  # the band is so many mean distances wide, each way
FORGET = 0.05
FULL_WEIGHT_BYTES = 2000.0  # the rate of a shorter text says little of a long one's
# What is no more than chance: so many tokens, and such a share.
NOISE_TOKENS, NOISE = 4.0, 0.1
FAR = 4.0  # deviations: what is farther off moves it no farther,
FEW = 4  # once so many have said where they are
SLACK = 32.0  # tokens: the share by which a short text is off says little
FIXED_VAR, BYTE_VAR = FIRST_FIXED**2, (FIRST_BAND * PER_BYTE) ** 2
# Deviations of the drift from one prompt to the next. With the noise above, the last twenty or so
# long texts make the rate.
FIXED_DRIFT, BYTE_DRIFT = 0.5**2, (0.005 * PER_BYTE) ** 2
USUAL_OUTPUT = 256  # until answers tell


@dataclass(slots=True)
class LearnedSizes:
    """What has been learnt of one model on one route, of one tenant where there are tenants."""

    fixed: float = 0.0  # tokens of each prompt
    per_byte: float = PER_BYTE  # of text
    per_tool: float = PER_BYTE  # and of what describes tools
    fixed_var: float = FIXED_VAR
    byte_var: float = BYTE_VAR
    both_var: float = 0.0  # the covariance of these two
    tool_var: float = BYTE_VAR
    spread: float = 0.0  # mean distance of single prompts, as a share
    weight: float = 0.0  # how much text was seen
    seen: int = 0  # in how many requests
    output: float = USUAL_OUTPUT
    outputs: int = 0
    media: MediaSizes = field(default_factory=MediaSizes)

    @property
    def bytes_per_token(self) -> float:
        """Of text."""
        return 1.0 / self.per_byte

    def tokens(self, text: int, tools: int = 0, prompts: int = 1) -> float:
        """Estimate what so many bytes come to."""
        return self.fixed * prompts + self.per_byte * text + self.per_tool * tools

    def error(self, text: int, tools: int = 0) -> float:
        """Say how far off an estimate of one prompt may be."""
        size = self.per_byte * text + self.per_tool * tools
        var = self.fixed_var + (2.0 * self.both_var + self.byte_var * text) * text
        var = max(var + self.tool_var * tools * tools, 0.0)  # rounding
        wide = SPREADS * self.spread * size + sqrt(var)
        return min(max(wide, LEAST_BAND * size), MOST_BAND * size + sqrt(self.fixed_var))

    def see_prompt(self, text: int, tokens: int, tools: int = 0, prompts: int = 1) -> None:
        """Learn from one request of known size."""
        weight = min(text / FULL_WEIGHT_BYTES, 1.0)
        self._drift(weight, tools)
        fixed = self.fixed_var * prompts + self.both_var * text
        each = self.both_var * prompts + self.byte_var * text
        tool = self.tool_var * tools
        size = self.per_byte * text + self.per_tool * tools
        noise = (NOISE_TOKENS * prompts + NOISE * size) ** 2
        var = fixed * prompts + each * text + tool * tools + noise
        off = tokens - self.fixed * prompts - size
        self._see_spread(abs(off) / (size + SLACK * prompts), weight, noise / var)
        self.seen += 1
        if self.seen > FEW:
            most = FAR * sqrt(var)
            off = min(max(off, -most), most)
        by = off / var
        self._move(fixed * by, each * by, tool * by, text, prompts)
        self.fixed_var = max(self.fixed_var - fixed * fixed / var, 0.0)
        self.both_var -= fixed * each / var
        self.byte_var = max(self.byte_var - each * each / var, 0.0)
        self.tool_var = max(self.tool_var - tool * tool / var, 0.0)

    def _drift(self, weight: float, tools: int) -> None:
        """Grow uncertain, though never more so than at first."""
        if self.fixed_var < FIXED_VAR:
            self.fixed_var += FIXED_DRIFT
        if self.byte_var < BYTE_VAR:
            self.byte_var += BYTE_DRIFT * weight
        if tools and self.tool_var < BYTE_VAR:
            self.tool_var += BYTE_DRIFT

    def _move(self, fixed: float, each: float, tool: float, text: int, prompts: int) -> None:
        if text < FULL_WEIGHT_BYTES:
            # Be it surprising: a large template is likelier than a text of such tokens.
            most = self.per_byte * text / (FULL_WEIGHT_BYTES - text)
            kept = min(max(each, -most), most)
            fixed += (each - kept) * text / prompts
            each = kept
        self.fixed = min(max(self.fixed + fixed, LEAST_FIXED), MOST_FIXED)
        least, most = 1.0 / MOST_PER_TOKEN, 1.0 / LEAST_PER_TOKEN
        self.per_byte = min(max(self.per_byte + each, least), most)
        self.per_tool = min(max(self.per_tool + tool, 0.0), most)

    def _see_spread(self, off: float, weight: float, chance: float) -> None:
        """Learn how far single prompts are off; `chance`: the part of it that is no news."""
        self.weight += weight
        if weight:
            step = max(weight / self.weight, FORGET * weight) * chance
            self.spread += step * (min(off, 1.0) - self.spread)

    def see_output(self, tokens: float) -> None:
        """Learn from one finished answer."""
        self.outputs += 1
        self.output += max(1.0 / self.outputs, FORGET) * (tokens - self.output)
