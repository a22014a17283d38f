"""The endpoints that pass through to workers, and their facts.

One row per endpoint, or per group of endpoints with the same facts. A row states every fact: none
has a default. The facts are those of vLLM 0.32, whose client endpoints are all here. Endpoints that
control an engine (sleep, pause, adapters, `collective_rpc`, weights) are absent: clients must not
reach them. `/v1/realtime` is a web socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum, auto
from typing import Any


class PromptFields(IntEnum):
    """The place of the prompt in a body."""

    CHAT = auto()  # `messages`, with `system` and `tools`
    CHATS = auto()  # a list of conversations
    PROMPT = auto()  # `prompt`: text, token ids, or a list
    INPUT = auto()  # `input`, the same, or `messages`
    RESPONSE = auto()  # `input`: text or items, with `instructions`
    TOKENS = auto()  # `token_ids`
    PAIRS = auto()  # the texts of one side against those of the other
    STATE = auto()  # any JSON
    FORM = auto()  # multipart: a file and fields
    OPAQUE = auto()  # costs an engine next to nothing
    EMPTY = auto()  # no body


class ErrorFormat(StrEnum):
    """The API that defines an endpoint's errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    COHERE = "cohere"


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint."""

    name: str  # in metrics and logs
    shape: PromptFields
    method: str
    error_format: ErrorFormat
    prompt_param: str  # the member that an error about a long prompt names
    output_limits: tuple[str, ...]  # the members that limit the output
    generates: bool  # the engine decodes for it
    truncates: bool  # cuts long prompts off unasked
    truncates_if_asked: bool  # heeds `truncate_prompt_tokens`
    takes_any_limit: bool  # an output limit above the context is no error
    countable: bool  # a worker's /tokenize understands its body
    takes_priority: bool  # its body may have `priority`
    takes_arguments: bool  # its body may have `vllm_xargs`
    salted: bool  # its body may have `cache_salt`
    usage_by_option: bool  # its streams have usage only if `stream_options` asks
    ends_with_done: bool  # its streams end with `data: [DONE]`
    begins_with_token: bool  # its streams begin with the first token
    may_be_split: bool  # takes KV transfer parameters, and returns them in one JSON object
    stores: bool  # its responses may be requested again by id
    continues: bool  # another worker can continue its streams
    continues_by_text: bool  # also without their tokens
    response_id: str = ""  # of a stored response: part of the path


def _rows(*paths: str, method: str = "POST", **facts: Any) -> dict[str, Route]:
    """Return a row for each path; a missing fact is a `TypeError` at import."""
    return {
        path: Route(path.removeprefix("/v1/").removeprefix("/"), method=method, **facts)
        for path in paths
    }


OPENAI, ANTHROPIC, COHERE = ErrorFormat.OPENAI, ErrorFormat.ANTHROPIC, ErrorFormat.COHERE

# fmt: off
# Of endpoints that neither compute nor store.
NO_FACTS: dict[str, Any] = {
    "output_limits": (), "generates": False, "truncates": False, "truncates_if_asked": False,
    "takes_any_limit": False, "countable": False, "takes_priority": False,
    "takes_arguments": False, "salted": False, "usage_by_option": False, "ends_with_done": False,
    "begins_with_token": False,
    "may_be_split": False, "stores": False, "continues": False, "continues_by_text": False,
}
# Of endpoints that compute a prompt and generate nothing.
COMPUTING: dict[str, Any] = NO_FACTS | {"takes_priority": True, "salted": True}
ROUTES: dict[str, Route] = {
    **_rows(
        "/v1/chat/completions", shape=PromptFields.CHAT, error_format=OPENAI,
        prompt_param="messages", output_limits=("max_tokens", "max_completion_tokens"),
        generates=True, truncates=False, truncates_if_asked=True, takes_any_limit=False,
        countable=True, takes_priority=True, takes_arguments=True, salted=True,
        usage_by_option=True,
        ends_with_done=True, begins_with_token=True,
        may_be_split=True, stores=False, continues=True, continues_by_text=True,
    ),
    **_rows(
        "/v1/chat/completions/batch", shape=PromptFields.CHATS, error_format=OPENAI,
        prompt_param="messages", output_limits=(),
        generates=True, truncates=False, truncates_if_asked=True, takes_any_limit=False,
        countable=False, takes_priority=True, takes_arguments=False, salted=True,
        usage_by_option=False,
        ends_with_done=False, begins_with_token=False,
        may_be_split=False, stores=False, continues=False, continues_by_text=False,
    ),
    **_rows(
        "/v1/messages", shape=PromptFields.CHAT, error_format=ANTHROPIC,
        prompt_param="messages", output_limits=("max_tokens",),
        generates=True, truncates=False, truncates_if_asked=False, takes_any_limit=False,
        countable=False, takes_priority=False, takes_arguments=True, salted=True,
        usage_by_option=False,
        ends_with_done=False, begins_with_token=False,
        may_be_split=True, stores=False, continues=True, continues_by_text=False,
    ),
    **_rows(
        "/cohere/v2/chat", shape=PromptFields.CHAT, error_format=COHERE,
        prompt_param="messages", output_limits=("max_tokens",),
        generates=True, truncates=False, truncates_if_asked=False, takes_any_limit=False,
        countable=False, takes_priority=True, takes_arguments=False, salted=False,
        usage_by_option=False,
        ends_with_done=True, begins_with_token=False,
        may_be_split=True, stores=False, continues=False, continues_by_text=False,
    ),
    **_rows(
        "/v1/completions", shape=PromptFields.PROMPT, error_format=OPENAI,
        prompt_param="prompt", output_limits=("max_tokens",),
        generates=True, truncates=False, truncates_if_asked=True, takes_any_limit=False,
        countable=True, takes_priority=True, takes_arguments=True, salted=True,
        usage_by_option=True,
        ends_with_done=True, begins_with_token=True,
        may_be_split=True, stores=False, continues=True, continues_by_text=True,
    ),
    **_rows(
        "/v1/responses", shape=PromptFields.RESPONSE, error_format=OPENAI,
        prompt_param="input", output_limits=("max_output_tokens",),
        generates=True, truncates=False, truncates_if_asked=False, takes_any_limit=False,
        countable=False, takes_priority=True, takes_arguments=True, salted=True,
        usage_by_option=False,
        ends_with_done=False, begins_with_token=False,
        may_be_split=True, stores=True, continues=False, continues_by_text=False,
    ),
    **_rows(
        # Its output limit lies inside `sampling_params`, so it is never split.
        "/inference/v1/generate", shape=PromptFields.TOKENS, error_format=OPENAI,
        prompt_param="token_ids", output_limits=(),
        generates=True, truncates=False, truncates_if_asked=False, takes_any_limit=True,
        countable=False, takes_priority=True, takes_arguments=False, salted=True,
        usage_by_option=True,
        ends_with_done=True, begins_with_token=True,
        may_be_split=False, stores=False, continues=False, continues_by_text=False,
    ),
    **_rows(
        "/v1/systemone", shape=PromptFields.STATE, error_format=OPENAI, prompt_param="state",
        **COMPUTING,
    ),
    **_rows(
        "/v1/embeddings", "/pooling", "/classify", shape=PromptFields.INPUT, error_format=OPENAI,
        prompt_param="input", **COMPUTING | {"truncates_if_asked": True},
    ),
    **_rows(
        "/v2/embed", shape=PromptFields.INPUT, error_format=OPENAI, prompt_param="texts",
        **COMPUTING | {"truncates": True, "salted": False},
    ),
    **_rows(
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        shape=PromptFields.PAIRS, error_format=OPENAI, prompt_param="documents",
        **COMPUTING | {"truncates_if_asked": True},
    ),
    **_rows(
        "/generative_scoring", shape=PromptFields.PAIRS, error_format=OPENAI,
        prompt_param="items", **COMPUTING,
    ),
    **_rows(
        "/v1/audio/transcriptions", "/v1/audio/translations",
        shape=PromptFields.FORM, error_format=OPENAI,
        prompt_param="prompt", output_limits=(),
        generates=True, truncates=False, truncates_if_asked=False, takes_any_limit=True,
        countable=False, takes_priority=False, takes_arguments=False, salted=False,
        usage_by_option=False,
        ends_with_done=True, begins_with_token=False,
        may_be_split=False, stores=False, continues=False, continues_by_text=False,
    ),
    **_rows(
        "/v1/chat/completions/render", "/v1/chat/completions/derender",
        shape=PromptFields.OPAQUE, error_format=OPENAI,
        prompt_param="messages", **NO_FACTS,
    ),
    **_rows(
        "/tokenize", "/detokenize", "/v1/completions/render", "/v1/completions/derender",
        "/v1/responses/render",
        shape=PromptFields.OPAQUE, error_format=OPENAI,
        prompt_param="prompt", **NO_FACTS,
    ),
    **_rows(
        "/v1/messages/count_tokens", "/v1/messages/render",
        shape=PromptFields.OPAQUE, error_format=ANTHROPIC,
        prompt_param="messages", **NO_FACTS,
    ),
    **_rows(
        "/cohere/v2/chat/render", shape=PromptFields.OPAQUE, error_format=COHERE,
        prompt_param="prompt", **NO_FACTS,
    ),
}
# Of a stored response: `/v1/responses/{id}` and `/v1/responses/{id}/cancel`.
STORED: dict[str, Route] = {
    **_rows(
        "responses/id", method="GET", shape=PromptFields.EMPTY, error_format=OPENAI,
        prompt_param="prompt", **NO_FACTS,
    ),
    **_rows(
        "responses/cancel", shape=PromptFields.EMPTY, error_format=OPENAI,
        prompt_param="prompt", **NO_FACTS,
    ),
}
# Endpoints that the router serves itself.
OWN: dict[str, Route] = {
    **_rows(
        "files", "batches", shape=PromptFields.OPAQUE, error_format=OPENAI,
        prompt_param="prompt", **NO_FACTS,
    ),
}
# fmt: on
GET_RESPONSE, CANCEL_RESPONSE = STORED["responses/id"], STORED["responses/cancel"]
BY_NAME = {route.name: route for route in (*ROUTES.values(), *STORED.values(), *OWN.values())}


def route_names(has_fact: Callable[[Route], bool]) -> frozenset[str]:
    return frozenset(name for name, route in BY_NAME.items() if has_fact(route))
