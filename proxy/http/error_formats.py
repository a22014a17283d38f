"""Error bodies in the formats of OpenAI, Anthropic and Cohere."""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Any

import orjson

from proxy.core.model.route_table import ROUTES, ErrorFormat
from proxy.core.model.types import Refusal

ANTHROPIC_PREFIX, COHERE_PREFIX = "/v1/messages/", "/cohere/"
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
UNSUPPORTED_VERSION = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
WORKER_FAILED = HTTPStatus.BAD_GATEWAY  # in a stream


class StreamFormat(StrEnum):
    """How the events of a stream state their type."""

    CHAT = "chat"  # no types
    RESPONSES = "responses"  # event name and sequence number
    MESSAGES = "messages"  # event name
    COHERE = "cohere"  # only in the data


def error(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    return orjson.dumps({"error": _openai(status, message, code, param)})


def format_of(path: str) -> ErrorFormat:
    if (route := ROUTES.get(path)) is not None:
        return route.error_format
    if path.startswith(ANTHROPIC_PREFIX):
        return ErrorFormat.ANTHROPIC
    return ErrorFormat.COHERE if path.startswith(COHERE_PREFIX) else ErrorFormat.OPENAI


def error_for(path: str, refusal: Refusal, request_id: bytes) -> bytes:
    """Return the error body of a refusal in the path's format."""
    error_format = format_of(path)
    if error_format is ErrorFormat.ANTHROPIC:
        body = {"type": "error", "error": _anthropic(refusal.status, refusal.message)}
        return orjson.dumps(_with_request_id(body, "request_id", request_id))
    if error_format is ErrorFormat.COHERE:
        return orjson.dumps(_with_request_id({"message": refusal.message}, "id", request_id))
    return error(refusal.status, refusal.message, refusal.code, refusal.param)


def error_event(stream_format: StreamFormat, message: str, code: str, number: int) -> bytes:
    """Return the event that ends a stream after a worker failure."""
    if stream_format is StreamFormat.COHERE:
        end = {"type": "message-end", "delta": {"error": message, "finish_reason": "ERROR"}}
        return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(end)
    if stream_format is StreamFormat.MESSAGES:
        body: dict[str, Any] = {"type": "error", "error": _anthropic(WORKER_FAILED, message)}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(body)
    nested = _openai(WORKER_FAILED, message, code)
    if stream_format is StreamFormat.CHAT:
        return b"data: %b\n\n" % orjson.dumps({"error": nested})
    body = {"type": "error", "code": code, "message": message, "param": None}
    # OpenAI's clients raise an exception only if there is `error`, which is undocumented.
    body |= {"sequence_number": number, "error": nested}
    return b"event: error\ndata: %b\n\n" % orjson.dumps(body)


def is_server_error(status: int) -> bool:
    """Return True for a server error; 505 is the client's."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != UNSUPPORTED_VERSION


def _openai(
    status: int, message: str, code: str | None, param: str | None = None
) -> dict[str, Any]:
    kind = "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    elif is_server_error(status):
        kind = "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def _anthropic(status: int, message: str) -> dict[str, str]:
    other = "api_error" if is_server_error(status) else "invalid_request_error"
    return {"type": ANTHROPIC_ERROR_TYPES.get(status, other), "message": message}


def _with_request_id(body: dict[str, Any], name: str, request_id: bytes) -> dict[str, Any]:
    return {**body, name: request_id.decode("latin-1")} if request_id else body
