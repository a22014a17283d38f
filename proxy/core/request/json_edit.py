"""Edit top-level members of a JSON object in its bytes; all other bytes stay unchanged.

The text must be valid JSON.

Cost: with known names, one search per present name that occurs once. Otherwise a small body is
walked from the first hit (1-5 us for 1 KB), a large one from its start: a prompt of 100 KB takes
10-100 us, 200 messages of the same size 300.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

import orjson

from proxy.core.request.json_limits import JsonMask, count_up_to, masked

QUOTE, OPENING, CLOSING, BACKSLASH = 0x22, b"[{", b"]}", 0x5C
SPACE = b" \t\n\r"
KEY = re.compile(rb'[ \t\n\r]*"([^"]*)"[ \t\n\r]*:[ \t\n\r]*')
SCALAR = re.compile(rb"[^ \t\n\r,}\]]+")
COMMA = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")
END = re.compile(rb"[ \t\n\r]*\}[ \t\n\r]*\Z")
# Skip to the next bracket or long string; memchr is faster for long strings.
JUMP = re.compile(rb'[^"\[\]{}]*(?:"[^"]{0,96}"[^"\[\]{}]*)*')
# An escaped letter, digit or `_`: a name may be written differently.
ESCAPED = re.compile(rb"\\u00(?:3\d|[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
SMALL_BODY_BYTES = 8192  # above, one walk is faster than several searches
SHORT_VALUE_BYTES = 256  # bytes of a value searched for its end
# Per object, to bound the time that the event loop is blocked: 4 us each. vLLM has 150 fields.
MAX_MEMBERS = 2000
MAX_ADDED_MEMBERS = 50
MIN_MEMBER_BYTES = 5  # of `"":1,`
MAX_KEY_QUOTES = 2 * MAX_MEMBERS
START = attrgetter("start")


class TooManyMembersError(ValueError):
    def __init__(self) -> None:
        super().__init__(f"An object of the body has more than {MAX_MEMBERS:,} members.")


class JsonMember(NamedTuple):
    """A member's opening quote, value, and end (exclusive)."""

    name: bytes  # unescaped
    start: int
    value: int
    end: int


def members(body: bytes, mask: JsonMask | None = None) -> list[JsonMember]:
    """Return an object's members in order, with duplicates."""
    return _walk(body, body.index(b"{") + 1, masked(body) if mask is None else mask.get()) or []


def check_members(body: bytes, mask: JsonMask | None = None) -> list[JsonMember] | None:
    """Raise `TooManyMembersError` if later edits would.

    Return the members if they had to be found, or the mask exists.
    """
    may = (
        len(body) > MAX_MEMBERS * MIN_MEMBER_BYTES
        and count_up_to(body, b'"', MAX_KEY_QUOTES) > MAX_KEY_QUOTES
    )
    if not may and (mask is None or not mask.is_made):
        return None
    in_body = members(body, mask)
    if len(in_body) > MAX_MEMBERS:
        raise TooManyMembersError
    return in_body


def _walk(body: bytes, start: int, plain: bytes) -> list[JsonMember] | None:
    """Return the members from `start`; None if nested."""
    walked: list[JsonMember] = []
    at = start
    while (key := KEY.match(plain, at)) is not None:
        begin, close = key.span(1)
        value = key.end()
        end = _value_end(plain, value)
        name = body[begin:close]
        if b"\\" in name:
            with suppress(orjson.JSONDecodeError):  # half a surrogate pair: no known name
                name = orjson.loads(b'"%b"' % name).encode()
        walked.append(JsonMember(name, begin - 1, value, end))
        if len(walked) > MAX_MEMBERS + MAX_ADDED_MEMBERS:
            raise TooManyMembersError
        comma = COMMA.match(plain, end)
        if comma is None:
            return walked if END.match(plain, end) else None
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
        if not any(masked.find(mark, start + 1, close) >= 0 for mark in (b'"', b"[", b"{")):
            return close + 1  # numbers: lists as long as prompts
    depth, at, jump = 1, start + 1, JUMP.match
    while depth:
        at = jump(masked, at).end()  # type: ignore[union-attr]  # matches always
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
def _encode_names(names: tuple[str, ...]) -> dict[bytes, tuple[str, bytes]]:
    return {name.encode(): (name, b'"%b"' % name.encode()) for name in names}


