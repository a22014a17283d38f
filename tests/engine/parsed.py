"""Streams of vLLM's server, with its parsers of reasoning and tool calls, without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import __version__
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.parser_manager import ParserManager

PROPERTIES = {"city": {"type": "string"}, "n": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("get", "put")
]
REASONING = 'Hm, the "city".\nOslo.'
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
HERMES = (
    '<tool_call>\n{"name": "get", "arguments": {"city": "Os\\"lo", "n": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {"city": "Rome"}}\n</tool_call>'
)
ONE_XML = (
    "<tool_call>\n<function=get>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
)
XML = f"{ONE_XML}\n<tool_call>\n<function=put>\n</function>\n</tool_call>"
GLM = (
    "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
    "<tool_call>put\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
SEED_MARKERS = "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"
GLM_MARKERS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI_MARKERS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.put:1'
    '<|tool_call_argument_begin|>{"n": 3}<|tool_call_end|><|tool_calls_section_end|>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
    '<invoke name="put">\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
BAR, SPACE = "\uff5c", "\u2581"  # in the markers of DeepSeek
DSML = f"{BAR}DSML{BAR}"
DEEPSEEK = (
    f'<{DSML}tool_calls>\n<{DSML}invoke name="get">\n'
    f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n</{DSML}invoke>\n'
    f'<{DSML}invoke name="put">\n<{DSML}parameter name="n" string="false">3</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}tool_calls>"
)
CALLS, END_CALLS, V3_CALL, END_V3_CALL, NAME = (
    f"<{BAR}{name}{BAR}>".replace(" ", SPACE)
    for name in (
        "tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep",
    )
)  # fmt: skip
DEEPSEEK_V3 = (
    f'{CALLS}{V3_CALL}function{NAME}get\n```json\n{{"city": "Oslo"}}\n```{END_V3_CALL}{END_CALLS}'
)


@dataclass(frozen=True)
class Model:
    """What a server with these parsers gets from its engine."""

    tool_parser: str | None
    reasoning_parser: str | None
    markers: tuple[str, ...]
    prompt: str
    output: str

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer of bytes and the markers."""
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(
            models.BPE(vocab={each: number for number, each in enumerate(letters)}, merges=[])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in self.markers])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    @cached_property
    def tokens(self) -> list[tuple[str, int]]:
        """The output's tokens and their texts."""
        found, text = [], ""
        ids = self.ids(self.output)
        for number, token in enumerate(ids, 1):
            now = self.tokenizer.decode(ids[:number], clean_up_tokenization_spaces=False)
            now = text if now.endswith("\ufffd") else now
            found.append((now[len(text) :], token))
            text = now
        return found

    async def stream(self, at_once: int, *, messages: bool) -> list[tuple[int, bytes]]:
        """Return the events of a server that gets so many tokens at once, then one by one.

        Each has the number of tokens that the server had by then.
        """
        fields: dict[str, Any] = {}
        if self.tool_parser:
            fields = {"tools": TOOLS, "tool_choice": "auto"}
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": messages},
            **fields,
        )
        server: Any = object.__new__(AnthropicServingMessages if messages else OpenAIServingChat)
        server.__dict__ |= SERVER | {"enable_auto_tools": bool(self.tool_parser)}
        server.parser_cls = ParserManager.get_parser(
            self.tool_parser, self.reasoning_parser, enable_auto_tools=bool(self.tool_parser)
        )
        parser = server._make_parser(request, self.tokenizer, {})
        read = [0]
        stream = server.chat_completion_stream_generator(
            parser.adjust_request(request), self._results(at_once, read),
            "c", "m", [], self.tokenizer, RequestMetadata(), {},
        )  # fmt: skip
        if messages and "chat_completion_stream_generator" not in vars(AnthropicServingMessages):
            stream = server.message_stream_converter(stream)  # vLLM 0.33 does it already
        return [(read[0], event.encode()) async for event in stream]

    async def _results(self, at_once: int, read: list[int]) -> AsyncIterator[RequestOutput]:
        tokens = self.tokens
        for piece in (tokens[:at_once], *([token] for token in tokens[at_once:])):
            read[0] += len(piece)
            ended = read[0] == len(tokens)
            yield result(self.ids(self.prompt), piece, "stop" if ended else None)


class RequestMetadata:
    """Where the server puts the usage."""

    final_usage_info: Any = None


