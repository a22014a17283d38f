"""Parsing and validation of API requests, with OpenAI's error texts."""

from __future__ import annotations

import re
from math import inf
from typing import Any
from urllib.parse import parse_qs

import orjson

from proxy.batches.multipart_form import FormError, FormField, read_form
from proxy.batches.storage.rows import ListPage, new_id
from proxy.batches.types import INPUT, Batch, Status
from proxy.batches.validate import ENDPOINTS
from proxy.config.batches import BatchesConfig
from proxy.core.model.types import Reason, Refusal
from proxy.http.request import Request

MAX_BODY_BYTES = 64 << 10  # of a request that creates a batch
MAX_NAME_CHARS = 255
PAGE, MAX_PAGE = 20, 100
FILES_PAGE, MAX_FILES_PAGE = 1000, 10_000
WINDOW = re.compile(r"([1-9]\d{0,4})([smhd])", re.ASCII)
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DAY_S = 86_400.0
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000  # of an uploaded file
MAX_METADATA_KEYS, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 16, 64, 512


class RefusedRequestError(Exception):
    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        reason = Reason.UNKNOWN_PATH if status in (404, 405) else Reason.BAD_REQUEST
        self.refusal = Refusal(status, reason, message, code, param)


def parse_upload(request: Request, settings: BatchesConfig) -> tuple[str, bytes, float]:
    """Return a file's name, content and maximum time to live in seconds."""
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
            400, f"{purpose!r}: files here have the purpose 'batch'.", "purpose"
        )
    file = parts["file"]
    if len(file.value) > settings.max_file_bytes:
        message = f"The file has {len(file.value)} bytes; the limit is {settings.max_file_bytes}."
        raise RefusedRequestError(413, message, "file", "file_too_large")
    if not file.value:
        raise RefusedRequestError(400, "The file is empty.", "file")
    name = (file.file_name or "upload.jsonl")[:MAX_NAME_CHARS]
    return name, file.value, _expires_after_s(parts)


def _expires_after_s(parts: dict[str, FormField]) -> float:
    anchor, seconds = (parts.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return inf
    digits = seconds.value if seconds else b""
    is_usable = anchor is not None and anchor.value == b"created_at" and digits.isdigit()
    if not is_usable or not MIN_EXPIRY_S <= float(digits) <= MAX_EXPIRY_S:
        message = (
            "'expires_after' needs the anchor 'created_at', and seconds from "
            f"{MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
        )
        raise RefusedRequestError(400, message, "expires_after")
    return float(digits)


def parse_batch(request: Request, tenant: str, settings: BatchesConfig, now: float) -> Batch:
    fields = _json_fields(request.body)
    for name in ("input_file_id", "endpoint", "completion_window"):
        if type(fields.get(name)) is not str:
            raise RefusedRequestError(400, f"Missing required parameter: '{name}'.", name)
    endpoint, window = fields["endpoint"], fields["completion_window"]
    if endpoint not in ENDPOINTS:
        message = f"{endpoint[:100]!r} does not support batches; valid: {', '.join(ENDPOINTS)}."
        raise RefusedRequestError(400, message, "endpoint")
    return Batch(
        new_id("batch_"),
        tenant,
        endpoint,
        fields["input_file_id"],
        window,
        Status.VALIDATING,
        now,
        now + _window_s(window, settings.keep_days),
        _metadata(fields.get("metadata")),
    )


def _json_fields(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        raise RefusedRequestError(413, f"The body exceeds {MAX_BODY_BYTES} bytes.")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusedRequestError(400, f"The body is not JSON: {error}") from None
    if type(fields) is not dict:
        raise RefusedRequestError(400, "The body must be a JSON object.")
    return fields


def _window_s(window: str, max_days: float) -> float:
    param = "completion_window"
    match = WINDOW.fullmatch(window)
    if match is None:
        message = f"{window[:40]!r} is not a number with the unit s, m, h or d; example: 24h."
        raise RefusedRequestError(400, message, param)
    seconds = int(match[1]) * UNIT_S[match[2]]
    if seconds > max_days * DAY_S:
        message = f"{window!r} exceeds {max_days:g} days, the time that batches are kept."
        raise RefusedRequestError(400, message, param)
    return float(seconds)


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if (
        type(value) is not dict
        or len(value) > MAX_METADATA_KEYS
        or any(len(key) > MAX_METADATA_KEY_CHARS for key in value)
        or any(
            type(text) is not str or len(text) > MAX_METADATA_VALUE_CHARS for text in value.values()
        )
    ):
        message = (
            f"'metadata' has at most {MAX_METADATA_KEYS} keys of {MAX_METADATA_KEY_CHARS} "
            f"characters; values are strings of at most {MAX_METADATA_VALUE_CHARS} characters."
        )
        raise RefusedRequestError(400, message, "metadata")
    return value


def parse_page(request: Request, *, of_files: bool) -> tuple[ListPage, str | None]:
    """Return the requested page of a list, and for files the purpose filter."""
    query = request.head.target.partition(b"?")[2].decode("latin-1")
    try:
        fields = {name: values[-1] for name, values in parse_qs(query, max_num_fields=16).items()}
    except ValueError:
        raise RefusedRequestError(400, "The query has more than 16 fields.") from None
    default, maximum = (FILES_PAGE, MAX_FILES_PAGE) if of_files else (PAGE, MAX_PAGE)
    limit = fields.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= maximum):
        raise RefusedRequestError(
            400, f"{limit[:20]!r}: 'limit' must be a number from 1 to {maximum}.", "limit"
        )
    order = fields.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RefusedRequestError(400, f"{order[:20]!r}: 'order' must be 'asc' or 'desc'.", "order")
    after = fields.get("after")
    return ListPage(int(limit), after, oldest_first=order == "asc"), fields.get("purpose")
