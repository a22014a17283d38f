"""Change top-level members of a JSON object in its bytes; every other byte stays as it was.

The text must have been parsed before: what is not JSON is not noticed here. Nothing is parsed
again and nothing is printed anew, so that numbers, escapes, white space and the order of members
reach a worker as the client wrote them.

Cost: where the names are known that a parser found, nothing for those that are not among them; the
others are searched for, and one that stands in one place alone is that member. Else, of a small
body, a search for each name and, where one is found, a walk from there to the end of the text,
which tells whether it was a member of the outermost object: 1-5 us for 1 KB. Else a walk through
all of it: a prompt of 100 KB takes 10-100 us (the more it escapes, the more), the same in 200
messages 300, a list of 160,000 token ids 60, for long strings and lists of numbers are passed over
at the speed of memchr.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

import orjson

from proxy.core.request.json_limits import JsonMask, masked, up_to

QUOTE, OPENING, CLOSING, BACKSLASH = 0x22, b"[{", b"]}", 0x5C
SPACE = b" \t\n\r"
KEY = re.compile(rb'[ \t\n\r]*"([^"]*)"[ \t\n\r]*:[ \t\n\r]*')
SCALAR = re.compile(rb"[^ \t\n\r,}\]]+")
COMMA = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")
END = re.compile(rb"[ \t\n\r]*\}[ \t\n\r]*\Z")
# Up to the next bracket, or the next string too long for a regex to be the fast way over it.
JUMP = re.compile(rb'[^"\[\]{}]*(?:"[^"]{0,96}"[^"\[\]{}]*)*')
# A letter, a digit or `_` that is written as an escape: a name may be spelt otherwise.
ESCAPED = re.compile(rb"\\u00(?:3\d|[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
SMALL = 8192  # in more than that, to search for some names takes longer than to walk
SHORT = 256  # bytes of a value that is told without a walk, beside numbers and words
# Of one object: 4 us each, and meanwhile nobody else is served. vLLM's bodies know 150 of them.
MOST_MEMBERS = 2000
OURS = 50  # more than are set in one on its way
SHORTEST, QUOTES = 5, 2 * MOST_MEMBERS  # bytes of one, as in `"":1,`; quotes of all of them
START = attrgetter("start")


class TooManyMembersError(ValueError):
    """An object has more members than are walked through."""

    def __init__(self) -> None:
        super().__init__(f"An object of the body has more than {MOST_MEMBERS:,} members.")


class JsonMember(NamedTuple):
    """Where one member of an object is: its key's quote, its value, the byte after it."""

    name: bytes  # as it reads, escapes undone
    start: int
    value: int
    end: int


def members(body: bytes, mask: JsonMask | None = None) -> list[JsonMember]:
    """Return the members of an object in order, duplicates included.

    Raise `TooManyMembersError` where it has too many.
    """
    return _walk(body, body.index(b"{") + 1, masked(body) if mask is None else mask.get()) or []


def check(body: bytes, mask: JsonMask | None = None) -> list[JsonMember] | None:
    """Raise `TooManyMembersError` where `members` would, now or with what is set in it on its way.

    Return what they are, where that had to be found out, or costs little by now.
    """
    may = len(body) > MOST_MEMBERS * SHORTEST and up_to(body, b'"', QUOTES) > QUOTES
    if not may and (mask is None or not mask.is_made):
        return None
    found = members(body, mask)
    if len(found) > MOST_MEMBERS:
        raise TooManyMembersError
    return found


def _walk(body: bytes, start: int, plain: bytes) -> list[JsonMember] | None:
    """List the members from one on; None if they are not the outermost object's."""
    found: list[JsonMember] = []
    at = start
    while (key := KEY.match(plain, at)) is not None:
        begin, close = key.span(1)
        value = key.end()
        end = _value_end(plain, value)
        name = body[begin:close]
        if b"\\" in name:
            with suppress(orjson.JSONDecodeError):  # half a character: no name that anybody knows
                name = orjson.loads(b'"%b"' % name).encode()
        found.append(JsonMember(name, begin - 1, value, end))
        if len(found) > MOST_MEMBERS + OURS:
            raise TooManyMembersError
        comma = COMMA.match(plain, end)
        if comma is None:
            return found if END.match(plain, end) else None
        at = comma.end()
    return None


def _value_end(masked: bytes, start: int) -> int:
    first = masked[start]
    if first == QUOTE:
        return masked.index(b'"', start + 1) + 1
    if first not in OPENING:
        scalar = SCALAR.match(masked, start)
        return scalar.end() if scalar else start
    if first == OPENING[0]:
        close = masked.find(b"]", start)
        if not any(masked.find(each, start + 1, close) >= 0 for each in (b'"', b"[", b"{")):
            return close + 1  # numbers: the one kind of list that gets as long as a prompt
    depth, at, jump = 1, start + 1, JUMP.match
    while depth:
        at = jump(masked, at).end()  # type: ignore[union-attr]  # it matches anything
        byte = masked[at]
        at += 1
        if byte == QUOTE:
            at = masked.index(b'"', at) + 1
        elif byte in CLOSING:
            depth -= 1
        else:
            depth += 1
    return at