# The state of a server that its streams read.
SERVER = {
    "response_role": "assistant", "model_config": None, "enable_force_include_usage": False,
    "enable_prompt_tokens_details": False, "enable_log_outputs": False, "request_logger": None,
    "enable_per_request_metrics": False, "system_fingerprint": None,
    "_include_reasoning_tokens_details": False,
    # Of vLLM 0.31.
    "stop_reason_map": {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
}  # fmt: skip


def result(
    prompt: list[int], piece: Sequence[tuple[str, int]], reason: str | None
) -> RequestOutput:
    text, ids = "".join(text for text, _ in piece), [token for _, token in piece]
    output = CompletionOutput(
        index=0, text=text, token_ids=ids, cumulative_logprob=None, logprobs=None,
        finish_reason=reason,
    )  # fmt: skip
    return RequestOutput("c", None, prompt, None, [output], finished=reason is not None)


OPEN, THOUGHT = "hi<think>\n", f"{REASONING}</think>\n\nText.\n"
# Parsers whose output does not depend on how it is cut into pieces.
EXACT = {
    "hermes": Model("hermes", None, CALL, "hi", f"Let me look.\n{HERMES}"),
    "qwen3": Model(None, "qwen3", THINK + CALL, OPEN, f"{REASONING}</think>Text <b>"),
    "qwen3, hermes": Model("hermes", "qwen3", THINK + CALL, "hi", f"<think>{THOUGHT}{HERMES}"),
    "qwen3, qwen3_coder": Model("qwen3_coder", "qwen3", THINK + CALL, OPEN, f"{THOUGHT}{ONE_XML}"),
    "deepseek_r1, hermes": Model("hermes", "deepseek_r1", THINK + CALL, OPEN, f"{THOUGHT}{HERMES}"),
    "deepseek_v4": Model("deepseek_v4", "deepseek_v4", THINK, OPEN, f"{THOUGHT}\n{DEEPSEEK}"),
    "kimi_k2": Model("kimi_k2", "kimi_k2", THINK + KIMI_MARKERS, OPEN, f"{THOUGHT}{KIMI}"),
    "minimax_m2": Model(
        "minimax_m2",
        "minimax_m2",
        (*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        OPEN,
        f"{THOUGHT}{MINIMAX}",
    ),
}
# Of one version of vLLM; the others have other parsers of these names.
EXACT_HERE = {
    "mistral": Model(
        "mistral",
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        "hi",
        f'[THINK]{REASONING}[/THINK]Text.[TOOL_CALLS]get[ARGS]{{"city": "Oslo"}}',
    ),
    "gemma4": Model(
        "gemma4",
        "gemma4",
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        "hi",
        f'<|channel>thought\n{REASONING}<channel|>Text. <|tool_call>call:get{{city:<|"|>Oslo<|"|>}}'
        "<tool_call|><|tool_call>call:put{n:3}<tool_call|>",
    ),
    "seed_oss": Model(
        "seed_oss",
        "seed_oss",
        SEED_MARKERS,
        "hi",
        f"<seed:think>{REASONING}</seed:think>Text.\n<seed:tool_call>\n<function=get>\n"
        "<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
    ),
    "pythonic": Model("pythonic", None, (), "hi", "[get(city='Oslo', n=3), put(n=4)]"),
    "deepseek_v32": Model(
        "deepseek_v32", None, (), "hi", f"Text.\n\n{DEEPSEEK.replace('tool_', 'function_')}"
    ),
} | {
    name: Model(None, name, THINK, OPEN, THOUGHT) for name in ("nemotron_v3", "step3p5", "mimo")
}  # fmt: skip
# These return text between two calls with the text before the first one.
EXACT_CHATS = {
    "qwen3_coder": Model("qwen3_coder", None, CALL, "hi", f"Text.\n{XML}"),
    "glm45": Model("glm45", "glm45", THINK + CALL + GLM_MARKERS, OPEN, f"{THOUGHT}{GLM}"),
}
# These do not find a marker in the middle of a piece.
INEXACT = {
    "deepseek_r1": Model(None, "deepseek_r1", THINK, "hi", f"<think>{THOUGHT}"),
    "deepseek_v3": Model(
        "deepseek_v3",
        None,
        (CALLS, END_CALLS, V3_CALL, END_V3_CALL, NAME),
        "hi",
        f"Text.{DEEPSEEK_V3}",
    ),
}
# This one misreads a piece with a whole call and the beginning of another.
INEXACT_HERE = {
    "llama3_json": Model(
        "llama3_json",
        None,
        ("<|python_tag|>",),
        "hi",
        '{"name": "get", "parameters": {"city": "Oslo"}}; {"name": "put", "parameters": {"n": 3}}',
    )
}
if __version__.startswith("0.32."):
    EXACT |= EXACT_HERE
    INEXACT |= INEXACT_HERE
