"""The router's own answers, in the words of OpenAI's and vLLM's."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.core.types import Ask, Reason, Refusal


def bad_request(message: str, param: str | None = None) -> Refusal:
    """400: the body is not what it should be."""
    return Refusal(400, Reason.BAD_REQUEST, message, param=param)


def steers(param: str) -> Refusal:
    """400: the body would steer a transfer between workers, which is no client's business."""
    message = f"`{param[:100]}` is not taken from clients here; leave it out."
    return Refusal(400, Reason.BAD_REQUEST, message, "forbidden_parameter", param[:100])


def unknown_model(model: str, known: Iterable[str]) -> Refusal:
    """404: no worker is for that model."""
    names = ", ".join(sorted(known)) or "none"
    message = f"The model `{model[:200]}` does not exist. This fleet serves: {names}."
    return Refusal(404, Reason.UNKNOWN_MODEL, message, "model_not_found", "model")


def too_long(ask: Ask, limit: int) -> Refusal:
    """400: no worker can hold it."""
    about = "" if ask.counted else "about "
    output = ask.output_tokens or 0
    asked = f"you requested {about}{ask.largest_prompt + output} tokens "
    message = (
        f"This model's maximum context length is {limit} tokens. However, {asked}"
        f"({about}{ask.largest_prompt} in the prompt, {output} for the output). "
        "Please reduce the length of the prompt or of the output."
    )
    param = "messages" if ask.route.startswith(("chat", "messages")) else "prompt"
    return Refusal(400, Reason.TOO_LONG, message, "context_length_exceeded", param)


def no_worker(model: str, retry_after_s: float | None = None) -> Refusal:
    """503: nobody is there to serve it now."""
    message = f"No worker of the model `{model}` can take this request now."
    rest_s = max(retry_after_s or 0.0, 1.0)
    return Refusal(503, Reason.NO_WORKER, message, "no_worker", retry_after_s=rest_s)


def nobody_left(why: str) -> Refusal:
    """502: workers failed, and no further one may be tried."""
    return Refusal(502, Reason.NO_WORKER, f"The request failed on its worker, and {why}.")


def queue_full(retry_after_s: float) -> Refusal:
    """429: as many wait as may."""
    message = "Every worker is busy and the queue is full. Retry after the time given."
    return Refusal(429, Reason.QUEUE_FULL, message, "queue_full", retry_after_s=retry_after_s)


def waited_too_long(seconds: float, retry_after_s: float) -> Refusal:
    """429: its time in the queue is up."""
    message = f"Every worker stayed busy for the {seconds:g} s that a request may wait."
    return Refusal(
        429, Reason.WAITED_TOO_LONG, message, "queue_timeout", retry_after_s=retry_after_s
    )


def draining() -> Refusal:
    """503: the router is about to stop."""
    return Refusal(503, Reason.DRAINING, "The router is shutting down.", retry_after_s=1.0)
