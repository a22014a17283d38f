"""Estimate a request's tokens without a tokenizer.

Idea: learn tokens per byte from `usage` and /tokenize with an error band (`bytes_per_token`),
output lengths, and tokens per medium (`media_tokens`). A new tenant starts with the tenants' common
rates (`tenant_prior`).

Cost: see these modules. How it fails: mixed languages widen the band, so workers count more
requests near a boundary. At first the band is half the estimate, or 128 template tokens for short
text.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from sys import maxsize
from typing import Any

from proxy.core.learned.bytes_per_token import MAX_BYTES_PER_TOKEN, MIN_BAND, LearnedSizes
from proxy.core.learned.media_tokens import KINDS, NONE, RequestMedia
from proxy.core.learned.tenant_prior import TenantPrior
from proxy.core.model.route_table import PromptFields, Route, route_names
from proxy.core.model.types import RequestInfo, Usage
from proxy.core.request.client_fields import is_true
from proxy.core.request.token_estimate import PromptExtent, measure, parse_count
from proxy.core.tenants.tenants import Tenant

TOKENS, PROMPT = PromptFields.TOKENS, PromptFields.PROMPT
RESPONSE = PromptFields.RESPONSE
TEMPLATED = frozenset([PromptFields.CHAT, PromptFields.CHATS, RESPONSE])
WORD_LENGTH_MARGIN = 2.0
COMPLETION_OUTPUT = 16  # vLLM's default for /v1/completions
OUTPUT_KEYS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
MAX_SAMPLES = 4096
# Models and routes with rates per tenant: the last used.
MAX_RATES_PER_TENANT = 32
MIN_SAMPLES_LEARNED = 50  # learn from every request up to this
# Other routes reject an output limit above the context.
ANY_LIMIT = route_names(lambda route: route.takes_any_limit)
CUT = "truncate_prompt_tokens"
# For responses, any other value truncates, null too.
TRUNCATION, WHOLE = "truncation", "disabled"


class Sizer:
    def __init__(self) -> None:
        self._priors: dict[tuple[str, str], TenantPrior] = defaultdict(TenantPrior)

    def prior(self, model: str, route: str) -> TenantPrior:
        """Return the tenants' common rates; bounded, as models are the fleet's."""
        return self._priors[model, route]

    def learnt(self, model: str, route: str, tenant: Tenant | None = None) -> LearnedSizes:
        """Return the rates for a model and route, of a tenant if there is one."""
        if tenant is None:
            return self._priors[model, route].base
        found = tenant.learnt.get((model, route))
        return found if found is not None else self._priors[model, route].median()

    def _learning_rates(self, ask: RequestInfo) -> LearnedSizes:
        tenant, prior = ask.tenant, self.prior(ask.model, ask.route)
        if tenant is None:
            return prior.base
        key, known = (ask.model, ask.route), tenant.learnt
        own = known.pop(key, None)
        if own is None:
            own = prior.new_sizes()
            if len(known) >= MAX_RATES_PER_TENANT:
                del known[next(iter(known))]
        known[key] = own
        prior.update(tenant.name, own)
        return own

    def estimate(
        self,
        route: Route,
        model: str,
        body: dict[str, Any],
        body_bytes: int,
        request_id: str,
        tenant: Tenant | None = None,
    ) -> RequestInfo:
        learnt = self.learnt(model, route.name, tenant)
        extent = measure(route.shape, body, learnt.media.tokens)
        prompt, error, largest, least = _prompt_size(route, extent, learnt)
        output, samples = _read_output_limit(route, body) if route.generates else (None, 1)
        # Positional for speed: this runs for every request.
        ask = RequestInfo(request_id, route.name, model, body_bytes, prompt, error, largest, output)
        ask.least_prompt = least
        ask.samples, ask.prompts = samples * extent.prompts, extent.prompts
        ask.text_bytes, ask.tool_bytes = extent.text, extent.tools
        ask.extra_tokens = extent.tokens
        ask.counted = not (extent.text or extent.guessed)
        ask.countable = extent.plain and route.countable
        ask.generates = route.generates
        if route.generates:
            usual = learnt.output
            ask.expected_output = int(usual if output is None or output > usual else output)
            ask.stream = is_true(body.get("stream"))
        if extent.guessed:
            ask.media = None if extent.cut else _media_to_learn(extent, learnt)
            ask.whole = "not_text"
        if extent.guessed or extent.cut:
            ask.text_bytes = 0
        if route.truncates or (body.get(CUT) is not None and route.truncates_if_asked):
            _apply_truncation(ask, parse_count(body.get(CUT)), extent.prompts)
        elif route.shape is RESPONSE and body.get(TRUNCATION, WHOLE) != WHOLE:
            _apply_truncation(ask, None, extent.prompts)
        return ask

    def apply_count(self, ask: RequestInfo, prompt_tokens: int) -> None:
        """Use a worker's token count, and learn from it."""
        self._learn_prompt(ask, self._learning_rates(ask), prompt_tokens)
        ask.prompt_tokens = ask.largest_prompt = ask.least_prompt = prompt_tokens
        ask.prompt_error, ask.most, ask.sure_prompt = 0, maxsize, -1
        ask.counted = True

    def learn(self, ask: RequestInfo, usage: Usage) -> None:
        own = self._learning_rates(ask)
        if not ask.counted:
            self._learn_prompt(ask, own, usage.prompt_tokens)
        _learn_output(ask, own, usage.completion_tokens)

    def learn_output(self, ask: RequestInfo, tokens: int) -> None:
        """Learn the output of all samples together."""
        _learn_output(ask, self._learning_rates(ask), tokens)

    def has_few_samples(self, ask: RequestInfo) -> bool:
        """Return whether a tenant has too few samples to skip any."""
        if ask.tenant is None:
            return False
        own = ask.tenant.learnt.get((ask.model, ask.route))
        return own is None or max(own.seen, own.outputs) < MIN_SAMPLES_LEARNED

    def _learn_prompt(self, ask: RequestInfo, own: LearnedSizes, prompt_tokens: int) -> None:
        if prompt_tokens <= 0 or ask.pinned:  # usage includes earlier turns
            return
        if ask.media is not None:
            own.media.learn(ask.media, prompt_tokens)
        elif ask.text_bytes:
            tools = ask.tool_bytes
            text, tokens = ask.text_bytes - tools, prompt_tokens - ask.extra_tokens
            own.learn_prompt(text, tokens, tools, ask.prompts)


