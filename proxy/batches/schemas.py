"""JSON objects of files and batches, as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from proxy.batches.types import Batch, File, Json, Status

# OpenAI's field name for the time when a batch reached a status.
TIMES = {
    Status.IN_PROGRESS: "in_progress_at",
    Status.FINALIZING: "finalizing_at",
    Status.COMPLETED: "completed_at",
    Status.FAILED: "failed_at",
    Status.EXPIRED: "expired_at",
    Status.CANCELLING: "cancelling_at",
    Status.CANCELLED: "cancelled_at",
}


def file_json(file: File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_json(batch: Batch) -> Json:
    times = {name: batch.at.get(status) for status, name in TIMES.items()}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.problems} if batch.problems else None,
        "input_file_id": batch.input,
        "completion_window": batch.window,
        "status": batch.status.value,
        "output_file_id": batch.output,
        "error_file_id": batch.error,
        "created_at": int(batch.created),
        "expires_at": int(batch.expires),
        **{name: None if at is None else int(at) for name, at in times.items()},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    }


def list_json(items: Sequence[Json], limit: int) -> bytes:
    """Return one page of a list; `items` may have one more than `limit`."""
    data = items[:limit]
    page = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }
    return orjson.dumps(page)
