"""The few short fields of a multipart form that matter to routing. Files are skipped, not read."""

from __future__ import annotations

NAMES = ("model", "stream", "prompt")
LONGEST_FIELD = 4096
LONGEST_HEAD = 300
MOST_MENTIONS = 1000  # of a field, most of them in files
HEAD_END = b"\r\n\r\n"


def form_fields(body: bytes, content_type: bytes) -> dict[str, str]:
    """Read the fields; none where the form is not as it should be."""
    _, _, parameter = content_type.partition(b"boundary=")
    boundary = parameter.split(b";")[0].strip().strip(b'"')
    if not boundary:
        return {}
    found = ((name, _field(body, name.encode(), b"--" + boundary)) for name in NAMES)
    return {name: value for name, value in found if value is not None}


def _field(body: bytes, name: bytes, boundary: bytes) -> str | None:
    mark = b'name="' + name + b'"'
    at = -len(mark)
    for _ in range(MOST_MENTIONS):
        at = body.find(mark, at + len(mark))
        if at < 0:
            return None
        opened = body.rfind(boundary, max(at - LONGEST_HEAD, 0), at)
        # A blank line between boundary and mark: those bytes were in a file.
        if opened >= 0 and HEAD_END not in body[opened:at]:
            start = body.find(HEAD_END, at, at + LONGEST_HEAD) + len(HEAD_END)
            end = body.find(b"\r\n" + boundary, start, start + LONGEST_FIELD + len(boundary))
            if start < len(HEAD_END) or end < 0:
                return None
            return body[start:end].decode("utf-8", "replace")
    return None