def _prompt_size(
    route: Route, extent: PromptExtent, learnt: LearnedSizes
) -> tuple[int, int, int, int]:
    """Return the tokens of all prompts, and of the largest prompt: error, tokens, least tokens."""
    text, tokens, tools = extent.text, extent.tokens, extent.tools
    prompt = largest = _total(learnt, text - tools, tokens, tools, extent.prompts)
    if extent.largest_text >= 0:
        text, tokens = extent.largest_text, extent.largest_tokens
        largest = _total(learnt, text, tokens)
    error = int(learnt.error(text - tools, tools)) if text else 0
    if extent.guessed:
        error += _guess_error(extent, learnt)
    longest_token = max(MAX_BYTES_PER_TOKEN, WORD_LENGTH_MARGIN * learnt.bytes_per_token)
    least = int((text - tools) / longest_token)  # templates may omit tools
    if not extent.guessed and route.shape not in TEMPLATED:
        least += tokens  # template and image tokens are guesses
    return prompt, min(error, largest), largest, least


def _learn_output(ask: RequestInfo, own: LearnedSizes, tokens: int) -> None:
    if ask.generates and tokens > 0:
        own.learn_output(tokens / max(ask.samples, 1))


def _guess_error(extent: PromptExtent, learnt: LearnedSizes) -> int:
    if extent.media is None:
        return extent.guessed // 2
    media = _media_tokens(extent)
    return learnt.media.error(extent.media) + max(extent.guessed - media, 0) // 2


def _media_tokens(extent: PromptExtent) -> int:
    counts, sizes = extent.media or NONE, extent.sizes
    return sum(counts[kind] * sizes[kind] for kind in KINDS)


