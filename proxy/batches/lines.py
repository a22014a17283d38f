"""An input file's lines, and what can be wrong with them, in OpenAI's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from proxy.batches.types import LONGEST_ID, Complaint, Line
from proxy.core.routes import ROUTES, Shape
from proxy.core.splice import members

# What a batch may ask for: paths that take one JSON body and give one answer.
SHAPES = (Shape.CHAT, Shape.PROMPT, Shape.INPUT, Shape.RESPONSE, Shape.PAIRS)
ENDPOINTS = tuple(
    path for path, route in ROUTES.items() if path.startswith("/v1/") and route.shape in SHAPES
)
MOST_COMPLAINTS = 100
SLICE_BYTES = 256 << 10  # read in one go, some milliseconds beside the event loop
END_OF_LINE = re.compile(rb"\n|\Z")


class Checking:
    """Reads a file, a slice at a time."""

    def __init__(self, content: bytes, endpoint: str, max_lines: int) -> None:
        self.complaints: list[Complaint] = []
        self.total = 0
        self._content = content
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._at = self._number = 0
        self._ids: set[str] = set()

    @property
    def over(self) -> bool:
        """Whether nothing is left to read, or enough is wrong."""
        return self._at >= len(self._content) or len(self.complaints) >= MOST_COMPLAINTS

    def some(self) -> list[Line]:
        """Read on; returns the lines that are right by themselves."""
        stop = self._at + SLICE_BYTES
        found: list[Line] = []
        while self._at < stop and not self.over:
            found += self._next()
        if self.over and not self.total and not self.complaints:
            self.complaints.append(Complaint("empty_file", "The input file has no lines."))
        return found

    def _next(self) -> Iterator[Line]:
        start = self._at
        end = END_OF_LINE.search(self._content, start).start()  # type: ignore[union-attr]
        self._at = end + 1
        self._number += 1
        raw = self._content[start:end]
        if not raw.strip():
            return
        self.total += 1
        if self.total > self._max_lines:
            message = f"The input file has more than {self._max_lines} lines."
            self.complaints.append(Complaint("too_many_lines", message))
            self._at = len(self._content)
            return
        line = read_line(raw, self._number, start, self._endpoint)
        if isinstance(line, Line) and line.custom_id in self._ids:
            message = f"The custom_id {line.custom_id[:100]!r} was used by an earlier line."
            line = Complaint("duplicate_custom_id", message, self._number, "custom_id")
        if isinstance(line, Complaint):
            self.complaints.append(line)
        else:
            self._ids.add(line.custom_id)
            yield line


def read_line(raw: bytes, number: int, start: int, endpoint: str) -> Line | Complaint:
    """Read one line, which starts at that byte of the file."""
    try:
        fields: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        message = "This line is not parseable as valid JSON."
        return Complaint("invalid_json_line", message, number)
    if type(fields) is not dict:
        return Complaint("invalid_json_line", "This line is not a JSON object.", number)
    if (wrong := _wrong(fields, endpoint)) is not None:
        code, param, message = wrong
        return Complaint(code, message, number, param)
    where = [member for member in members(raw) if member.name == b"body"][-1]
    model = fields["body"].get("model")
    return Line(
        number,
        fields["custom_id"],
        model if type(model) is str else "",
        start + where.value,
        where.end - where.value,
    )


def _wrong(fields: dict[str, Any], endpoint: str) -> tuple[str, str, str] | None:
    """Find the first thing wrong: code, parameter and words."""
    for name in ("custom_id", "method", "url", "body"):
        if fields.get(name) is None:
            return "missing_required_parameter", name, f"Missing required parameter: '{name}'."
    custom_id, body = fields["custom_id"], fields["body"]
    if type(custom_id) is not str or not 0 < len(custom_id) <= LONGEST_ID:
        message = f"'custom_id' must be a string of 1 to {LONGEST_ID} characters."
        return "invalid_custom_id", "custom_id", message
    if fields["method"] != "POST":
        return "invalid_method", "method", "'method' must be 'POST'."
    if fields["url"] != endpoint:
        message = "The URL provided for this request does not match the batch endpoint."
        return "invalid_url", "url", f"{message} That is {endpoint}."
    if type(body) is not dict:
        return "invalid_body", "body", "'body' must be a JSON object."
    if body.get("stream"):
        return "invalid_body", "body.stream", "A batch's answers are not streamed: leave it out."
    return None
