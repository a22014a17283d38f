"""Routes of the status page and its server-sent events, behind the admin API's access check.

With a key, a browser asks for the key once and also sends it with the events.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from functools import cache
from http import HTTPStatus
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from proxy.admin.errors import AdminError
from proxy.status_page.live import MAX_VIEWERS, LiveView, Viewer

INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
PAGE_PATHS = ("/", "/status")
EVENTS_PATH = "/admin/live"
ALLOWED_SITES = ("same-origin", "none")
NONE = "'none'"


def page_routes(live: LiveView) -> APIRouter:
    api = APIRouter()

    @api.get(PAGE_PATHS[0], include_in_schema=False)
    @api.get(PAGE_PATHS[1], include_in_schema=False)
    async def page() -> Response:
        text, headers = page_file()
        return HTMLResponse(text, headers=headers)

    @api.get(
        EVENTS_PATH, summary="Stream the last minute as server-sent events", tags=["decisions"]
    )
    async def events(request: Request) -> Response:
        # An image on another site's page sends no Origin, and would use up a viewer's place.
        if request.headers.get("sec-fetch-site", ALLOWED_SITES[0]) not in ALLOWED_SITES:
            message = "only the status page may read the events"
            raise AdminError(HTTPStatus.FORBIDDEN, "forbidden", message)
        if (viewer := live.join()) is None:
            message = f"{MAX_VIEWERS} status pages are already open; close one"
            raise AdminError(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_viewers", message)
        # The server closes the connection of a viewer that does not read.
        return StreamingResponse(
            messages(live, viewer),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return api


@cache
def page_file() -> tuple[str, dict[str, str]]:
    text = (resources.files("proxy.status_page") / "status.html").read_text("utf-8")
    return text, page_headers(text)


def page_headers(text: str) -> dict[str, str]:
    """Return headers that restrict a page to its own script and style, and to this server."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, inner in INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    policy = [
        "default-src 'none'",
        *(f"{kind}-src {' '.join(hashes) or NONE}" for kind, hashes in allowed.items()),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


async def messages(live: LiveView, viewer: Viewer) -> AsyncIterator[bytes]:
    """Yield a viewer's messages until it leaves or the router stops."""
    try:
        while (message := await viewer.get()) is not None:
            yield message
    finally:
        live.leave(viewer)
