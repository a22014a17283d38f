"""Which requests another worker can continue exactly, and the body that it gets.

The worker computes the tokens so far as the end of the prompt, and returns them again. Fields that
depend on more than prompt and text are not continued; unknown fields neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from proxy.core.request.json_edit import edit_members

OUTPUT_SO_FAR = "output_so_far"
EXTRA_FIELD = "vllm_xargs"
# Fields that do not depend on how much of the output is there.
EXACT = frozenset((
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "user",
    "priority", "cache_salt", "metadata", "store", "service_tier", "prompt_cache_key",
    "safety_identifier", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "add_special_tokens", "continue_final_message", "documents", "truncate_prompt_tokens",
    "stream_interval",
    # The engine's grammars go on behind the output so far.
    "response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls",
    "output_config",
    # Of the prompt and the server's parsers, which see the whole output again.
    "reasoning_effort", "include_reasoning", "thinking_token_budget",
    # Of `/v1/messages`; vLLM ignores the last one.
    "system", "stop_sequences", "thinking", "context_management",
))  # fmt: skip
# Fields that are continued with these values only.
EXACT_VALUES: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,),
    "use_beam_search": (False,), "return_token_ids": (False,),
}  # fmt: skip
# Why a stream was not continued, as in metrics and in the response to a drain.
REASONS = NO_TOKENS, OTHER_OUTPUT, TORN, FIELD, NO_WORKER, DIFFERS = (
    "no_tokens", "other_output", "torn", "field", "no_worker", "differs",
)  # fmt: skip
# Why a request stays on a drained worker, besides these.
NOT_KEPT, HANDOVER, PINNED, ENDS = "not_kept", "handover", "pinned", "ends"
WAITS = "waits"  # for its turn to move
# These do not change while the request runs.
LASTING = frozenset((OTHER_OUTPUT, FIELD, NOT_KEPT, HANDOVER, PINNED, ENDS))
SEED, TEMPERATURE = "seed", "temperature"


def why_not_continued(body: bytes) -> str:
    """Return the field that prevents a continuation; empty if none does."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "body"
    if not isinstance(fields, dict):
        return "body"
    for name, value in fields.items():
        if name in EXACT or value is None or value in EXACT_VALUES.get(name, ()):
            continue
        if name == SEED and fields.get(TEMPERATURE) == 0:
            continue
        return str(name)
    return ""


def is_greedy(body: bytes) -> bool:
    """Return whether a readable request is not sampled."""
    return bool(orjson.loads(body).get(TEMPERATURE) == 0)


def with_output(body: bytes, tokens: Sequence[int]) -> bytes:
    if not tokens:
        return body
    extra = orjson.dumps({OUTPUT_SO_FAR: list(tokens)})
    return edit_members(body, {EXTRA_FIELD: extra})
