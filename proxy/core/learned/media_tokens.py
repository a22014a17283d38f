"""Tokens per image, audio clip and video, learned from `usage`.

Idea: a running mean per kind. Tokens beyond the text estimate are divided in proportion to the
means.

Cost: a few multiplications.

How it fails: mixed sizes get a wide band.
"""

from __future__ import annotations

from dataclasses import dataclass

IMAGE, AUDIO, VIDEO = 0, 1, 2
KINDS = IMAGE, AUDIO, VIDEO
Numbers = tuple[int, int, int]  # per kind
NONE: Numbers = (0, 0, 0)
IMAGE_TOKENS, AUDIO_TOKENS, VIDEO_TOKENS = 1024, 512, 4096
FIRST_SIZES: Numbers = (IMAGE_TOKENS, AUDIO_TOKENS, VIDEO_TOKENS)  # first values
MIN_SIZE, MAX_SIZE = 1.0, 2.0**20
MIN_LEARNING_RATE = 0.05
FIRST_WEIGHT = 0.001  # of the first values
MAX_RATIO = 8.0  # of an observation to its prediction
MIN_BAND, BAND_SPREADS = 0.5, 2.0  # share, mean errors


@dataclass(slots=True, frozen=True)
class RequestMedia:
    counts: Numbers
    beside: int  # tokens of the other parts
    error: float  # of that estimate


class MediaSizes:
    def __init__(self) -> None:
        self.tokens: Numbers = FIRST_SIZES
        self.means = [float(size) for size in FIRST_SIZES]
        self.spreads = [0.0, 0.0, 0.0]  # mean errors
        self.seen = [0.0, 0.0, 0.0]  # weights

    def copy(self) -> MediaSizes:
        """Return the same sizes without observations."""
        other = MediaSizes()
        other.tokens, other.means = self.tokens, list(self.means)
        return other

    def set_mean(self, kind: int, mean: float) -> None:
        self.means[kind] = min(max(mean, MIN_SIZE), MAX_SIZE)
        image, audio, video = self.means
        self.tokens = (round(image), round(audio), round(video))

    def error(self, counts: Numbers) -> int:
        return int(
            sum(
                counts[kind] * max(MIN_BAND * self.means[kind], BAND_SPREADS * self.spreads[kind])
                for kind in KINDS
            )
        )

    def learn(self, media: RequestMedia, prompt_tokens: int) -> None:
        counts, means = media.counts, self.means
        expected = sum(counts[kind] * means[kind] for kind in KINDS)
        got = min(max(float(prompt_tokens - media.beside), 0.0), MAX_RATIO * expected)
        larger = max(expected, got) ** 2
        weight = larger / (larger + media.error**2)
        for kind in KINDS:
            if not counts[kind]:
                continue
            share = weight * counts[kind] * means[kind] / expected
            self.seen[kind] += share
            step = max(share / (FIRST_WEIGHT + self.seen[kind]), MIN_LEARNING_RATE * share)
            off = means[kind] * (got / expected - 1.0)
            self.spreads[kind] += step * (abs(off) - self.spreads[kind])
            self.set_mean(kind, means[kind] + step * off)
