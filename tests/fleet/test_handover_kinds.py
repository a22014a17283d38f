"""Every kind of request, handed over or not, is answered as by one worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.config import FleetConfig
from tests.fleet.conftest import DECODE, PREFILL
from tests.fleet.test_handover import NEAR, Ends, handed_over, handing_over, listed
from tests.fleet.test_router import Router
from tests.fleet.test_worker import DEADLINE_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COHERE = "/v1/responses", "/v1/messages", "/cohere/v2/chat"
ABOVE = 64
# Longer than `ABOVE` by any estimate, and short enough for one step.
TEXT = "please tell me more about that and the other thing too. " * 13
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 4}},
            "required": ["town"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHAPE = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
ON: dict[str, Any] = {"ignore_eos": True}


class Kind(NamedTuple):
    """A kind of request, and the number of its legs; 0: refused."""

    path: str
    fields: dict[str, Any]
    legs: int = 2
    streams: bool = True  # vLLM accepts it as a stream


KINDS = {
    "stop": Kind(CHAT, {"max_tokens": 40, "stop": ["a", "e "]}),
    "stop, included": Kind(
        CHAT, {"max_tokens": 40, "stop": ["e"], "include_stop_str_in_output": True}
    ),
    "stop_token_ids": Kind(CHAT, {"max_tokens": 40, "stop_token_ids": [*range(20, 500, 20)]}),
    "seed": Kind(CHAT, {"max_tokens": 12, "temperature": 1.0, "seed": 7, **ON}),
    "logprobs": Kind(CHAT, {"max_tokens": 6, "logprobs": True, "top_logprobs": 3, **ON}),
    "logprobs of a completion": Kind(COMPLETIONS, {"max_tokens": 6, "logprobs": 3, **ON}),
    "json_schema": Kind(CHAT, {"max_tokens": 40, "response_format": SHAPE}),
    "json_object": Kind(CHAT, {"max_tokens": 8, "response_format": {"type": "json_object"}}),
    "regex": Kind(
        COMPLETIONS, {"max_tokens": 12, "structured_outputs": {"regex": "[ab]{3}[0-9]{4}"}}
    ),
    "tools, one of them": Kind(
        CHAT, {"max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
    ),
    "tools, this one": Kind(
        CHAT,
        {
            "max_tokens": 60,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "tools, if it likes": Kind(CHAT, {"max_tokens": 8, "tools": [TOOL], **ON}),
    "min_tokens": Kind(CHAT, {"max_tokens": 20, "min_tokens": 12}),
    "max_completion_tokens": Kind(CHAT, {"max_completion_tokens": 5, **ON}),
    "no limit": Kind(CHAT, {"stop_token_ids": [*range(20, 500, 20)]}),
    "no usage": Kind(CHAT, {"max_tokens": 5, "stream_options": None, **ON}),
    "usage all along": Kind(
        CHAT,
        {
            "max_tokens": 5,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **ON,
        },
    ),
    "penalties": Kind(
        CHAT, {"max_tokens": 12, "repetition_penalty": 1.3, "presence_penalty": 0.5, **ON}
    ),
    "logit_bias": Kind(CHAT, {"max_tokens": 8, "logit_bias": {"100": 3}, **ON}),
    "bad_words": Kind(CHAT, {"max_tokens": 8, "bad_words": ["the"], **ON}),
    "a beginning": Kind(
        CHAT,
        {"max_tokens": 5, "continue_final_message": True, "add_generation_prompt": False, **ON},
    ),
    "responses": Kind(RESPONSES, {"max_output_tokens": 8}),
    "messages": Kind(MESSAGES, {"max_tokens": 8}),
    "n": Kind(CHAT, {"max_tokens": 6, "n": 2, "temperature": 1.0, "seed": 7, **ON}, legs=1),
    "n, too many": Kind(CHAT, {"max_tokens": 6, "n": 2}, legs=0),  # of the same
    "best_of": Kind(COMPLETIONS, {"max_tokens": 5, "best_of": 2, **ON}, legs=1),
    "beams": Kind(
        COMPLETIONS, {"max_tokens": 4, "n": 2, "use_beam_search": True}, legs=1, streams=False
    ),
    "prompt_logprobs": Kind(
        COMPLETIONS, {"max_tokens": 3, "prompt_logprobs": 2, **ON}, legs=1, streams=False
    ),
    "prompt_logprobs of a chat": Kind(CHAT, {"max_tokens": 3, "prompt_logprobs": 0, **ON}, legs=1),
    "max_tokens: 1": Kind(CHAT, {"max_tokens": 1}, legs=1),
    "echo": Kind(COMPLETIONS, {"max_tokens": 5, "echo": True}, legs=1),
    "echo, logprobs": Kind(
        COMPLETIONS, {"max_tokens": 3, "echo": True, "logprobs": 1, **ON}, legs=1
    ),
    "truncated": Kind(COMPLETIONS, {"max_tokens": 5, "truncate_prompt_tokens": 200, **ON}, legs=1),
    "a list": Kind(COMPLETIONS, {"max_tokens": 5, **ON}, legs=1),
    "suffix": Kind(COMPLETIONS, {"max_tokens": 5, "suffix": "x"}, legs=0),
    "cohere": Kind(COHERE, {"max_tokens": 8}),
    "cohere, stopped": Kind(COHERE, {"max_tokens": 40, "stop_sequences": ["a", "e "]}),
    "cohere, thinking": Kind(COHERE, {"max_tokens": 8, "thinking": {"type": "disabled"}}),
    "cohere, one token": Kind(COHERE, {"max_tokens": 1}, legs=1),
}
# Fields that differ in each answer.
GENERATED_FIELDS = frozenset(
    ["id", "item_id", "response_id", "request_id", "created", "created_at", "completed_at"]
)
# Differs by the worker's settings.
OF_THE_WORKER = "system_fingerprint"
# Fields of a stream that are split over events.
PIECES = frozenset(["arguments", "content", "delta", "partial_json", "text"])


@pytest.fixture(scope="module")
def router(
    ends: Ends, fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """Run the router with both workers."""
    assert all(worker.is_healthy() for worker in ends.values())
    folder = tmp_path_factory.mktemp("kinds")
    with handing_over(folder, listed(fleet), above=ABOVE) as running:
        yield running


def body_of(name: str, *, stream: bool) -> dict[str, Any]:
    """Return the body of a request, with a unique beginning."""
    kind = KINDS[name]
    text = f"{name} {stream} {TEXT}"
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, **kind.fields}
    if kind.path in (CHAT, MESSAGES, COHERE):
        body["messages"] = [{"role": "user", "content": text}]
        if name == "a beginning":
            body["messages"].append({"role": "assistant", "content": "I think"})
    elif kind.path == RESPONSES:
        body["input"] = text
    else:
        body["prompt"] = [text, f"{text}x"] if name == "a list" else text
    if stream:
        body["stream"] = True
        if kind.path in (CHAT, COMPLETIONS):
            body.setdefault("stream_options", {"include_usage": True})
    else:
        body.pop("stream_options", None)
    return body


async def answer_of(url: str, name: str, *, stream: bool) -> tuple[int, Any]:
    """Send a request; return the status and the whole answer."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as web:
        answer = await web.post(KINDS[name].path, json=body_of(name, stream=stream))
    if stream and answer.status_code == 200:
        return 200, assembled(answer.text)
    return answer.status_code, plain(answer.json())


