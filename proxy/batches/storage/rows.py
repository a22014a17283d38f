"""From rows to what they stand for, and back; and how a result is written."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from proxy.batches.types import Batch, File, InputProblem, LineJob, LineResult, Status


@dataclass(frozen=True, slots=True)
class ListPage:
    """Which part of a list is wanted."""

    limit: int = 20
    after: str | None = None
    oldest_first: bool = False


def new_id(kind: str) -> str:
    """Make an id nobody can guess."""
    return f"{kind}{uuid.uuid4().hex}"


def replaced(job: LineJob, code: str, message: str) -> LineResult:
    """Say why a line has no answer."""
    return LineResult(
        job.batch, job.number, job.custom_id, new_id("batch_req_"), code=code, message=message
    )


def written(result: LineResult) -> bytes:
    """Write a result as its line of a file; the worker's answer stays as it was."""
    response = error = None
    if result.status:
        response = {
            "status_code": result.status,
            "request_id": result.request_id,
            "body": _one_line(result.body),
        }
    if result.code:
        error = {"code": result.code, "message": result.message}
    return orjson.dumps(
        {
            "id": result.request_id,
            "custom_id": result.custom_id,
            "response": response,
            "error": error,
        }
    )


def _one_line(body: bytes) -> Any:
    """Have JSON pass as it is, but on one line; what is none, as text."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    # In a string they would be escapes.
    return orjson.Fragment(body.translate(None, b"\r\n").strip())


def marks(values: Iterable[object]) -> str:
    """Write a question mark for each value."""
    return ", ".join("?" for _ in values)


def file_of(row: sqlite3.Row) -> File:
    """Read a row of `files`."""
    values = dict(row)
    return File(**values | {"ok": bool(values["ok"])})


def batch_of(row: sqlite3.Row) -> Batch:
    """Read a row of `batches`."""
    values = dict(row)
    metadata = values["metadata"]
    return Batch(
        **values
        | {
            "status": Status(values["status"]),
            "metadata": metadata and orjson.loads(metadata),
            "complaints": [InputProblem(**each) for each in orjson.loads(values["complaints"])],
            "at": orjson.loads(values["at"]),
        }
    )


def row_of(batch: Batch) -> dict[str, Any]:
    """Write a row of `batches`."""
    row = asdict(batch)
    metadata = row["metadata"]
    return row | {
        "status": batch.status.value,
        "metadata": None if metadata is None else orjson.dumps(metadata).decode(),
        "complaints": orjson.dumps(row["complaints"]).decode(),
        "at": orjson.dumps({str(key): value for key, value in batch.at.items()}).decode(),
    }
