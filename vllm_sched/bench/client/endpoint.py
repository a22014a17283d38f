"""Learn what a benchmark needs to know of an endpoint: model, limits and tokens per word."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vllm_sched.bench.client.events import EventStream
from vllm_sched.bench.client.text import Measure, Texts
from vllm_sched.bench.client.wire import COMPLETIONS, Address, Wire, WireError, excerpt
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import VllmSchedError

CHAT: Final = "/v1/chat/completions"
MODELS: Final = "/v1/models"
CONNECT_S: Final = 5.0
LIST_S: Final = 10.0  # for the list of models, which needs no engine
PROBE_TIMEOUT_S: Final = 60.0  # for a small request: the engine may compile
# The lengths of two probe texts for a linear fit; the second is shorter for a small model.
PROBE_WORDS: Final = (40, 1040)
MIN_PROBE_WORDS: Final = 80
NO_LIST_STATUSES: Final = ("HTTP 404", "HTTP 405", "HTTP 501")
STATUS_PATTERN: Final = re.compile(r"HTTP (\d+)")
NO_IGNORE_EOS: Final = (
    "the endpoint does not support ignore_eos: the model decides when a response ends"
)
NO_COUNT: Final = (
    "the endpoint returns no token counts, neither from /tokenize nor as usage: each word of a "
    "prompt counts as a token"
)
SAME_COUNT: Final = (
    "the endpoint returns the same token count for a long and a short prompt: each word of a "
    "prompt counts as a token"
)


class EndpointError(VllmSchedError):
    """The endpoint can't be measured."""


@dataclass(frozen=True)
class EndpointOptions:
    url: str
    model: str = ""
    path: str = COMPLETIONS
    key: str = field(default="", repr=False)
    ignore_eos: bool = True
    explain: bool = False  # ask a router where each request went


@dataclass(frozen=True)
class Endpoint:
    """An endpoint that responds, and how to write requests for it."""

    address: Address
    path: str
    model: str
    measure: Measure = field(default_factory=Measure)
    max_model_len: int | None = None
    ignore_eos: bool = True
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    doubts: tuple[str, ...] = ()  # warnings on the figures

    def wire(self, connect_s: float | None = None) -> Wire:
        """Return an HTTP client; it connects on demand."""
        return Wire(self.address, dict(self.headers), connect_s)

    def body(self, prompt: str, output_tokens: int, tenant: str = "") -> bytes:
        """Return a request body; the prompt's words contain nothing to escape."""
        if self.path == CHAT:
            text = f'"messages":[{{"role":"user","content":"{prompt}"}}]'
        else:
            text = f'"prompt":"{prompt}"'
        return self.body_of(text, output_tokens, tenant)

    def body_of(self, text: str, output_tokens: int, tenant: str = "") -> bytes:
        fields = [
            f'{{"model":{json.dumps(self.model)}',
            text,
            f'"max_{"completion_" if self.path == CHAT else ""}tokens":{output_tokens}',
            '"temperature":0,"stream":true,"stream_options":{"include_usage":true}',
        ]
        if self.ignore_eos:
            fields.append('"ignore_eos":true')
        if tenant:
            fields.append(f'"user":{json.dumps(tenant)}')
        return (",".join(fields) + "}").encode()

    def request_body(self, texts: Texts, number: int, request: Request) -> bytes:
        prompt = texts.prompt(number, request, self.measure)
        return self.body(prompt, request.output_tokens, request.tenant)


async def probe_endpoint(options: EndpointOptions) -> Endpoint:
    """Return the endpoint with all that a load needs; raise `EndpointError` if it can't be used."""
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    if options.explain:
        headers["X-Explain"] = "1"
    address = Address.parse(options.url)
    endpoint = Endpoint(
        address,
        options.path,
        options.model,
        ignore_eos=options.ignore_eos,
        headers=(*headers.items(),),
    )
    wire = endpoint.wire(CONNECT_S)
    try:
        endpoint = await _with_model(endpoint, wire)
        endpoint = await _check_streaming(endpoint, wire)
        measure, doubt = await _measure(endpoint, wire)
    except WireError as error:
        words = str(error).removeprefix(f"{address}: ")
        raise EndpointError(f"{address}: {words}{_remedy(options, address, words)}") from None
    finally:
        wire.close()
    doubts = [NO_IGNORE_EOS] * (options.ignore_eos and not endpoint.ignore_eos)
    doubts += [doubt] * bool(doubt)
    return replace(endpoint, measure=measure, doubts=tuple(doubts))


