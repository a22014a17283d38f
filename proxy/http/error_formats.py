"""Errors as the clients of each API know them: OpenAI's, and by path Anthropic's and Cohere's.

They are what those clients' own libraries look for, to name what went wrong.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Any

import orjson

from proxy.core.model.route_table import ROUTES, ErrorFormat
from proxy.core.model.types import Refusal

ANTHROPIC, COHERE = "/v1/messages/", "/cohere/"
# Anthropic's kinds; other 5xx but 505 are `api_error`, all else `invalid_request_error`.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OTHER_HTTP = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
FAILED = HTTPStatus.BAD_GATEWAY  # what a stream ends with whose worker is gone


class StreamFormat(StrEnum):
    """How a stream tells what its events are."""

    CHAT = "chat"  # they are all alike
    RESPONSES = "responses"  # by name and number
    MESSAGES = "messages"  # by name
    COHERE = "cohere"  # in their data alone


def error(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """Write an error in OpenAI's shape."""
    return orjson.dumps({"error": _openai(status, message, code, param)})


def format_of(path: str) -> ErrorFormat:
    """Return the format of errors at a path, which may be unknown."""
    if (route := ROUTES.get(path)) is not None:
        return route.error_format
    if path.startswith(ANTHROPIC):
        return ErrorFormat.ANTHROPIC
    return ErrorFormat.COHERE if path.startswith(COHERE) else ErrorFormat.OPENAI


def error_for(path: str, refusal: Refusal, request_id: bytes) -> bytes:
    """Write an error for whoever asks at this path."""
    error_format = format_of(path)
    if error_format is ErrorFormat.ANTHROPIC:
        said = {"type": "error", "error": _anthropic(refusal.status, refusal.message)}
        return orjson.dumps(_signed(said, "request_id", request_id))
    if error_format is ErrorFormat.COHERE:
        return orjson.dumps(_signed({"message": refusal.message}, "id", request_id))
    return error(refusal.status, refusal.message, refusal.code, refusal.param)


def error_event(manner: StreamFormat, message: str, code: str, number: int) -> bytes:
    """Write the event that ends a stream whose worker is gone; `number`: it is the how manieth."""
    if manner is StreamFormat.COHERE:
        end = {"type": "message-end", "delta": {"error": message, "finish_reason": "ERROR"}}
        return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(end)
    if manner is StreamFormat.MESSAGES:
        body: dict[str, Any] = {"type": "error", "error": _anthropic(FAILED, message)}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(body)
    nested = _openai(FAILED, message, code, None)
    if manner is StreamFormat.CHAT:
        return b"data: %b\n\n" % orjson.dumps({"error": nested})
    body = {"type": "error", "code": code, "message": message, "param": None}
    # Beside what is documented: OpenAI's clients raise for this, and only hand on the other.
    body |= {"sequence_number": number, "error": nested}
    return b"event: error\ndata: %b\n\n" % orjson.dumps(body)


def is_servers(status: int) -> bool:
    """Whether an error is the server's; to speak another HTTP, which has a 5xx, is the client's."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != OTHER_HTTP


def _openai(status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    kind = "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    elif is_servers(status):
        kind = "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def _anthropic(status: int, message: str) -> dict[str, str]:
    other = "api_error" if is_servers(status) else "invalid_request_error"
    return {"type": KINDS.get(status, other), "message": message}


def _signed(said: dict[str, Any], name: str, request_id: bytes) -> dict[str, Any]:
    """Add the request's id, if it has one."""
    return {**said, name: request_id.decode("latin-1")} if request_id else said
