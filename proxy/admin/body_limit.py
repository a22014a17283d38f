"""How much of a request's body the admin API reads."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.admin.errors import error_response

MAX_BODY_BYTES = 1 << 20
MAX_DIGITS = 18


class ClientLeftError(Exception):
    """The client left before its request was whole."""


class BodyLimit:
    """Reads a body whole before the request passes on; refuses a body that is too large."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(Headers(scope=scope).get("content-length", "0"), receive)
        except ClientLeftError:
            return
        if body is None:
            why = f"the body has more than the {MAX_BODY_BYTES} bytes that the admin API reads"
            refusal = error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", why)
            await refusal(scope, receive, send)
            return
        unread = [body]

        async def receive_read() -> Message:
            if not unread:
                return await receive()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        await self._app(scope, receive_read, send)


async def _read(stated: str, receive: Receive) -> bytes | None:
    """Return a body; None if it is too large, of which no more is read then."""
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
