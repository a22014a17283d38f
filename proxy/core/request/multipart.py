"""Read the few form fields that routing needs; skip files."""

from __future__ import annotations

import re

NAMES = ("model", "stream", "prompt")
MAX_FIELD_BYTES = 4096
MAX_HEAD_BYTES = 300
MAX_MENTIONS = 1000  # of a field name; most are in files
HEAD_END = b"\r\n\r\n"
# The strict form that all parsers read alike.
PLAIN_TYPE = re.compile(
    rb"multipart/form-data; ?boundary=(\"?)([\w'()+,./:=?-]{1,70})\1", re.IGNORECASE
)
PLAIN_NAME = re.compile(
    rb"\r\ncontent-disposition: form-data; name=\"([\w.\[\]-]+)\"(; filename\*?=[^\r\n]*)?\r\n",
    re.IGNORECASE,
)
ANOTHER_NAME = re.compile(rb"(?<!file)name[\W\d]*=", re.IGNORECASE)
MAX_PARTS = 100
MAX_PLAIN_HEAD_BYTES = 4096


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary of a form's parts; empty without one."""
    _, _, parameter = content_type.partition(b"boundary=")
    return parameter.split(b";")[0].strip().strip(b'"')


def form_fields(body: bytes, content_type: bytes) -> dict[str, str]:
    boundary = boundary_of(content_type)
    if not boundary:
        return {}
    values = ((name, _field(body, name.encode(), b"--" + boundary)) for name in NAMES)
    return {name: value for name, value in values if value is not None}


def _field(body: bytes, name: bytes, boundary: bytes) -> str | None:
    mark = b'name="' + name + b'"'
    at = -len(mark)
    for _ in range(MAX_MENTIONS):
        at = body.find(mark, at + len(mark))
        if at < 0:
            return None
        opened = body.rfind(boundary, max(at - MAX_HEAD_BYTES, 0), at)
        # A blank line between boundary and name: the name is inside a file.
        if opened >= 0 and HEAD_END not in body[opened:at]:
            start = body.find(HEAD_END, at, at + MAX_HEAD_BYTES) + len(HEAD_END)
            end = body.find(b"\r\n" + boundary, start, start + MAX_FIELD_BYTES + len(boundary))
            if start < len(HEAD_END) or end < 0:
                return None
            return body[start:end].decode("utf-8", "replace")
    return None


def plain_model(body: bytes, content_type: bytes) -> str | None:
    """Return the model if all parsers agree on it, else None.

    Access control uses this name. Workers accept the last of several, other spellings, or a
    default.
    """
    kind = PLAIN_TYPE.fullmatch(content_type)
    if kind is None:
        return None
    before, *parts = body.split(b"--" + kind[2], MAX_PARTS)
    if before or not parts or not parts.pop().startswith(b"--"):
        return None
    models: list[bytes] = []
    for part in parts:
        end = part.find(HEAD_END, 0, MAX_PLAIN_HEAD_BYTES)
        head, start = part[: end + 2], end + len(HEAD_END)
        names = PLAIN_NAME.findall(head)
        if end < 0 or len(names) != 1 or head.lower().count(b"content-disposition") != 1:
            return None
        if not (part.startswith(b"\r\n") and part.endswith(b"\r\n", start)):
            return None  # the boundary is not on a line of its own
        name, rest = names[0]
        if ANOTHER_NAME.search(rest) or (rest and name == b"model"):
            return None
        if name == b"model":
            models.append(part[start:-2])
    return models[0].decode("utf-8", "replace") if len(models) == 1 else None
