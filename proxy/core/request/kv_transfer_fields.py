"""What in a client's body would steer a transfer of KV blocks, wherever an engine reads it from.

A worker does what such parameters say: it reads another request's blocks, connects to any address,
or dies of one that is malformed. vLLM 0.32 takes them

- from `kv_transfer_params` and `ec_transfer_params` of every route that generates;
- from members of those names in `vllm_xargs`, where a mere string is enough to kill the engine;
- from the same in `sampling_params.extra_args` of `/inference/v1/generate`;
- from the JSON text of a form's `vllm_xargs`, where audio is transcribed or translated.

The parsed body says what an engine reads, escapes undone, at the cost of a few look-ups; a prompt
that mentions these words is no member of any object. Of a member written twice the parsed body
shows the last, and an engine may read the first: where one of these is there at all, the bytes are
looked at too. `null` steers nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from proxy.core.request.json_edit import members

Tree = Mapping[bytes, "Tree | None"]
LEAVES: Tree = {b"kv_transfer_params": None, b"ec_transfer_params": None}
TREE: Tree = {**LEAVES, b"vllm_xargs": LEAVES, b"sampling_params": {b"extra_args": LEAVES}}
NULL = b"null"

NAMES = tuple(name.decode() for name in LEAVES)
ARGUMENTS = b"vllm_xargs"
# What names such a part in a form's head. Older parsers put `name*0=vllm_; name*1=xargs` together,
# in any case, and one parser or another takes all of these for white space.
BLANK = rb"[\s\x1c-\x1f\x85\xa0]"
NAME = re.compile(
    rb"(?:;|%b)name(?:%b*=%b*\"?%b|\*)\Z" % (BLANK, BLANK, BLANK, ARGUMENTS), re.IGNORECASE
)
PLACE = b"content-disposition"
EXTENDED = b"name*"
HEAD_END, PART_END = b"\r\n\r\n", b"\r\n--"
# Beyond these it is no form as anybody writes one, and not worth more time to tell.
LONGEST_LINE = 8192
MOST_MENTIONS = 100
LONGEST_TEXT = 65_536
CHARSET = re.compile(rb"charset([^=]*)=", re.IGNORECASE)
VALUE = re.compile(rb"[ \t]*\"?([^\s;\"]*)")
PLAIN = frozenset([b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"])


def steering(fields: Mapping[str, Any], body: bytes) -> str | None:
    """Name what in a JSON body would steer a transfer; None if nothing does.

    `fields` is the parsed body.
    """
    if (
        "kv_transfer_params" in fields
        or "ec_transfer_params" in fields
        or "vllm_xargs" in fields
        # These are in all bodies of one route, beside a long list of token ids.
        or ("sampling_params" in fields and (b"extra_args" in body or b"\\" in body))
    ):
        return find(body, TREE)
    return None


def find(text: bytes, tree: Tree) -> str | None:
    """Name the first member of an object that a tree has, and that is not null."""
    for name, _, start, end in members(text):
        if name not in tree:
            continue
        value, inner = text[start:end], tree[name]
        if inner is None:
            if value != NULL:
                return name.decode()
        elif value.startswith(b"{") and (found := find(value, inner)) is not None:
            return f"{name.decode()}.{found}"
    return None


def steering_form(body: bytes, content_type: bytes, *, at_all: bool = False) -> str | None:
    """Name what in a multipart form would steer a transfer; None if nothing does.

    `at_all`: name its arguments for the engine whatever they are.

    Parts are not told apart by their boundary, about which two parsers might disagree: any line
    that begins such a part counts, and so does the JSON text after its head.
    """
    # Behind the last sign nothing is looked at: each of many names would be followed to the end.
    for found in CHARSET.finditer(content_type, 0, content_type.rfind(b"=") + 1):
        value = VALUE.match(content_type, found.end())
        if found[1].strip() or value is None or value[1].lower() not in PLAIN:
            return "charset"  # of which names and values could be spelt in any way
    read: set[int] = set()  # where texts begin that were: many heads may have one in common
    for mark, text in ((ARGUMENTS, body), (EXTENDED, body.lower())):
        at = text.find(mark)
        for _ in range(MOST_MENTIONS):
            if at < 0:
                break
            if (name := _in_part(body, at, at + len(mark), read, at_all=at_all)) is not None:
                return name
            at = text.find(mark, at + 1)
        if at >= 0:
            return ARGUMENTS.decode()
    return None


def _in_part(body: bytes, at: int, end: int, read: set[int], *, at_all: bool) -> str | None:
    """Look into the part in whose head a mention may be."""
    first = max(at - LONGEST_LINE, 0)
    # A header runs up to its CR: to some parsers a mere LF is part of it.
    line = body.rfind(b"\r", first, at) + 1
    if not line and first:
        return ARGUMENTS.decode()
    head = body[line:end].lower()
    if PLACE not in head or not NAME.search(head):
        return None
    if at_all:
        return ARGUMENTS.decode()
    start = body.find(HEAD_END, end, end + LONGEST_TEXT)
    if start < 0 and len(body) - end > LONGEST_TEXT:
        return ARGUMENTS.decode()
    if start < 0 or start in read:
        return None
    read.add(start)
    begin = start + len(HEAD_END)
    # No line inside of JSON text begins with `--`. A form that is cut off has no such line.
    stop = body.find(PART_END, begin)
    text = body[begin : stop if stop >= 0 else len(body)]
    if len(text) > LONGEST_TEXT:
        return ARGUMENTS.decode()
    try:  # Python's parser, as vLLM: others don't take NaN
        pairs = json.loads(text.decode("utf-8", "replace"), object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None  # the worker will say so
    for pair in pairs if type(pairs) is list else ():
        if type(pair) is tuple and pair[0] in NAMES and pair[1] is not None:
            return f"{ARGUMENTS.decode()}.{pair[0]}"
    return None
