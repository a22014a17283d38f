"""Parser of multipart forms with a file; it does not decode values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.core.request.multipart import boundary_of

MAX_PARTS = 16
MAX_PART_HEAD_BYTES = 4096
NAME = re.compile(rb'(?:^|[;\s])name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
FILE_NAME = re.compile(rb'(?:^|[;\s])filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
LINE_END, HEAD_END = b"\r\n", b"\r\n\r\n"


class FormError(ValueError):
    """The body is not a valid form; the message says why."""


@dataclass(frozen=True, slots=True)
class FormField:
    value: bytes
    file_name: str | None = None


def read_form(body: bytes, content_type: bytes) -> dict[str, FormField]:
    """Return the fields by name; the last field of a name wins."""
    boundary = boundary_of(content_type)
    if not content_type.strip().lower().startswith(b"multipart/form-data") or not boundary:
        raise FormError("Upload the file as multipart/form-data with a boundary.")
    mark = b"--" + boundary
    at = 0 if body.startswith(mark) else body.find(LINE_END + mark) + len(LINE_END)
    parts: dict[str, FormField] = {}
    for _ in range(MAX_PARTS):
        if not body.startswith(mark, at):
            raise FormError("The form does not start with its boundary.")
        at += len(mark)
        if body.startswith(b"--", at):
            return parts
        start = body.find(HEAD_END, at, at + MAX_PART_HEAD_BYTES) + len(HEAD_END)
        if start < len(HEAD_END) and len(body) - at > MAX_PART_HEAD_BYTES:
            raise FormError(f"A part of the form has a header over {MAX_PART_HEAD_BYTES} bytes.")
        end = body.find(LINE_END + mark, start - len(LINE_END))
        if start < len(HEAD_END) or end < 0:
            raise FormError("The form has no closing boundary.")
        name, part = _part(body[at:start], body[start:end])
        parts[name] = part
        at = end + len(LINE_END)
    raise FormError(f"The form has more than {MAX_PARTS} parts.")


def _part(head: bytes, value: bytes) -> tuple[str, FormField]:
    for line in head.split(LINE_END):
        field, _, disposition = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            name, file_name = NAME.search(disposition), FILE_NAME.search(disposition)
            if name is not None:
                return _text(name), FormField(value, file_name and _text(file_name))
    raise FormError("A part of the form has no name.")


def _text(match: re.Match[bytes]) -> str:
    return re.sub(rb"\\(.)", rb"\1", match[1]).decode("utf-8", "replace")
