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

    def learned(self, model: str, route: str, tenant: Tenant | None = None) -> LearnedSizes:
        if tenant is None:
            return self._priors[model, route].base
        learned = tenant.learned.get((model, route))
        return learned if learned is not None else self._priors[model, route].median()

    def _learning_rates(self, info: RequestInfo) -> LearnedSizes:
        tenant, prior = info.tenant, self.prior(info.model, info.route)
        if tenant is None:
            return prior.base
        key, learned = (info.model, info.route), tenant.learned
        own = learned.pop(key, None)
        if own is None:
            own = prior.new_sizes()
            if len(learned) >= MAX_RATES_PER_TENANT:
                del learned[next(iter(learned))]
        learned[key] = own
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
        learned = self.learned(model, route.name, tenant)
        extent = measure(route.shape, body, learned.media.tokens)
        largest_text, largest_tokens, tools = extent.text, extent.tokens, extent.tools
        text = largest_text - tools
        prompt = largest = _total_tokens(learned, text, largest_tokens, tools, extent.prompts)
        if extent.largest_text >= 0:  # there are several prompts
            largest_text, largest_tokens = extent.largest_text, extent.largest_tokens
            largest = _total_tokens(learned, largest_text, largest_tokens)
        error = min(_prompt_error(extent, learned, largest_text), largest)
        output, samples = _read_output_limit(route, body) if route.generates else (None, 1)
        # Positional for speed: this runs for every request.
        info = RequestInfo(
            request_id, route.name, model, body_bytes, prompt, error, largest, output
        )
        # Templates may omit tools.
        least_prompt = _least_text_tokens(learned, largest_text - tools)
        # Template and image tokens are guesses.
        is_guess = extent.guessed or route.shape in TEMPLATED
        info.least_prompt = least_prompt if is_guess else least_prompt + largest_tokens
        info.samples, info.prompts = samples * extent.prompts, extent.prompts
        info.text_bytes, info.tool_bytes = extent.text, tools
        info.extra_tokens = extent.tokens
        info.counted = not (extent.text or extent.guessed)
        info.countable = extent.plain and route.countable
        info.generates = route.generates
        if route.generates:
            usual = learned.output
            info.expected_output = int(usual if output is None or output > usual else output)
            info.stream = is_true(body.get("stream"))
        if extent.guessed:
            info.media = None if extent.cut else _media_to_learn(extent, learned)
            info.why_whole = "not_text"
        if extent.guessed or extent.cut:
            info.text_bytes = 0
        if route.truncates or (body.get(CUT) is not None and route.truncates_if_asked):
            _apply_truncation(info, extent.prompts, max_tokens=parse_count(body.get(CUT)))
        elif route.shape is RESPONSE and body.get(TRUNCATION, WHOLE) != WHOLE:
            _apply_truncation(info, extent.prompts)
        return info

    def apply_count(self, info: RequestInfo, prompt_tokens: int) -> None:
        """Use a worker's token count, and learn from it."""
        self._learn_prompt(info, self._learning_rates(info), prompt_tokens)
        info.prompt_tokens = info.largest_prompt = info.least_prompt = prompt_tokens
        info.prompt_error, info.context_cap, info.sure_prompt = 0, maxsize, -1
        info.counted = True

    def learn(self, info: RequestInfo, usage: Usage) -> None:
        own = self._learning_rates(info)
        if not info.counted:
            self._learn_prompt(info, own, usage.prompt_tokens)
        _learn_output(info, own, usage.completion_tokens)

    def learn_output(self, info: RequestInfo, tokens: int) -> None:
        """Learn the output of all samples together."""
        _learn_output(info, self._learning_rates(info), tokens)

    def has_few_samples(self, info: RequestInfo) -> bool:
        """Return whether a tenant has too few samples to skip any."""
        if info.tenant is None:
            return False
        own = info.tenant.learned.get((info.model, info.route))
        return own is None or max(own.seen, own.outputs) < MIN_SAMPLES_LEARNED

    def _learn_prompt(self, info: RequestInfo, own: LearnedSizes, prompt_tokens: int) -> None:
        if prompt_tokens <= 0 or info.pinned:  # usage includes earlier turns
            return
        if info.media is not None:
            own.media.learn(info.media, prompt_tokens)
        elif info.text_bytes:
            tools = info.tool_bytes
            text, tokens = info.text_bytes - tools, prompt_tokens - info.extra_tokens
            own.learn_prompt(text, tokens, tools, info.prompts)


def _prompt_error(extent: PromptExtent, learned: LearnedSizes, text: int) -> int:
    """Return the possible error of the largest prompt, which has `text` bytes of text."""
    error = int(learned.error(text - extent.tools, extent.tools)) if text else 0
    return error + _guess_error(extent, learned) if extent.guessed else error


