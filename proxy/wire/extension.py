"""Who may stand beside the data path: a desk that answers some paths, requests of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxy.core.model.types import Reason, Refusal

if TYPE_CHECKING:
    from proxy.core.model.route_table import Route
    from proxy.http.request import Request, RequestHead


# What a desk answers, by the first part of its paths and the names of its routes.
PATHS = ("/v1/files/", "/v1/batches/")
ROUTES = frozenset(["files", "batches"])


def absent(head: RequestHead) -> Refusal | None:
    """Say why a path is not answered that a router with a desk would answer."""
    if not f"{head.path}/".startswith(PATHS):
        return None
    message = "Batches are off on this router: its operator turns them on with router.batches.path."
    return Refusal(404, Reason.UNKNOWN_PATH, message, "batches_off")


class Recipient(Protocol):
    """Who gets an answer. After `done` or `break_off` there comes no more of it."""

    def write(self, data: bytes, /) -> None:
        """Take a piece of the answer, head and framing included."""

    def done(self, now: float, *, keep_alive: bool) -> None:
        """Hear that the answer is whole."""

    def break_off(self) -> None:
        """Hear that it can't be completed."""


class Conversation(Protocol):
    """One request and its answer, as a client's connection sees them."""

    def start(self, now: float) -> None:
        """Begin."""

    def pause(self) -> None:
        """Write no more for now."""

    def resume(self, now: float) -> None:
        """Go on."""

    def gone(self, now: float) -> None:
        """Hear that nobody wants the answer any more."""

    def cut(self, now: float) -> None:
        """End it, because the router does."""


class Client(Recipient, Protocol):
    """A recipient that may not keep up."""

    writable: bool


class Extension(Protocol):
    """Answers some paths itself."""

    def find(self, head: RequestHead) -> Route | Refusal | None:
        """Name the route of a request; None if it is none of the desk's."""

    def begin(self, client: Client, request: Request) -> Conversation:
        """Answer a request for one of the desk's routes."""
