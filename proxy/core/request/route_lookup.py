"""Find a request's route."""

from __future__ import annotations

import re
from dataclasses import replace

from proxy.core.model.refusals import wrong_method
from proxy.core.model.route_table import CANCEL_RESPONSE, GET_RESPONSE, ROUTES, Route
from proxy.core.model.types import Reason, Refusal

RESPONSES = "/v1/responses/"
# No escapes, no leading dot: workers get the path unchanged.
ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}")


def find(method: str, path: str) -> Route | Refusal:
    route = ROUTES.get(path) or _find_stored_response(path)
    if route is None:
        return Refusal(404, Reason.UNKNOWN_PATH, f"no such path: {path[:200]}{_similar(path)}")
    if method != route.method:
        return wrong_method(path, method, (route.method,))
    return route


def _similar(path: str) -> str:
    """Return a hint for a base URL that lacks /v1, or has it twice."""
    for other in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        if other in ROUTES:
            return f"; {other} exists: check the client's base URL"
    return ""


def _find_stored_response(path: str) -> Route | None:
    if not path.startswith(RESPONSES):
        return None
    response_id, slash, action = path.removeprefix(RESPONSES).partition("/")
    if not ID.fullmatch(response_id) or (slash and action != "cancel"):
        return None
    return replace(CANCEL_RESPONSE if action else GET_RESPONSE, response_id=response_id)
