"""Mutated messages, determined by a seed and a number."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence

from tests.fuzz import corpus

CRLF = b"\r\n"
DIGITS = re.compile(rb"\d+")
CHUNK = re.compile(rb"(?<=\r\n)([0-9a-fA-F]+)(?=[;\r])")
ODD_BYTES = bytes([0, 9, 10, 11, 12, 13, 32, 34, 44, 58, 59, 127, 128, 133, 160, 255])

Change = Callable[["Mutator", bytes], bytes]


class Mutator:
    """Generates streams of messages; the same seed and number give the same stream."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = random.Random(seed * 1_000_003 + number)

    def requests(self) -> list[bytes]:
        """Return requests that follow each other on one connection."""
        return self._stream(corpus.REQUESTS, corpus.STARTS)

    def answers(self) -> list[bytes]:
        """Return answers that follow each other on one connection."""
        return self._stream(corpus.ANSWERS, corpus.STATUS_LINES)

    def _stream(self, valid: Sequence[bytes], starts: Sequence[bytes]) -> list[bytes]:
        dice = self.random
        messages = [dice.choice(valid)]
        while dice.random() < 0.55 and len(messages) < 5:
            # A repeated head is usual, and takes the cached path.
            messages.append(messages[-1] if dice.random() < 0.6 else dice.choice(valid))
        if dice.random() < 0.5:
            messages = [self._resized(message) for message in messages]
        for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
            at = dice.randrange(len(messages))
            messages[at] = dice.choice(CHANGES)(self, messages[at])
            if dice.random() < 0.1:
                messages[at] = self._with_start(messages[at], dice.choice(starts))
        return messages

    def cuts(self, data: bytes) -> list[bytes]:
        """Cut bytes into pieces as a network might."""
        dice = self.random
        if dice.random() < 0.1:
            return [data[at : at + 1] for at in range(len(data))]
        places = sorted({dice.randrange(len(data) + 1) for _ in range(dice.randrange(1, 6))})
        # Parser states change at line ends.
        if CRLF in data and dice.random() < 0.5:
            places = sorted({*places, data.find(CRLF, dice.randrange(len(data))) + 1 or 1})
        edges = [0, *places, len(data)]
        return [data[a:b] for a, b in itertools.pairwise(edges)]

    def _resized(self, data: bytes) -> bytes:
        """Return the message with a longer body and the correct length."""
        head, end, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if not found or int(found[1]) != len(body):
            return data
        body += b" " * self.random.choice((1, 2, 9, 90, 900))
        digits = b"%d" % len(body)
        return head[: found.start(1)] + digits + head[found.end(1) :] + end + body

    def _with_start(self, data: bytes, start: bytes) -> bytes:
        _, end, rest = data.partition(CRLF)
        return start + end + rest

    # Each makes one change

    def line_added(self, data: bytes) -> bytes:
        head, end, body = data.partition(b"\r\n\r\n")
        lines = head.split(CRLF)
        lines.insert(self.random.randrange(len(lines)) + 1, self.random.choice(corpus.LINES))
        return CRLF.join(lines) + end + body

    def line_changed(self, data: bytes) -> bytes:
        head, end, body = data.partition(b"\r\n\r\n")
        lines = head.split(CRLF)
        at = self.random.randrange(len(lines))
        match self.random.randrange(6):
            case 0:
                lines.append(lines[at])
            case 1:
                del lines[at]
            case 2:
                lines[at] = lines[at].swapcase()
            case 3:
                lines[at] = lines[at].replace(b":", self.random.choice((b" :", b"\t:", b"::", b"")))
            case 4:
                lines[at] = self.random.choice((b" ", b"\t", b"\x0b", b"\xa0")) + lines[at]
            case _:
                lines[at] += self.random.choice((b" ", b"\t", b"\x0c", b"\x00", b",", b"\\"))
        return CRLF.join(lines) + end + body

    def end_changed(self, data: bytes) -> bytes:
        at = data.find(CRLF, self.random.randrange(len(data) or 1))
        if at < 0:
            return data
        return data[:at] + self.random.choice(corpus.ENDS) + data[at + 2 :]

    def all_ends_changed(self, data: bytes) -> bytes:
        return data.replace(CRLF, self.random.choice(corpus.ENDS[:3]))

    def number_changed(self, data: bytes) -> bytes:
        found = list(DIGITS.finditer(data))
        if not found:
            return data
        match = self.random.choice(found)
        value = int(match[0][:18]) + self.random.choice((-1, 1, 2, 10, -int(match[0][:18])))
        text = self.random.choice((b"%d", b"0%d", b"+%d", b"%x", b"%d ", b"\t%d")) % abs(value)
        return data[: match.start()] + text + data[match.end() :]

    def chunk_changed(self, data: bytes) -> bytes:
        found = list(CHUNK.finditer(data))
        if not found:
            return self.number_changed(data)
        match = self.random.choice(found)
        return data[: match.start()] + self.random.choice(corpus.SIZES) + data[match.end() :]

    def bytes_changed(self, data: bytes) -> bytes:
        at = self.random.randrange(len(data) + 1)
        odd = bytes([self.random.choice(ODD_BYTES)])
        match self.random.randrange(5):
            case 0:
                return data[:at] + odd + data[at:]
            case 1:
                return data[:at] + odd + data[at + 1 :]
            case 2:
                return data[:at] + data[at + self.random.randrange(1, 20) :]
            case 3:
                return data[:at] + data[at : at + 20] * 2 + data[at + 20 :]
            case _:
                return data[:at] + self.random.randbytes(self.random.randrange(1, 9)) + data[at:]

    def cut_off(self, data: bytes) -> bytes:
        return data[: self.random.randrange(len(data) + 1)]

    def blank_before(self, data: bytes) -> bytes:
        return self.random.choice((b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\x00")) + data


CHANGES: tuple[Change, ...] = (
    Mutator.line_added,
    Mutator.line_added,
    Mutator.line_added,
    Mutator.line_changed,
    Mutator.end_changed,
    Mutator.all_ends_changed,
    Mutator.number_changed,
    Mutator.chunk_changed,
    Mutator.bytes_changed,
    Mutator.cut_off,
    Mutator.blank_before,
)
