"""The paths that pass through, and how the body of each is to be read.

Everything that vLLM 0.32 serves to clients is here. What steers an engine (sleep, pause, adapters,
`collective_rpc`, weights) is not: a router in front must not be a way around its operator. Neither
is `/v1/realtime`, which is a web socket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum, auto

from proxy.core.model.refusals import wrong_method
from proxy.core.model.types import Reason, Refusal


class PromptFields(IntEnum):
    """Where a body keeps its prompt."""

    CHAT = auto()  # `messages`, with `system` and `tools` beside them
    CHATS = auto()  # a list of conversations
    PROMPT = auto()  # `prompt`: text, token ids, or a list of either
    INPUT = auto()  # `input`, the same, or `messages`
    RESPONSE = auto()  # `input`: text or items, with `instructions`
    TOKENS = auto()  # `token_ids`
    PAIRS = auto()  # one side's texts against the other's
    STATE = auto()  # any JSON at all
    FORM = auto()  # multipart: a file and fields
    OPAQUE = auto()  # costs an engine next to nothing
    EMPTY = auto()  # no body: the path says all


@dataclass(frozen=True, slots=True)
class Route:
    """One path."""

    name: str  # bounded, for metrics
    shape: PromptFields
    method: str = "POST"
    generates: bool = False  # whether it decodes
    truncates: bool = False  # whether it cuts long prompts off unasked
    response_id: str = ""  # of a stored response, from the path


def _named(path: str) -> str:
    return path.removeprefix("/v1/").removeprefix("/")


def _post(shape: PromptFields, *paths: str, generates: bool = False) -> dict[str, Route]:
    return {path: Route(_named(path), shape, generates=generates) for path in paths}


ROUTES: dict[str, Route] = {
    **_post(
        PromptFields.CHAT, "/v1/chat/completions", "/v1/messages", "/cohere/v2/chat", generates=True
    ),
    **_post(PromptFields.CHATS, "/v1/chat/completions/batch", generates=True),
    **_post(PromptFields.PROMPT, "/v1/completions", generates=True),
    **_post(PromptFields.RESPONSE, "/v1/responses", generates=True),
    **_post(PromptFields.TOKENS, "/inference/v1/generate", generates=True),
    **_post(PromptFields.STATE, "/v1/systemone"),
    **_post(PromptFields.INPUT, "/v1/embeddings", "/pooling", "/classify"),
    "/v2/embed": Route("v2/embed", PromptFields.INPUT, truncates=True),
    **_post(PromptFields.PAIRS, "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    **_post(PromptFields.PAIRS, "/generative_scoring"),
    **_post(
        PromptFields.FORM, "/v1/audio/transcriptions", "/v1/audio/translations", generates=True
    ),
    **_post(PromptFields.OPAQUE, "/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    **_post(
        PromptFields.OPAQUE,
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/messages/render",
        "/v1/responses/render",
        "/cohere/v2/chat/render",
    ),
}
RESPONSES = "/v1/responses/"
# No dot in front and no escapes: the path goes on to a worker as it is, and `..` would lead
# elsewhere. Within, those of hand-overs by P2P NCCL have addresses.
ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,199}")
GET_RESPONSE = Route("responses/id", PromptFields.EMPTY, method="GET")
CANCEL_RESPONSE = Route("responses/cancel", PromptFields.EMPTY)


def find(method: str, path: str) -> Route | Refusal:
    """Name the route of a request, or say 404 for its path or 405 for its method."""
    route = ROUTES.get(path) or _stored(path)
    if route is None:
        return Refusal(404, Reason.UNKNOWN_PATH, f"no such path: {path[:200]}")
    if method != route.method:
        return wrong_method(path, method, (route.method,))
    return route


def _stored(path: str) -> Route | None:
    """Read `/v1/responses/{id}` and `/v1/responses/{id}/cancel`."""
    if not path.startswith(RESPONSES):
        return None
    response_id, slash, action = path.removeprefix(RESPONSES).partition("/")
    if not ID.fullmatch(response_id) or (slash and action != "cancel"):
        return None
    return replace(CANCEL_RESPONSE if action else GET_RESPONSE, response_id=response_id)