@functools.lru_cache(maxsize=256)
def _spelt(names: tuple[str, ...]) -> dict[bytes, tuple[str, bytes]]:
    """Write names as they are in a body, without their quotes and with them."""
    return {name.encode(): (name, b'"%b"' % name.encode()) for name in names}


def _found(body: bytes, names: Mapping[bytes, tuple[str, bytes]]) -> list[JsonMember] | None:
    """List the members of names that are there, each known by the one place where its name stands.

    None where that does not tell: a name stands in several places, or may be spelt otherwise.
    """
    if b"\\u00" in body and (len(body) > SMALL or ESCAPED.search(body)):
        return None
    found: list[JsonMember] = []
    for name, (_, quoted) in names.items():
        at = _place(body, quoted, 0)
        if at < 0 or _place(body, quoted, at + 1) >= 0 or (key := KEY.match(body, at)) is None:
            return None
        value = key.end()
        end = _end_of_short(body, value)
        if end < 0:
            return None
        found.append(JsonMember(name, at, value, end))
    found.sort(key=START)
    return found


def _place(body: bytes, quoted: bytes, start: int) -> int:
    """Find a name from somewhere on, or -1; a `_` is seldom in a text, and found by memchr."""
    mark = quoted.find(b"_")
    if mark < 0:
        return body.find(quoted, start)
    first = body.find(b"_", start)
    return -1 if first < 0 else body.find(quoted, max(start, first - mark))


def _end_of_short(body: bytes, start: int) -> int:
    """Find the end of a value in the text around it; -1 where it is long, or a list."""
    first = body[start]
    if first == QUOTE or first == OPENING[1]:
        try:
            return start + _value_end(masked(body[start : start + SHORT]), 0)
        except (IndexError, ValueError):  # it does not end in there
            return -1
    scalar = None if first == OPENING[0] else SCALAR.match(body, start)
    return scalar.end() if scalar else -1


def _named(
    body: bytes, names: Mapping[bytes, tuple[str, bytes]], said: Set[str] | None
) -> list[JsonMember]:
    """List the members of these names."""
    if said is not None:
        names = {key: each for key, each in names.items() if each[0] in said}
        found = _found(body, names) if names else []
        if found is not None:
            return found
    there = None
    if len(body) <= SMALL and not (b"\\u00" in body and ESCAPED.search(body)):
        # In a string such quotes would be escaped: it is a key somewhere, or the end of a string.
        first, find = len(body), body.find
        for _, quoted in names.values():
            if 0 <= (at := find(quoted)) < first:
                first = at
        if first == len(body):
            return []
        if body[first - 1] != BACKSLASH:
            there = _walk(body, first, masked(body))
    return [each for each in there or members(body) if each.name in names]


def times(body: bytes, name: str) -> int:
    """Count the members of a name that a parser found in this body."""
    return len(_named(body, _spelt((name,)), {name}))


def spliced(
    body: bytes,
    fields: Mapping[str, bytes | None],
    said: Set[str] | None = None,
    found: list[JsonMember] | None = None,
) -> bytes:
    """Set members, or take out those that are None; each is JSON text and goes in as it is.

    Their names are of letters, digits and `_`. Where a member is there several times, all of them
    are changed. One that is not there yet comes last: who reads `body` from its start finds the
    prompt where the client put it.

    `said`: the names of all members, as a parser found them in this very text; None: not known. It
    must name no more than is there: a member of that name deeper down would be taken for it.
    `found`: of its members those of these names, where somebody has been through it before.
    """
    names = _spelt(tuple(fields))
    pieces: list[bytes] = []
    at = 0  # bytes of the body that are dealt with
    there: set[str] = set()
    text: bytes | None = None  # for the last of those that are there
    for key, start, value, end in _named(body, names, said) if found is None else found:
        name = names[key][0]
        there.add(name)
        text = fields[name]
        if text is not None:
            pieces += (body[at:value], text)
            at = end
            continue
        before = _last(body, start)
        if before >= at and body[before] != OPENING[1]:  # with the comma before it
            pieces.append(body[at : _last(body, before) + 1])
            at = end
        else:  # with the comma after it
            pieces.append(body[at:start])
            comma = COMMA.match(body, end)
            at = comma.end() if comma else end
    new = [
        b"%b:%b" % (quoted, added)
        for name, quoted in names.values()
        if (added := fields[name]) is not None and name not in there
    ]
    if new:
        end = _last(body, body.rindex(b"}")) + 1
        if end > at:
            bare = body[end - 1] == OPENING[1]
            pieces.append(body[at:end])
            at = end
        else:
            bare = text is None and _ends_with_brace(pieces)
        if not bare:
            pieces.append(b",")
        pieces.append(b",".join(new))
    pieces.append(body[at:])
    return b"".join(pieces)


def _ends_with_brace(pieces: list[bytes]) -> bool:
    """Whether an object has no members so far."""
    for piece in reversed(pieces):
        if stripped := piece.strip(SPACE):
            return stripped.endswith(b"{")
    return False


def _last(text: bytes, end: int) -> int:
    """Find the last byte before a place that is no white space."""
    if text[end - 1] not in SPACE:
        return end - 1
    while end:  # piece by piece: of megabytes of blanks each would cost 60 ns
        start = max(end - SMALL, 0)
        if found := len(text[start:end].rstrip()):
            return start + found - 1
        end = start
    return -1