def _find_unique(body: bytes, names: Mapping[bytes, tuple[str, bytes]]) -> list[JsonMember] | None:
    """Return these members, if each name occurs once in the text.

    Return None if a name may be escaped.
    """
    if b"\\u00" in body and (len(body) > SMALL_BODY_BYTES or ESCAPED.search(body)):
        return None
    unique: list[JsonMember] = []
    for name, (_, quoted) in names.items():
        at = _find_name(body, quoted, 0)
        if at < 0 or _find_name(body, quoted, at + 1) >= 0 or (key := KEY.match(body, at)) is None:
            return None
        value = key.end()
        end = _short_value_end(body, value)
        if end < 0:
            return None
        unique.append(JsonMember(name, at, value, end))
    unique.sort(key=START)
    return unique


def _find_name(body: bytes, quoted: bytes, start: int) -> int:
    """Find a quoted name; its `_` is rare in text, so memchr is fast."""
    mark = quoted.find(b"_")
    if mark < 0:
        return body.find(quoted, start)
    first = body.find(b"_", start)
    return -1 if first < 0 else body.find(quoted, max(start, first - mark))


def _short_value_end(body: bytes, start: int) -> int:
    """Find the end of a short value; -1 if it is long or a list."""
    first = body[start]
    if first == QUOTE or first == OPENING[1]:
        try:
            return start + _value_end(masked(body[start : start + SHORT_VALUE_BYTES]), 0)
        except (IndexError, ValueError):  # longer
            return -1
    scalar = None if first == OPENING[0] else SCALAR.match(body, start)
    return scalar.end() if scalar else -1


def _find_members(
    body: bytes, names: Mapping[bytes, tuple[str, bytes]], field_names: Set[str] | None
) -> list[JsonMember]:
    if field_names is not None:
        names = {key: name for key, name in names.items() if name[0] in field_names}
        in_body = _find_unique(body, names) if names else []
        if in_body is not None:
            return in_body
    walked = None
    if len(body) <= SMALL_BODY_BYTES and not (b"\\u00" in body and ESCAPED.search(body)):
        # Unescaped quotes: a key, or the end of a string.
        first, find = len(body), body.find
        for _, quoted in names.values():
            if 0 <= (at := find(quoted)) < first:
                first = at
        if first == len(body):
            return []
        if body[first - 1] != BACKSLASH:
            walked = _walk(body, first, masked(body))
    return [member for member in walked or members(body) if member.name in names]


def count_members(body: bytes, name: str) -> int:
    return len(_find_members(body, _encode_names((name,)), {name}))


def edit_members(
    body: bytes,
    fields: Mapping[str, bytes | None],
    field_names: Set[str] | None = None,
    known_members: list[JsonMember] | None = None,
) -> bytes:
    """Set members to JSON text, or remove those with None.

    Names consist of letters, digits and `_`. Duplicates are all edited. New members go last, so the
    prompt keeps its offset.

    `field_names`: all names in the text. `known_members`: the members with the names of `fields`.
    """
    names = _encode_names(tuple(fields))
    pieces: list[bytes] = []
    at = 0
    edited: set[str] = set()
    if known_members is None:
        known_members = _find_members(body, names, field_names)
    for key, start, value, end in known_members:
        name = names[key][0]
        edited.add(name)
        text = fields[name]
        if text is not None:
            pieces += (body[at:value], text)
            at = end
        else:
            cut_from, cut_to = _with_comma(body, at, start, end)
            pieces.append(body[at:cut_from])
            at = cut_to
    new = [
        b"%b:%b" % (quoted, added)
        for name, quoted in names.values()
        if (added := fields[name]) is not None and name not in edited
    ]
    if new:
        end = max(_last_non_space(body, body.rindex(b"}")) + 1, at)
        pieces.append(body[at:end])
        at = end
        if not _ends_with_brace(pieces):
            pieces.append(b",")
        pieces.append(b",".join(new))
    pieces.append(body[at:])
    return b"".join(pieces)


def _with_comma(body: bytes, at: int, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a member with the comma before it, or if it has none, the one after."""
    before = _last_non_space(body, start)
    if before >= at and body[before] != OPENING[1]:
        return _last_non_space(body, before) + 1, end
    comma = COMMA.match(body, end)
    return start, comma.end() if comma else end


def _ends_with_brace(pieces: list[bytes]) -> bool:
    for piece in reversed(pieces):
        if stripped := piece.rstrip(SPACE):
            return stripped.endswith(b"{")
    return False


def _last_non_space(text: bytes, end: int) -> int:
    if text[end - 1] not in SPACE:
        return end - 1
    while end:  # in pieces: byte by byte takes 60 ns each
        start = max(end - SMALL_BODY_BYTES, 0)
        if length := len(text[start:end].rstrip()):
            return start + length - 1
        end = start
    return -1
