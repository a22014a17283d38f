"""Fields in a client's body that would steer a KV transfer.

A worker obeys them: it reads another request's blocks, connects anywhere, or crashes. vLLM 0.32
reads

- `kv_transfer_params` and `ec_transfer_params` of every route that generates;
- the same in `vllm_xargs`, where a string crashes the engine;
- the same in `sampling_params.extra_args` of `/inference/v1/generate`;
- the JSON of a form's `vllm_xargs` (audio routes).

Parsing shows the last of duplicates, but an engine may read the first. So the bytes are searched if
a name is present. `null` is harmless.
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
ARGUMENTS, ARGUMENTS_NAME = b"vllm_xargs", "vllm_xargs"
# A part's name. Old parsers join `name*0=vllm_; name*1=xargs`; some parser takes each of these as
# white space.
BLANK = rb"[\s\x1c-\x1f\x85\xa0]"
NAME = re.compile(
    rb"(?:;|%b)name(?:%b*=%b*\"?%b|\*)\Z" % (BLANK, BLANK, BLANK, ARGUMENTS), re.IGNORECASE
)
PLACE = b"content-disposition"
EXTENDED = b"name*"
HEAD_END, PART_END = b"\r\n\r\n", b"\r\n--"
# Beyond these limits a form is refused.
MAX_LINE_BYTES = 8192
MAX_MENTIONS = 100
MAX_TEXT_BYTES = 65_536
CHARSET = re.compile(rb"charset([^=]*)=", re.IGNORECASE)
VALUE = re.compile(rb"[ \t]*\"?([^\s;\"]*)")
PLAIN = frozenset([b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"])


def find_steering(fields: Mapping[str, Any], body: bytes, tree: Tree = TREE) -> str | None:
    """Return the first member of `tree` in a JSON body that is not null, or None."""
    if (
        "kv_transfer_params" in fields
        or "ec_transfer_params" in fields
        or "vllm_xargs" in fields
        # Every body of this route has it, with a long list of token ids.
        or ("sampling_params" in fields and (b"extra_args" in body or b"\\" in body))
    ):
        return find(body, tree)
    return None


def find(text: bytes, tree: Tree) -> str | None:
    """Return the first member of `tree` that is not null."""
    for name, _, start, end in members(text):
        if name not in tree:
            continue
        value, inner = text[start:end], tree[name]
        if inner is None:
            if value != NULL:
                return name.decode()
        elif value.startswith(b"{") and (path := find(value, inner)) is not None:
            return f"{name.decode()}.{path}"
    return None


def find_steering_in_form(
    body: bytes, content_type: bytes, *, no_arguments: bool = False
) -> str | None:
    """Return the first steering field of a form, or None.

    `no_arguments`: refuse any `vllm_xargs`. Parsers disagree about boundaries, so every line like a
    part's head counts, with the JSON after it.
    """
    # Earlier matches would scan to the end.
    for charset in CHARSET.finditer(content_type, 0, content_type.rfind(b"=") + 1):
        value = VALUE.match(content_type, charset.end())
        if charset[1].strip() or value is None or value[1].lower() not in PLAIN:
            return "charset"  # names and values may have any encoding
    read: set[int] = set()  # starts of texts, which heads may share
    for mark, text in ((ARGUMENTS, body), (EXTENDED, body.lower())):
        at = text.find(mark)
        for _ in range(MAX_MENTIONS):
            if at < 0:
                break
            if (
                name := _in_part(body, at, at + len(mark), read, no_arguments=no_arguments)
            ) is not None:
                return name
            at = text.find(mark, at + 1)
        if at >= 0:
            return ARGUMENTS_NAME
    return None


def _in_part(body: bytes, at: int, end: int, read: set[int], *, no_arguments: bool) -> str | None:
    """Return a steering field of the part whose head has the mark from `at` to `end`."""
    first = max(at - MAX_LINE_BYTES, 0)
    # A header ends at its CR; some parsers keep a bare LF.
    line = body.rfind(b"\r", first, at) + 1
    if not line and first:
        return ARGUMENTS_NAME
    head = body[line:end].lower()
    if PLACE not in head or not NAME.search(head):
        return None
    return ARGUMENTS_NAME if no_arguments else _after_head(body, end, read)


def _after_head(body: bytes, end: int, read: set[int]) -> str | None:
    start = body.find(HEAD_END, end, end + MAX_TEXT_BYTES)
    if start < 0:
        return ARGUMENTS_NAME if len(body) - end > MAX_TEXT_BYTES else None
    if start in read:
        return None
    read.add(start)
    begin = start + len(HEAD_END)
    # JSON text has no line starting with `--`.
    stop = body.find(PART_END, begin)
    text = body[begin : stop if stop >= 0 else len(body)]
    return ARGUMENTS_NAME if len(text) > MAX_TEXT_BYTES else _in_arguments(text)


def _in_arguments(text: bytes) -> str | None:
    try:  # vLLM's parser; others reject NaN
        pairs = json.loads(text.decode("utf-8", "replace"), object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None  # the worker refuses it
    for pair in pairs if type(pairs) is list else ():
        if type(pair) is tuple and pair[0] in NAMES and pair[1] is not None:
            return f"{ARGUMENTS_NAME}.{pair[0]}"
    return None
