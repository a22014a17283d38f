"""What clients ask of files and batches, read; and what is refused of it, in OpenAI's words."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

import orjson

from proxy.batches.multipart_form import FormError, read_form
from proxy.batches.storage.rows import ListPage, new_id
from proxy.batches.types import INPUT, Batch, Status
from proxy.batches.validate import ENDPOINTS
from proxy.config.batches import BatchesConfig
from proxy.core.model.types import Reason, Refusal
from proxy.http.request import Request

LONGEST_BODY = 64 << 10  # of what creates a batch
LONGEST_NAME = 255
PAGE, LARGEST_PAGE = 20, 100
FILES_PAGE, LARGEST_FILES_PAGE = 1000, 10_000
WINDOW = re.compile(r"([1-9]\d{0,4})([smhd])", re.ASCII)
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DAY_S = 86_400.0
METADATA_KEYS, METADATA_KEY, METADATA_VALUE = 16, 64, 512


class RefusedRequestError(Exception):
    """A request that is refused."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        reason = Reason.UNKNOWN_PATH if status in (404, 405) else Reason.BAD_REQUEST
        self.refusal = Refusal(status, reason, message, code, param)


def upload(request: Request, settings: BatchesConfig) -> tuple[str, bytes]:
    """Read an uploaded file: its name and its content."""
    try:
        parts = read_form(request.body, request.head.special.get(b"content-type", b""))
    except FormError as error:
        raise RefusedRequestError(400, str(error)) from None
    for name in ("purpose", "file"):
        if name not in parts:
            raise RefusedRequestError(400, f"Missing required parameter: '{name}'.", name)
    purpose = parts["purpose"].value.decode("utf-8", "replace")[:100]
    if purpose != INPUT:
        raise RefusedRequestError(
            400, f"{purpose!r}: the one purpose of files here is 'batch'.", "purpose"
        )
    file = parts["file"]
    if len(file.value) > settings.max_file_bytes:
        message = f"The file has {len(file.value)} bytes; it may have {settings.max_file_bytes}."
        raise RefusedRequestError(413, message, "file", "file_too_large")
    if not file.value:
        raise RefusedRequestError(400, "The file is empty.", "file")
    return (file.file_name or "upload.jsonl")[:LONGEST_NAME], file.value


def new_batch(request: Request, tenant: str, settings: BatchesConfig, now: float) -> Batch:
    """Read what is to become a batch."""
    fields = _fields(request.body)
    for name in ("input_file_id", "endpoint", "completion_window"):
        if type(fields.get(name)) is not str:
            raise RefusedRequestError(400, f"Missing required parameter: '{name}'.", name)
    endpoint, window = fields["endpoint"], fields["completion_window"]
    if endpoint not in ENDPOINTS:
        message = f"{endpoint[:100]!r} takes no batches; valid: {', '.join(ENDPOINTS)}."
        raise RefusedRequestError(400, message, "endpoint")
    return Batch(
        new_id("batch_"),
        tenant,
        endpoint,
        fields["input_file_id"],
        window,
        Status.VALIDATING,
        now,
        now + _seconds(window, settings.keep_days),
        _metadata(fields.get("metadata")),
    )


def _fields(body: bytes) -> dict[str, Any]:
    if len(body) > LONGEST_BODY:
        raise RefusedRequestError(413, f"This body has at most {LONGEST_BODY} bytes.")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusedRequestError(400, f"The body is not JSON: {error}") from None
    if type(fields) is not dict:
        raise RefusedRequestError(400, "The body must be a JSON object.")
    return fields


def _seconds(window: str, most_days: float) -> float:
    param = "completion_window"
    match = WINDOW.fullmatch(window)
    if match is None:
        message = f"{window[:40]!r}: write a number and one of s, m, h and d, as 24h."
        raise RefusedRequestError(400, message, param)
    seconds = int(match[1]) * UNIT_S[match[2]]
    if seconds > most_days * DAY_S:
        message = f"{window!r}: at most {most_days:g} days, for which batches are kept."
        raise RefusedRequestError(400, message, param)
    return float(seconds)


def _metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    if (
        type(given) is not dict
        or len(given) > METADATA_KEYS
        or any(len(key) > METADATA_KEY for key in given)
        or any(type(each) is not str or len(each) > METADATA_VALUE for each in given.values())
    ):
        message = (
            f"'metadata' has at most {METADATA_KEYS} keys of {METADATA_KEY} characters, and their "
            f"values are strings of at most {METADATA_VALUE}."
        )
        raise RefusedRequestError(400, message, "metadata")
    return given


def page(request: Request, *, of_files: bool) -> tuple[ListPage, str | None]:
    """Read which part of a list is wanted; of files, also of which purpose."""
    query = request.head.target.partition(b"?")[2].decode("latin-1")
    try:
        asked = {name: values[-1] for name, values in parse_qs(query, max_num_fields=16).items()}
    except ValueError:
        raise RefusedRequestError(400, "The query has more than 16 fields.") from None
    usual, most = (FILES_PAGE, LARGEST_FILES_PAGE) if of_files else (PAGE, LARGEST_PAGE)
    limit = asked.get("limit", str(usual))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise RefusedRequestError(
            400, f"{limit[:20]!r}: 'limit' is a number from 1 to {most}.", "limit"
        )
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RefusedRequestError(400, f"{order[:20]!r}: 'order' is asc or desc.", "order")
    after = asked.get("after")
    return ListPage(int(limit), after, oldest_first=order == "asc"), asked.get("purpose")
