"""Requests that the real engine serves as a whole, and again from the middle of their output."""

from __future__ import annotations

import random
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.one_engine import exchange_scheduler, prompt_of
from tests.engine.served import StepClock

OUTPUT_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["city", "numbers"],
    "additionalProperties": False,
}
# Greedy requests with these parameters continue exactly.
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "minimum": {"min_tokens": 30, "ignore_eos": False},
    "stop string": {"stop": ["a", "e"], "min_tokens": 25},
    "words": {"bad_words": ["the"]},
    "grammar": {
        "structured_outputs": {"regex": "(one|two|three)( (four|five|six|seven)){12}"},
        "ignore_eos": False,
    },
    "json": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 400},
}
# These do not.
INEXACT: dict[str, dict[str, Any]] = {"frequency penalty": {"frequency_penalty": 2.0}}


def serve_in_two_parts(engine: LLMEngine) -> dict[str, list[tuple[Any, Any]]]:
    """Return each response as a whole, and as continued after a random number of tokens."""
    exchange_scheduler(engine, {"long_prompt": {}}, StepClock())
    rng = random.Random(5)
    results: dict[str, list[tuple[Any, Any]]] = {}
    for name, parameters in (PARAMETERS | INEXACT).items():
        prompts = [prompt_of(size, rng) for size in (5, 31, 64, 300, 700)]
        wholes = _serve(engine, prompts, parameters, [[]] * len(prompts))
        parts = [tokens[: rng.randrange(1, len(tokens))] for tokens, _, _ in wholes]
        results[name] = list(zip(wholes, _serve(engine, prompts, parameters, parts), strict=True))
    return results


def _serve(
    engine: LLMEngine, prompts: list[list[int]], parameters: dict[str, Any], so_far: list[list[int]]
) -> list[tuple[list[int], str, str | None]]:
    for number, (prompt, tokens) in enumerate(zip(prompts, so_far, strict=True)):
        given = dict(parameters)
        if "structured_outputs" in given:  # vLLM notes its backend in them
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, **given},
            extra_args={"output_so_far": tokens} if tokens else None,
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    done = {}
    while engine.has_unfinished_requests():
        for result in engine.step():
            if result.finished:
                done[result.request_id] = result.outputs[0]
    found = [done[str(number)] for number in range(len(prompts))]
    return [(list(each.token_ids), each.text, each.finish_reason) for each in found]