def _least_text_tokens(learned: LearnedSizes, text: int) -> int:
    longest_token = max(MAX_BYTES_PER_TOKEN, WORD_LENGTH_MARGIN * learned.bytes_per_token)
    return int(text / longest_token)


def _learn_output(info: RequestInfo, own: LearnedSizes, tokens: int) -> None:
    if info.generates and tokens > 0:
        own.learn_output(tokens / max(info.samples, 1))


def _guess_error(extent: PromptExtent, learned: LearnedSizes) -> int:
    if extent.media is None:
        return extent.guessed // 2
    media = _media_tokens(extent)
    return learned.media.error(extent.media) + max(extent.guessed - media, 0) // 2


def _media_tokens(extent: PromptExtent) -> int:
    counts, sizes = extent.media or NONE, extent.sizes
    return sum(counts[kind] * sizes[kind] for kind in KINDS)


def _media_to_learn(extent: PromptExtent, learned: LearnedSizes) -> RequestMedia | None:
    """Return a request's media to learn from, if all other tokens are known."""
    counts, tokens = extent.media, _media_tokens(extent)
    if counts is None or extent.guessed != tokens:
        return None
    text = extent.text - extent.tools
    other_tokens = learned.tokens(text, extent.tools, extent.prompts) + extent.tokens - tokens
    return RequestMedia(counts, int(other_tokens), learned.error(text, extent.tools))


def _total_tokens(
    learned: LearnedSizes, text: int, tokens: int, tools: int = 0, prompts: int = 1
) -> int:
    if text or tools:
        return max(int(learned.tokens(text, tools, prompts) + tokens), 1)
    return tokens


def shrink_to_fit(info: RequestInfo, context: int, *, cuts_output: bool) -> None:
    """Shrink an estimate to `context` if it may fit, so that the largest worker decides.

    `cuts_output`: vLLM 0.32 cuts the output limit to the remaining context of at least one token.
    """
    stated = info.output_tokens
    output = info.generates if cuts_output or stated is None else stated
    least_prompt = info.least_prompt
    if least_prompt < 0:
        least_prompt = info.largest_prompt - info.prompt_error
    if least_prompt + output > context:
        return
    if (stated or 0) > context and info.route not in ANY_LIMIT:
        return
    info.context_cap = context
    over = info.largest_prompt + output - context
    if over > 0:
        info.largest_prompt -= over
        info.prompt_tokens -= over
        info.prompt_error = max(info.prompt_error - over, 0)  # no smaller worker


def use_known_prefix(info: RequestInfo, tokens: int, size: int) -> None:
    """Use the known tokens of the first `size` bytes in the estimate of a request.

    They were reported for another prompt, so they are bounded, and decide no limit.
    """
    first, error = info.largest_prompt, info.prompt_error
    info.sure_prompt = first - error
    whole = max(info.bytes_before + info.prefix_bytes, info.text_bytes)
    rest = max(whole - size, 0) / whole
    estimate = min(max(tokens + int(first * rest), first - error, 1), first + 2 * error)
    info.prompt_tokens = info.largest_prompt = estimate
    info.prompt_error = int(max(error * rest, min(error, MIN_BAND * estimate)))


def enlarge(info: RequestInfo, limit: int, short_limit: int) -> RequestInfo:
    """Return a request that a worker found above its limit with a larger size."""
    info = replace(info)
    if (more := limit + 1 - info.needed_context) > 0:
        info.prompt_tokens += more
        info.largest_prompt += more
    info.prompt_error = min(info.prompt_error, info.needed_context - limit - 1)
    info.long = info.expected_tokens > short_limit
    return info


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
    count = parse_count(value)
    if count is None and type(value) is str:
        return MAX_SAMPLES
    return count or 1


def _apply_truncation(info: RequestInfo, prompts: int, max_tokens: int | None = None) -> None:
    """Apply truncation by the worker: to `max_tokens` tokens, by default to its context."""
    sure = info.largest_prompt - info.prompt_error
    info.sure_prompt = sure if max_tokens is None else min(sure, max_tokens)
    if max_tokens is None:
        info.prompt_error = info.largest_prompt
        info.least_prompt = 0
    else:
        info.least_prompt = min(info.least_prompt, max_tokens)
        info.prompt_tokens = min(info.prompt_tokens, max_tokens * prompts)
        info.largest_prompt = min(info.largest_prompt, max_tokens)
        info.prompt_error = min(info.prompt_error, max_tokens)
    info.text_bytes = 0
    info.media = None
    info.countable = False
