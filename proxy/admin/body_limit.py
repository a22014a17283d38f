"""Size limit for request bodies of the admin API."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.admin.errors import error_response

MAX_BODY_BYTES = 1 << 20
MAX_DIGITS = 18


class ClientLeftError(Exception):
    """The client disconnected before its request was complete."""


class BodyLimit:
    """Middleware that reads the whole body first and refuses a body above the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read(Headers(scope=scope).get("content-length", "0"), receive)
        except ClientLeftError:
            return
        if body is None:
            message = f"the body exceeds the admin API's limit of {MAX_BODY_BYTES} bytes"
            refusal = error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", message)
            await refusal(scope, receive, send)
            return
        unread = [body]

        async def receive_read() -> Message:
            if not unread:
                return await receive()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        await self._app(scope, receive_read, send)


async def _read(stated: str, receive: Receive) -> bytes | None:
    if len(stated) > MAX_DIGITS or (stated.isdigit() and int(stated) > MAX_BODY_BYTES):
        return None
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeftError
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        more = message.get("more_body", False)
    return bytes(body)
