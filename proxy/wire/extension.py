"""Protocols between the data path and an extension, such as the Batches API."""

from __future__ import annotations

from typing import Protocol

from proxy.core.model.route_table import OWN, Route
from proxy.core.model.types import Reason, Refusal
from proxy.http.request import Request, RequestHead

BATCH_PATHS = ("/v1/files/", "/v1/batches/")
BATCH_ROUTES = frozenset(OWN)


def refuse_disabled(head: RequestHead) -> Refusal | None:
    """Return the refusal of a batch path if batches are disabled."""
    if not f"{head.path}/".startswith(BATCH_PATHS):
        return None
    message = "Batches are disabled on this router. Set router.batches.path to enable them."
    return Refusal(404, Reason.UNKNOWN_PATH, message, "batches_off")


class Recipient(Protocol):
    """The recipient of a response; `end_response` or `break_off` is the last call."""

    def write(self, data: bytes, /) -> None:
        """Send a piece, including head and framing."""

    def end_response(self, now: float, *, keep_alive: bool) -> None:
        """End a complete response."""

    def break_off(self) -> None:
        """End an incomplete response."""


class Conversation(Protocol):
    """One request and its response."""

    def start(self, now: float) -> None: ...

    def pause(self) -> None:
        """Stop writing until `resume`."""

    def resume(self, now: float) -> None:
        """Write again."""

    def client_left(self, now: float) -> None: ...

    def end_for_shutdown(self, now: float) -> None:
        """End: the router stops."""


class Client(Recipient, Protocol):
    """A recipient that can be slow."""

    writable: bool


class Extension(Protocol):
    """An extension that serves some paths."""

    def find(self, head: RequestHead) -> Route | Refusal | None:
        """Return the route of a request; None if the path is not served."""

    def begin(self, client: Client, request: Request) -> Conversation:
        """Return the conversation for a request."""
