"""Whether a JSON text makes more than may be made of it while everybody waits.

Idea: what it costs to parse is what comes of it. Numbers are cheap, 30 to 70 ns each, and a prompt
may be a million of them. A string is 100 ns, an object of one member 200, a member whose name is
new 300; so these have a bound of their own, which no conversation comes near. Together with what
`body` looks at, a body takes tens of milliseconds, and beside that for each MB of its text 1.5 to
3, and 4 where that is JSON again, in a string. Of nothing but escapes it takes 7, of those that the
parser finds hardest 12; of what is not quite JSON, and parsed once more for it, 15.

Told by counting four characters. In strings they count, too, so that this is never too little; only
where it is too much are strings left out. Cost: 0.1 ms for each MB, and 10 ns for each that is
found; with strings left out 2 ms for each MB, and 6 of nothing but escapes. Nothing for a body that
is too small to be dear.
"""

from __future__ import annotations

LARGE = 262_144  # bytes; a shorter text can't make more
MOST_VALUES = 1_100_000
MOST_NODES = 200_000
PIECE = 65_536  # is copied within a processor's cache


class JsonMask:
    """A JSON text in which each quote that is left begins or ends a string.

    Made where somebody needs it, and then once: of a text that is full of escapes that takes longer
    than to parse it.
    """

    __slots__ = ("_made", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._made: bytes | None = None

    @property
    def is_made(self) -> bool:
        """Whether somebody has needed it."""
        return self._made is not None

    def get(self) -> bytes:
        """Return it; every byte is where it was."""
        if self._made is None:
            self._made = masked(self.text)
        return self._made


def masked(text: bytes) -> bytes:
    """Blank escapes of quotes.

    The backslashes go first, and in pairs, as a parser takes them.
    """
    return text.replace(rb"\\", b"..").replace(rb"\"", b"..") if b"\\" in text else text


def too_many(body: bytes, mask: JsonMask | None = None) -> str:
    """Say which bound a JSON text is beyond; nothing if none."""
    if len(body) <= LARGE or not _excess(up_to(body, b'"', 2 * MOST_NODES), body):
        return ""
    plain = (mask or JsonMask(body)).get()
    quotes = up_to(plain, b'"', 2 * MOST_NODES)
    if quotes > 2 * MOST_NODES:
        return _excess(quotes, b"")
    return _excess(quotes, b"".join(plain.split(b'"')[::2]))


def _excess(quotes: int, outside: bytes) -> str:
    strings = (quotes + 1) // 2  # the count may have stopped in one
    nodes = strings + up_to(outside, b"[", MOST_NODES) + up_to(outside, b"{", MOST_NODES)
    if nodes > MOST_NODES:
        return f"{MOST_NODES:,} strings, lists and objects"
    if nodes + up_to(outside, b",", MOST_VALUES) > MOST_VALUES:
        return f"{MOST_VALUES:,} values"
    return ""


def up_to(text: bytes, sign: bytes, most: int) -> int:
    """Count a character until there are more than so many."""
    found = 0
    for at in range(0, len(text), PIECE):
        piece = text[at : at + PIECE]
        found += len(piece) - len(piece.replace(sign, b""))  # ten times as fast as to count
        if found > most:
            break
    return found