def _remedy(options: EndpointOptions, address: Address, words: str) -> str:
    """Return what to do about an error; empty if unknown."""
    refused = STATUS_PATTERN.search(words)
    match refused and int(refused[1]):
        case 401 | 403 if options.key:
            return "; it rejects this key (--api-key, or OPENAI_API_KEY)"
        case 401 | 403:
            return "; give its key with --api-key, or in OPENAI_API_KEY"
        case 404 | 405 | 501 if words.startswith(MODELS):
            return "; is this an OpenAI endpoint? With --model NAME no model list is needed"
        case 404 | 405 if "model" not in words:
            other = COMPLETIONS if options.path == CHAT else CHAT
            return f"; if it has {other} instead, use --endpoint {other}"
        case None if "no answer" in words and not address.tls:
            return "; if it uses TLS, write https://"
    return ""


async def _with_model(endpoint: Endpoint, wire: Wire) -> Endpoint:
    try:
        served = json.loads(await wire.get(MODELS, LIST_S))["data"]
        models: dict[str, Any] = {model["id"]: model for model in served}
    except WireError as error:
        if endpoint.model and str(error).startswith(NO_LIST_STATUSES):
            return endpoint  # no model list: try the given model
        raise _with_path(MODELS, error) from None
    except (ValueError, KeyError, TypeError):
        raise EndpointError(
            f"{endpoint.address}{MODELS}: is not a list of models; is this an OpenAI endpoint?"
        ) from None
    if not models:
        raise EndpointError(f"{endpoint.address} serves no model yet; wait until it is ready")
    name = endpoint.model or next(iter(models))
    if name not in models:
        raise EndpointError(
            f"--model {name}: {endpoint.address} does not serve it; choose from {', '.join(models)}"
        )
    limit = models[name].get("max_model_len")
    return replace(endpoint, model=name, max_model_len=limit if isinstance(limit, int) else None)


def _with_path(path: str, error: WireError) -> WireError:
    return WireError(f"{path}: {error}") if STATUS_PATTERN.match(str(error)) else error


async def _check_streaming(endpoint: Endpoint, wire: Wire) -> Endpoint:
    """Check that the endpoint streams, and whether it supports vLLM's `ignore_eos`."""
    try:
        await _usage(endpoint, wire, "good day")
    except WireError as error:
        if not (endpoint.ignore_eos and "HTTP 4" in str(error) and "ignore_eos" in str(error)):
            raise
        endpoint = replace(endpoint, ignore_eos=False)
        await _usage(endpoint, wire, "good day")
    return endpoint


async def _measure(endpoint: Endpoint, wire: Wire) -> tuple[Measure, str]:
    """Return tokens per word, from `/tokenize` or from the usage of two requests, and a warning.

    The warning is for endpoints without usable token counts.
    """
    texts = Texts(-1)
    words, many_words = PROBE_WORDS
    few = await _tokens(endpoint, wire, texts.text("few", words))
    if not few:
        return Measure(), NO_COUNT
    if endpoint.max_model_len is not None:
        many_words = min(
            many_words, max(MIN_PROBE_WORDS, int(words * endpoint.max_model_len / few / 2))
        )
    many = await _tokens(endpoint, wire, texts.text("many", many_words))
    if many <= few:
        return Measure(), SAME_COUNT
    per_word = (many - few) / (many_words - words)
    return Measure(per_word, max(0.0, few - words * per_word)), ""


async def _tokens(endpoint: Endpoint, wire: Wire, text: str) -> int:
    chat = {"messages": [{"role": "user", "content": text}]}
    question = {"model": endpoint.model} | (chat if endpoint.path == CHAT else {"prompt": text})
    try:
        response = await wire.post("/tokenize", json.dumps(question).encode(), PROBE_TIMEOUT_S)
        count = json.loads(response)["count"]
        if isinstance(count, int):
            return count
    except (WireError, ValueError, KeyError, TypeError):
        pass  # not every endpoint has /tokenize
    return await _usage(endpoint, wire, text)


async def _usage(endpoint: Endpoint, wire: Wire, text: str) -> int:
    outcome = Outcome(0.0, "probe", 0, 1)
    stream = EventStream(outcome)
    try:
        await wire.stream(
            endpoint.path,
            endpoint.body(text, 1),
            lambda piece: stream.feed(piece, 0.0),
            PROBE_TIMEOUT_S,
        )
    except WireError as error:
        raise _with_path(endpoint.path, error) from None
    if outcome.error:
        raise WireError(f"returned an error for a small request: {excerpt(outcome.error)}")
    if not stream.done:
        raise WireError(f"{endpoint.path} does not stream: a small request got no data: [DONE]")
    return outcome.prompt_tokens
