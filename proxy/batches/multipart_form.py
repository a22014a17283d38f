"""A multipart form that brings a file: its fields as they are, nothing decoded or guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_PARTS = 16
LONGEST_HEAD = 4096
NAME = re.compile(rb'(?:^|[;\s])name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
FILE_NAME = re.compile(rb'(?:^|[;\s])filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
LINE_END, HEAD_END = b"\r\n", b"\r\n\r\n"


class FormError(ValueError):
    """What came is no such form; the message says why."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One field."""

    value: bytes
    file_name: str | None = None


def read_form(body: bytes, content_type: bytes) -> dict[str, FormField]:
    """Read the fields by name; of two with one name the last counts."""
    kind, _, parameter = content_type.partition(b"boundary=")
    boundary = parameter.split(b";")[0].strip().strip(b'"')
    if not kind.strip().lower().startswith(b"multipart/form-data") or not boundary:
        raise FormError("A file is uploaded as multipart/form-data with a boundary.")
    mark = b"--" + boundary
    at = 0 if body.startswith(mark) else body.find(LINE_END + mark) + len(LINE_END)
    parts: dict[str, FormField] = {}
    for _ in range(MOST_PARTS):
        if not body.startswith(mark, at):
            raise FormError("The form does not begin with its boundary.")
        at += len(mark)
        if body.startswith(b"--", at):
            return parts
        start = body.find(HEAD_END, at, at + LONGEST_HEAD) + len(HEAD_END)
        end = body.find(LINE_END + mark, start - len(LINE_END))
        if start < len(HEAD_END) or end < 0:
            raise FormError("The form has no end.")
        name, part = _part(body[at:start], body[start:end])
        parts[name] = part
        at = end + len(LINE_END)
    raise FormError(f"The form has more than {MOST_PARTS} parts.")


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