def assembled(text: str) -> Any:
    """Return a stream merged by event type, independent of how it was split."""
    whole: dict[str, Any] = {}
    for line in text.splitlines():
        if line == "data: [DONE]":
            whole[line] = whole.get(line, 0) + 1
        elif line.startswith("data: "):
            event = plain(json.loads(line.removeprefix("data: ")))
            event.pop("sequence_number", None)
            kind = event.get("type", "")
            whole[kind] = joined(whole.get(kind), event)
    return whole


def joined(whole: Any, piece: Any, name: str = "") -> Any:
    """Return a value merged with its next piece."""
    if whole is None or piece is None:
        return whole if piece is None else piece
    if type(piece) is dict:
        return {
            key: joined(whole.get(key), piece.get(key), key)
            for key in sorted(whole.keys() | piece.keys())
        }
    if type(piece) is list:
        numbered = {item["index"]: item for item in whole if type(item) is dict and "index" in item}
        for item in piece:
            if type(item) is dict and "index" in item:
                numbered[item["index"]] = joined(numbered.get(item["index"]), item)
        if numbered:
            return [item for _, item in sorted(numbered.items())]
        return [*whole, *piece]
    return whole + piece if type(piece) is str and name in PIECES else piece


def plain(value: Any) -> Any:
    """Return a value without generated fields."""
    if type(value) is dict:
        return {
            key: plain(item) if key != OF_THE_WORKER else item is not None
            for key, item in value.items()
            if key not in GENERATED_FIELDS
        }
    return [plain(item) for item in value] if type(value) is list else value


def near(one: Any, other: Any) -> bool:
    """Return whether two answers are equal, with logprobs within `NEAR`."""
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if type(one) is list:
        return len(one) == len(other) and all(map(near, one, other))
    return abs(one - other) < NEAR if type(one) is float else bool(one == other)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", KINDS)
async def test_each_kind_matches_the_prefill_worker_alone(
    router: Router, ends: Ends, name: str, stream: bool
) -> None:
    alone = ends[PREFILL].url
    # The worker has read the prompt before, so that the same tokens are cached each time.
    # Sequentially, because vLLM's CPU engine dies of a seed if a prompt takes two steps.
    await answer_of(alone, name, stream=stream)
    if KINDS[name].legs == 1:
        await answer_of(ends[DECODE].url, name, stream=stream)
    routed = await answer_of(router.url, name, stream=stream)
    legs = 2 if handed_over(router) == [True] else 1
    right = await answer_of(alone, name, stream=stream)
    assert near(routed, right), f"{routed}\n{right}"
    kind, (status, body) = KINDS[name], right
    refused = stream and not kind.streams
    assert (legs if status == 200 else 0) == (0 if refused else kind.legs)
    if kind.legs == 2 and kind.path in (CHAT, COMPLETIONS):
        usage = (body[""] if stream else body).get("usage")
        # Tokens that only the prefill worker had cached.
        assert (usage is None) == (stream and name == "no usage")
        assert usage is None or usage["prompt_tokens_details"]["cached_tokens"] > 0
    if kind.legs == 2 and kind.path == COHERE:
        usage = (body["message-end"]["delta"] if stream else body)["usage"]
        assert usage["cached_tokens"] > 0