def _media_to_learn(extent: PromptExtent, learnt: LearnedSizes) -> RequestMedia | None:
    """Return a request's media to learn from, if all other tokens are known."""
    counts, tokens = extent.media, _media_tokens(extent)
    if counts is None or extent.guessed != tokens:
        return None
    text = extent.text - extent.tools
    other_tokens = learnt.tokens(text, extent.tools, extent.prompts) + extent.tokens - tokens
    return RequestMedia(counts, int(other_tokens), learnt.error(text, extent.tools))


def _total(learnt: LearnedSizes, text: int, tokens: int, tools: int = 0, prompts: int = 1) -> int:
    if text or tools:
        return max(int(learnt.tokens(text, tools, prompts) + tokens), 1)
    return tokens


def fit(ask: RequestInfo, most: int, *, cuts_output: bool) -> None:
    """Shrink an ask to `most` if it may fit, so that the largest worker decides.

    `cuts_output`: vLLM 0.32 cuts the output limit to the remaining context of at least one token.
    """
    stated = ask.output_tokens
    output = ask.generates if cuts_output or stated is None else stated
    least = ask.least_prompt
    if least < 0:
        least = ask.largest_prompt - ask.prompt_error
    if least + output > most:
        return
    if (stated or 0) > most and ask.route not in ANY_LIMIT:
        return
    ask.most = most
    over = ask.largest_prompt + output - most
    if over > 0:
        ask.largest_prompt -= over
        ask.prompt_tokens -= over
        ask.prompt_error = max(ask.prompt_error - over, 0)  # no smaller worker


def use_known_prefix(ask: RequestInfo, tokens: int, size: int) -> None:
    """Use the known tokens of the first `size` bytes in the estimate of an ask.

    They were reported for another prompt, so they are bounded, and decide no limit.
    """
    first, error = ask.largest_prompt, ask.prompt_error
    ask.sure_prompt = first - error
    whole = max(ask.bytes_before + ask.prefix_bytes, ask.text_bytes)
    rest = max(whole - size, 0) / whole
    found = min(max(tokens + int(first * rest), first - error, 1), first + 2 * error)
    ask.prompt_tokens = ask.largest_prompt = found
    ask.prompt_error = int(max(error * rest, min(error, MIN_BAND * found)))


def enlarge(ask: RequestInfo, limit: int, short_limit: int) -> RequestInfo:
    """Return a request that a worker found above its limit with a larger size."""
    ask = replace(ask)
    if (more := limit + 1 - ask.needed_context) > 0:
        ask.prompt_tokens += more
        ask.largest_prompt += more
    ask.prompt_error = min(ask.prompt_error, ask.needed_context - limit - 1)
    ask.long = ask.expected_tokens > short_limit
    return ask


def _read_output_limit(route: Route, body: dict[str, Any]) -> tuple[int | None, int]:
    """Return the output limit per sample, and the samples per prompt."""
    if route.shape is TOKENS:
        inner = body.get("sampling_params")
        body = inner if type(inner) is dict else {}
    output = COMPLETION_OUTPUT if route.shape is PROMPT else None
    for key in OUTPUT_KEYS:
        if key in body and body[key] is not None:
            output = parse_count(body[key])
            break
    samples = 1
    if "n" in body or "best_of" in body:
        for key in ("n", "best_of"):
            samples = max(samples, min(_read_samples(body.get(key)), MAX_SAMPLES))
    return output, samples


def _read_samples(value: object) -> int:
    """Return the samples; unclear text may mean any number to a worker."""
    found = parse_count(value)
    if found is None and type(value) is str:
        return MAX_SAMPLES
    return found or 1


def _apply_truncation(ask: RequestInfo, most: int | None, prompts: int) -> None:
    """Apply truncation by the worker: to `most` tokens, or to its context."""
    sure = ask.largest_prompt - ask.prompt_error
    ask.sure_prompt = sure if most is None else min(sure, most)
    if most is None:
        ask.prompt_error = ask.largest_prompt
        ask.least_prompt = 0
    else:
        ask.least_prompt = min(ask.least_prompt, most)
        ask.prompt_tokens = min(ask.prompt_tokens, most * prompts)
        ask.largest_prompt = min(ask.largest_prompt, most)
        ask.prompt_error = min(ask.prompt_error, most)
    ask.text_bytes = 0
    ask.media = None
    ask.countable = False
