"""How many tokens an image, an audio clip or a video comes to, learnt from workers' `usage`.

Idea: a running mean for each kind. What a prompt has beyond its text and its template is divided
among its media, in proportion to what was expected of each. A prompt whose text estimate may be
off by more than its media have teaches little.

Cost: a few multiplications per prompt with media. How it fails: sizes that differ from one request
to the next, as photographs and icons, are known by their mean and a wide error band.
"""

from __future__ import annotations

from dataclasses import dataclass

IMAGE, AUDIO, VIDEO = 0, 1, 2
KINDS = IMAGE, AUDIO, VIDEO
Numbers = tuple[int, int, int]  # one for each kind
NONE: Numbers = (0, 0, 0)
IMAGE_TOKENS, AUDIO_TOKENS, VIDEO_TOKENS = 1024, 512, 4096
FIRST_SIZES: Numbers = (IMAGE_TOKENS, AUDIO_TOKENS, VIDEO_TOKENS)  # until usage tells
LEAST_SIZE, MOST_SIZE = 1.0, 2.0**20
FORGET = 0.05  # an observation's share in the mean, at least
FIRST_WEIGHT = 0.001  # of what is assumed before anything was seen, in observations
MOST_RATIO = 8.0  # by which one observation may exceed what was expected
LEAST_BAND, SPREADS = 0.5, 2.0  # an estimate's error: a share of it, or mean distances


@dataclass(slots=True, frozen=True)
class RequestMedia:
    """The media of one request, and what its `usage` says of them."""

    counts: Numbers
    beside: int  # tokens estimated for all else in its prompts
    error: float  # and by how much that may be off


class MediaSizes:
    """What has been learnt of each kind."""

    __slots__ = ("means", "seen", "spreads", "tokens")

    def __init__(self) -> None:
        self.tokens: Numbers = FIRST_SIZES
        self.means = [float(size) for size in FIRST_SIZES]
        self.spreads = [0.0, 0.0, 0.0]  # mean distances of single requests from the mean
        self.seen = [0.0, 0.0, 0.0]  # weight of the observations

    def copy(self) -> MediaSizes:
        """Return the same sizes, with nothing seen."""
        other = MediaSizes()
        other.tokens, other.means = self.tokens, list(self.means)
        return other

    def take(self, kind: int, mean: float) -> None:
        """Set the mean of a kind."""
        self.means[kind] = min(max(mean, LEAST_SIZE), MOST_SIZE)
        image, audio, video = self.means
        self.tokens = (round(image), round(audio), round(video))

    def error(self, counts: Numbers) -> int:
        """Return by how many tokens an estimate of these media may be off."""
        return int(
            sum(
                counts[kind] * max(LEAST_BAND * self.means[kind], SPREADS * self.spreads[kind])
                for kind in KINDS
            )
        )

    def see(self, media: RequestMedia, prompt_tokens: int) -> None:
        """Learn from a request of known size."""
        counts, means = media.counts, self.means
        expected = sum(counts[kind] * means[kind] for kind in KINDS)
        got = min(max(float(prompt_tokens - media.beside), 0.0), MOST_RATIO * expected)
        larger = max(expected, got) ** 2
        weight = larger / (larger + media.error**2)
        for kind in KINDS:
            if not counts[kind]:
                continue
            share = weight * counts[kind] * means[kind] / expected
            self.seen[kind] += share
            step = max(share / (FIRST_WEIGHT + self.seen[kind]), FORGET * share)
            off = means[kind] * (got / expected - 1.0)
            self.spreads[kind] += step * (abs(off) - self.spreads[kind])
            self.take(kind, means[kind] + step * off)
