"""The router's error responses, worded as OpenAI's and vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.core.model.route_table import BY_NAME
from proxy.core.model.types import Reason, Refusal, RequestInfo
from proxy.core.tenants.limits import Limit, LimitExceeded
from proxy.errors import short, short_list

LIMIT_NAMES = {
    Limit.REQUESTS: "requests per minute (RPM)",
    Limit.TOKENS: "tokens per minute (TPM)",
    Limit.CONCURRENCY: "requests at a time",
}


CHALLENGE = (("WWW-Authenticate", "Bearer"),)


class RefusedError(Exception):
    """The router refuses a request."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def plain_seconds(seconds: float) -> str:
    """Return a number of seconds to the millisecond, without zeros at its end."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def bad_request(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, Reason.BAD_REQUEST, message, param=param)


def encoded_body(encoding: str) -> Refusal:
    message = f"Content-Encoding: {encoding[:20]} is not supported; send the body uncompressed."
    return Refusal(415, Reason.BAD_REQUEST, message, param="Content-Encoding")


def wrong_method(path: str, method: str, allowed: Sequence[str]) -> Refusal:
    others = ", ".join(allowed)
    message = f"{path[:200]} accepts {others}, not {method[:20]}"
    return Refusal(405, Reason.UNKNOWN_PATH, message, headers=(("Allow", others),))


def duplicate_field(param: str) -> Refusal:
    return bad_request(f"The body has `{param}` more than once; send it once.", param)


def forbidden_field(param: str) -> Refusal:
    message = f"`{param[:100]}` is not accepted from clients; leave it out."
    return Refusal(400, Reason.BAD_REQUEST, message, "forbidden_parameter", param[:100])


def model_not_served(model: str, models: Iterable[str], *, all_listed: bool) -> Refusal:
    """Refuse an unknown model; `all_listed`: all model lists are known."""
    return (unknown_model if all_listed else not_known_yet)(model, models)


def unknown_model(model: str, models: Iterable[str]) -> Refusal:
    message = f"The model `{model[:200]}` does not exist. This fleet serves: {_listed(models)}."
    return Refusal(404, Reason.UNKNOWN_MODEL, message, "model_not_found", "model")


def route_not_served(model: str, route: str, models: Iterable[str]) -> Refusal:
    missing = f"A worker of the model `{model[:200]}` does not support {route}."
    message = f"{missing} This fleet serves: {_listed(models)}."
    return Refusal(404, Reason.UNKNOWN_MODEL, message, "model_not_supported", "model")


def not_known_yet(model: str, models: Iterable[str]) -> Refusal:
    message = (
        f"The model `{model[:200]}` is not known yet: some workers have not listed their "
        f"models. Known models: {_listed(models)}."
    )
    return Refusal(503, Reason.NOT_KNOWN_YET, message, "not_known_yet", retry_after_s=1.0)


def _listed(models: Iterable[str]) -> str:
    return short_list(sorted(models)) or "none"


def too_long(info: RequestInfo, limit: int) -> Refusal:
    about = "" if info.counted else "about "
    output = info.output_tokens or 0
    requested = f"you requested {about}{info.largest_prompt + output} tokens "
    message = (
        f"This model's maximum context length is {limit} tokens. However, {requested}"
        f"({about}{info.largest_prompt} in the prompt, {output} for the output). "
        "Please reduce the length of the prompt or of the output."
    )
    param = BY_NAME[info.route].prompt_param
    return Refusal(400, Reason.TOO_LONG, message, "context_length_exceeded", param)


def no_worker(model: str, retry_after_s: float | None = None) -> Refusal:
    message = f"No worker of the model `{short(model)}` can take this request now."
    retry_after_s = max(retry_after_s or 0.0, 1.0)
    return Refusal(503, Reason.NO_WORKER, message, "no_worker", retry_after_s=retry_after_s)


def no_worker_left(why: str, retry_after_s: float | None = None) -> Refusal:
    message = f"The request failed on its worker, and {why}."
    return Refusal(502, Reason.NO_WORKER, message, retry_after_s=retry_after_s)


def dropped() -> Refusal:
    """502: `MAX_DROPS` workers closed the connection.

    Without Retry-After, and with this header, official clients do not retry.
    """
    message = (
        "Two workers closed the connection before they responded to this request. It is not sent "
        "to another worker, because the request may cause the failures."
    )
    headers = (("x-should-retry", "false"),)
    return Refusal(502, Reason.NO_WORKER, message, "request_dropped", headers=headers)


def response_timeout(seconds: float) -> Refusal:
    """504: an unstreamed response is too long."""
    message = (
        f"The response was not finished within {seconds:g} s. Please stream it, or request fewer "
        "tokens."
    )
    return Refusal(504, Reason.NO_WORKER, message, "unfinished")


def request_timeout(seconds: float) -> Refusal:
    message = f"The request exceeded the time limit of {seconds:g} s."
    return Refusal(504, Reason.TIME_LIMIT, message, "time_limit")


def request_late(seconds: float) -> Refusal:
    message = f"The request did not arrive within the time limit of {seconds:g} s."
    return Refusal(408, Reason.TIME_LIMIT, message, "time_limit")


def slow_body(bytes_per_s: int) -> Refusal:
    message = f"The body arrived at less than {bytes_per_s} bytes per second. Please send it again."
    return Refusal(408, Reason.SLOW_BODY, message, "slow_body")


def queue_full(retry_after_s: float) -> Refusal:
    message = "Every worker is busy and the queue is full. Retry after the time given."
    return Refusal(429, Reason.QUEUE_FULL, message, "queue_full", retry_after_s=retry_after_s)


def queue_timeout(seconds: float, retry_after_s: float) -> Refusal:
    message = f"Every worker stayed busy for the {seconds:g} s that a request may wait."
    return Refusal(
        429, Reason.WAITED_TOO_LONG, message, "queue_timeout", retry_after_s=retry_after_s
    )


def router_full() -> Refusal:
    message = "The router has no room for another connection. Retry after the time given."
    return Refusal(503, Reason.ROUTER_FULL, message, "router_full", retry_after_s=1.0)


def draining() -> Refusal:
    return Refusal(503, Reason.DRAINING, "The router is shutting down.", retry_after_s=1.0)


def no_key() -> Refusal:
    message = (
        "You didn't provide an API key. You need to provide your API key in an Authorization "
        "header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
    )
    return Refusal(401, Reason.BAD_KEY, message, headers=CHALLENGE)


def bad_key() -> Refusal:
    """401; responses are logged, so the key is not repeated."""
    message = "Incorrect API key provided. Ask the operator of this service for a key."
    return Refusal(401, Reason.BAD_KEY, message, "invalid_api_key", headers=CHALLENGE)


def not_allowed(model: str, allowed: Iterable[str]) -> Refusal:
    message = f"Your key may not use the model `{model[:200]}`. It may use: {_listed(allowed)}."
    return Refusal(403, Reason.NOT_ALLOWED, message, "model_not_allowed", "model")


def origin_not_allowed(origin: str) -> Refusal:
    message = (
        f"This router has no API keys and refuses requests from web pages of `{origin[:200]}`. "
        "Configure tenants with keys, or set router.allow_anonymous: true."
    )
    return Refusal(403, Reason.NOT_ALLOWED, message, "origin_not_allowed")


def no_response(response_id: str) -> Refusal:
    message = f"Response with id '{response_id[:200]}' not found."
    return Refusal(404, Reason.NOT_ALLOWED, message, "response_not_found", "response_id")


def not_isolated(route: str) -> Refusal:
    """400: tenants would share a prompt cache."""
    message = f"/{route} is not served here: tenants would share its prompt cache."
    return Refusal(400, Reason.NOT_ALLOWED, message, "not_isolated")


def limited(info: RequestInfo, exceeded: LimitExceeded) -> Refusal:
    """429, or 400 if waiting does not help."""
    if exceeded.retry_after_s is None:
        about = "" if info.counted else "about "
        message = (
            f"Your key allows prompts of up to {exceeded.allowed} tokens; this prompt has {about}"
            f"{info.largest_prompt}. Please reduce the length of the prompt."
        )
        param = BY_NAME[info.route].prompt_param
        return Refusal(400, Reason.LIMITED, message, "context_length_exceeded", param)
    return limited_for_now(exceeded, exceeded.retry_after_s)


def limited_for_now(exceeded: LimitExceeded, retry_after_s: float) -> Refusal:
    message = f"Rate limit reached for {LIMIT_NAMES[exceeded.limit]}: Limit {exceeded.allowed}. "
    message += f"Please try again in {plain_seconds(retry_after_s)}s."
    headers: list[tuple[str, str]] = []
    for name, state in (("requests", exceeded.requests), ("tokens", exceeded.tokens)):
        if state is not None:
            headers += [
                (f"x-ratelimit-limit-{name}", str(state.limit)),
                (f"x-ratelimit-remaining-{name}", str(state.remaining)),
                (f"x-ratelimit-reset-{name}", f"{state.reset_s:.3f}s"),
            ]
    return Refusal(
        429,
        Reason.LIMITED,
        message,
        "rate_limit_exceeded",
        retry_after_s=retry_after_s,
        headers=tuple(headers),
    )


def no_worker_now(*, queue_has_room: bool) -> Refusal:
    """Return the outcome of a request that no worker takes now, for `explain`."""
    if queue_has_room:
        message = (
            "The request would wait: every worker that can hold it is full, reserved for long "
            "requests, or not probed yet."
        )
        return Refusal(429, Reason.FLEET_FULL, message)
    message = (
        "No worker takes the request now, and the queue is full: the request would be refused, or "
        "evict a queued request of a tenant with a larger share."
    )
    return Refusal(429, Reason.QUEUE_FULL, message)


def too_slow(wait_s: float, target_s: float, retry_after_s: float) -> Refusal:
    message = (
        f"The first token would take about {plain_seconds(wait_s)} s; the limit is {target_s:g} s. "
        "Retry after the time given."
    )
    return Refusal(429, Reason.TOO_SLOW, message, "too_slow", retry_after_s=retry_after_s)


def deadline(wait_s: float, left_s: float, retry_after_s: float) -> Refusal:
    message = (
        f"The first token would take about {plain_seconds(wait_s)} s; X-Request-Deadline-Ms leaves "
        f"{plain_seconds(max(left_s, 0.0))} s. Retry after the time given, or allow more time."
    )
    return Refusal(429, Reason.DEADLINE, message, "deadline", retry_after_s=retry_after_s)


def deadline_in_queue(waited_s: float, retry_after_s: float) -> Refusal:
    message = (
        f"Every worker stayed busy for {waited_s:.1f} s, and the first token can no longer come "
        "within X-Request-Deadline-Ms. Retry after the time given, or allow more time."
    )
    return Refusal(429, Reason.DEADLINE, message, "deadline", retry_after_s=retry_after_s)
