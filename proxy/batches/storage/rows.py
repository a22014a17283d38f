"""Conversion between rows and objects, and the output format of results."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from proxy.batches.storage.backend import Row
from proxy.batches.types import Batch, File, InputProblem, LineJob, LineResult, Status

PROBLEMS = "complaints"  # the column of `Batch.problems`, also in databases of older releases
FILE_NAMES, BATCH_NAMES = (
    [PROBLEMS if field.name == "problems" else field.name for field in fields(kind)]
    for kind in (File, Batch)
)
# Quoted, because `window` is a word of PostgreSQL.
FILE_COLUMNS, BATCH_COLUMNS = (
    ", ".join(f'"{name}"' for name in names) for names in (FILE_NAMES, BATCH_NAMES)
)


@dataclass(frozen=True, slots=True)
class ListPage:
    limit: int = 20
    after: str | None = None
    oldest_first: bool = False


def new_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4().hex}"


def error_result(job: LineJob, code: str, message: str, request_id: str = "") -> LineResult:
    request_id = request_id or new_id("batch_req_")
    return LineResult(job.batch, job.number, job.custom_id, request_id, code=code, message=message)


def output_line(result: LineResult) -> bytes:
    """Return a result as one line of an output file; the worker's body is unchanged."""
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
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    # Line ends in JSON are whitespace; within strings they are escaped.
    return orjson.Fragment(body.translate(None, b"\r\n").strip())


def placeholders(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def file_of(row: Row) -> File:
    values = dict(zip(FILE_NAMES, row, strict=True))
    return File(**values | {"ok": bool(values["ok"])})


def batch_of(row: Row) -> Batch:
    values = dict(zip(BATCH_NAMES, row, strict=True))
    metadata, problems = values["metadata"], orjson.loads(values.pop(PROBLEMS))
    return Batch(
        **values
        | {
            "status": Status(values["status"]),
            "metadata": metadata and orjson.loads(metadata),
            "problems": [InputProblem(**problem) for problem in problems],
            "at": orjson.loads(values["at"]),
        }
    )


def row_of(batch: Batch) -> dict[str, Any]:
    row = dict(zip(BATCH_NAMES, asdict(batch).values(), strict=True))
    metadata = row["metadata"]
    return row | {
        "status": batch.status.value,
        "metadata": None if metadata is None else orjson.dumps(metadata).decode(),
        PROBLEMS: orjson.dumps(row[PROBLEMS]).decode(),
        "at": orjson.dumps({str(key): value for key, value in batch.at.items()}).decode(),
    }
