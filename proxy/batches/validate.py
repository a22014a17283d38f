"""Validation of a batch's input file, with OpenAI's error texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from xxhash import xxh3_128_digest

from proxy.batches.types import MAX_CUSTOM_ID_CHARS, InputLine, InputProblem
from proxy.core.model.route_table import ROUTES, PromptFields
from proxy.core.request.json_edit import TooManyMembersError, members

# Batches may use paths that take one JSON body and return one response.
BATCH_SHAPES = (
    PromptFields.CHAT,
    PromptFields.PROMPT,
    PromptFields.INPUT,
    PromptFields.RESPONSE,
    PromptFields.PAIRS,
)
ENDPOINTS = tuple(
    path
    for path, route in ROUTES.items()
    if path.startswith("/v1/") and route.shape in BATCH_SHAPES
)
MAX_PROBLEMS = 100
# Validated in one slice, which takes milliseconds.
SLICE_BYTES, SLICE_LINES = 256 << 10, 1000


class InputFileCheck:
    """Validates an input file in slices: pass `validate` the bytes that `next_slice` names."""

    def __init__(self, size: int, endpoint: str, max_lines: int) -> None:
        self.problems: list[InputProblem] = []
        self.total = 0
        self._size = size
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._at = self._number = 0
        self._slice = SLICE_BYTES
        # Hashes of custom_ids; the ids themselves could need much memory.
        self._ids: set[bytes] = set()

    @property
    def is_done(self) -> bool:
        """True if the file is read, or has too many errors to go on."""
        return self._at >= self._size or len(self.problems) >= MAX_PROBLEMS

    @property
    def next_slice(self) -> tuple[int, int]:
        """The next slice's offset and size in bytes."""
        return self._at, min(self._slice, self._size - self._at)

    def validate(self, piece: bytes) -> list[InputLine]:
        """Validate the lines that end in a slice and return the valid ones.

        If no line ends in the slice, the next slice is twice as large. A slice with many short
        lines is only read in part.
        """
        begun = self._at
        is_last = begun + len(piece) >= self._size
        end = len(piece) if is_last else piece.rfind(b"\n") + 1
        self._slice = SLICE_BYTES if end else 2 * self._slice
        lines: list[InputLine] = []
        at, last_number = 0, self._number + SLICE_LINES
        while at < end and self._number < last_number and not self.is_done:
            stop = piece.find(b"\n", at, end)
            raw = piece[at : stop if stop >= 0 else end]
            self._at = begun + at + len(raw) + 1
            lines += self._read(raw, begun + at)
            at += len(raw) + 1
        if is_last and at >= end:
            self._at = self._size
        if self.is_done and not self.total and not self.problems:
            self.problems.append(InputProblem("empty_file", "The input file is empty."))
        return lines

    def _read(self, raw: bytes, start: int) -> Iterator[InputLine]:
        self._number += 1
        if not raw.strip():
            return
        self.total += 1
        if self.total > self._max_lines:
            message = f"The input file has more than {self._max_lines} lines."
            self.problems.append(InputProblem("too_many_lines", message))
            self._at = self._size
            return
        line = read_line(raw, self._number, start, self._endpoint)
        if isinstance(line, InputLine):
            if (digest := xxh3_128_digest(line.custom_id.encode())) not in self._ids:
                self._ids.add(digest)
                yield line
                return
            message = f"The custom_id {line.custom_id[:100]!r} is already used by an earlier line."
            line = InputProblem("duplicate_custom_id", message, self._number, "custom_id")
        self.problems.append(line)


def read_line(raw: bytes, number: int, start: int, endpoint: str) -> InputLine | InputProblem:
    """Validate one line, which starts at byte `start` of the file."""
    try:
        fields: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        message = "This line is not parseable as valid JSON."
        return InputProblem("invalid_json_line", message, number)
    if type(fields) is not dict:
        return InputProblem("invalid_json_line", "This line is not a JSON object.", number)
    if (problem := _find_problem(fields, number, endpoint)) is not None:
        return problem
    try:
        where = [member for member in members(raw) if member.name == b"body"][-1]
    except TooManyMembersError as error:
        return InputProblem("invalid_request", str(error), number)
    model = fields["body"].get("model")
    return InputLine(
        number,
        fields["custom_id"],
        model if type(model) is str else "",
        start + where.value,
        where.end - where.value,
    )


def _find_problem(fields: dict[str, Any], number: int, endpoint: str) -> InputProblem | None:
    for name in ("custom_id", "method", "url", "body"):
        if fields.get(name) is None:
            message = f"Missing required parameter: '{name}'."
            return InputProblem("missing_required_parameter", message, number, name)
    custom_id, body = fields["custom_id"], fields["body"]
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return InputProblem("invalid_custom_id", message, number, "custom_id")
    if fields["method"] != "POST":
        return InputProblem("invalid_method", "'method' must be 'POST'.", number, "method")
    if fields["url"] != endpoint:
        message = "The URL provided for this request does not match the batch endpoint."
        message += f" The batch endpoint is {endpoint}."
        return InputProblem("invalid_url", message, number, "url")
    if type(body) is not dict:
        return InputProblem("invalid_body", "'body' must be a JSON object.", number, "body")
    if body.get("stream"):
        message = "Batches do not support streaming; remove 'stream'."
        return InputProblem("invalid_body", message, number, "body.stream")
    return None
