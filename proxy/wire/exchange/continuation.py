"""If its worker fails, a stream goes on from another worker, and the client sees one stream.

The other worker gets the request's body and the tokens of the first one's journal, and returns the
whole text; `RestOfText` passes what is new. Without the tokens, it may get the client's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from proxy.core.fleet.leases import NO_WORKERS, Attempts, Lease
from proxy.core.model.refusals import no_worker_left
from proxy.core.model.types import Outcome, Refusal
from proxy.core.request.continuable import (
    DIFFERS,
    FIELD,
    NO_TOKENS,
    NO_WORKER,
    OTHER_OUTPUT,
    TORN,
    is_greedy,
    why_not_continued,
    with_output,
)
from proxy.core.request.continued_text import TextSoFar, why_not_by_text, with_text
from proxy.http.sent_text import FAILED, EngineFailedError, TextDiffersError
from proxy.wire.exchange.owner import AttemptOwner, TokensSource
from proxy.wire.exchange.response_writer import ResponseWriter
from proxy.wire.exchange.state import ANSWERING
from proxy.wire.worker.connection import WorkerError

# After this time without a token, a stream leaves a worker that is down.
SILENT_S = 10.0
MAX_REPEATED_TOKENS = 1024  # that are generated again
MAX_DETAIL_CHARS = 100  # clients choose fields
RECOVERED_S = 2.0  # on a worker, until a stream has all its attempts again
BROKEN_MESSAGE = "The worker failed during the response."
DIFFERENT = no_worker_left("another worker's response differs from what was sent")
REFUSED_TOO = no_worker_left("another worker refused it")


def keep_for_continuation(
    exchange: AttemptOwner, lease: Lease | None, response: ResponseWriter
) -> bool:
    """Keep the body and count the text of a stream that may be continued."""
    wire, body = exchange.wire, exchange.request.body
    if lease is None or not wire.settings.continuation:
        return False
    by_text = may_use_text(exchange)
    # A decode leg's tokens are those of its worker only.
    if not (by_text or (lease.worker.can_continue and lease.prefill is None)):
        return False
    info = lease.info
    if not (info.stream and exchange.route.continues and info.samples == 1 and body):
        return False
    account = wire.body_budget.account(exchange.request.head.tenant)
    if exchange.sent_text is None and wire.body_budget.may_be_kept(account):
        exchange.sent_text = response.collect_text(keeps_content=by_text)
    return exchange.sent_text is not None


def may_use_text(exchange: AttemptOwner) -> bool:
    """Return whether a stream may go on from its text, on any worker."""
    return exchange.wire.settings.continues_by_text and exchange.route.continues_by_text


class Obstacle:
    """Why a stream can't be continued."""

    __slots__ = ("detail", "reason")

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason  # as in metrics
        self.detail = detail  # the field of the request, or the other output

    def __str__(self) -> str:
        return f"{self.reason} {self.detail[:MAX_DETAIL_CHARS]!r}" if self.detail else self.reason


Output: TypeAlias = Sequence[int] | TextSoFar


def find_output(
    exchange: AttemptOwner,
    lease: Lease,
    response: ResponseWriter,
    since: float,
    *,
    regenerates: bool = False,
) -> Output | Obstacle:
    """Return the output of a stream for another worker, or why there is none.

    `regenerates`: without tokens and text, it may begin anew.
    """
    tokens, by_text = find_tokens(exchange, lease, response, since), may_use_text(exchange)
    if isinstance(tokens, Obstacle):
        if tokens.reason != NO_TOKENS:
            return tokens
        output = find_text(exchange) if by_text else tokens
        begins_anew = regenerates and isinstance(output, Obstacle) and may_regenerate(exchange)
        return () if begins_anew else output
    if not (tokens and by_text) or others_take_tokens(exchange, lease):
        return tokens
    text = find_text(exchange)
    return tokens if isinstance(text, Obstacle) else text


def others_take_tokens(exchange: AttemptOwner, lease: Lease) -> bool:
    workers = exchange.wire.router.fleet.roster.pool(lease.info.model).all
    return any(worker.can_continue and worker is not lease.worker for worker in workers)


def find_text(exchange: AttemptOwner) -> Output | Obstacle:
    sent, record = exchange.sent_text, exchange.record
    body = exchange.request.body if exchange.begun_response is None else exchange.whole_body
    if sent is None or sent.has_ended or not body:
        return Obstacle(NO_TOKENS)
    content = sent.content
    if content is None:
        return Obstacle(OTHER_OUTPUT, "reasoning, tool calls or a long text")
    if not content:
        return ()
    if field := why_not_by_text(body, exchange.route.shape):
        return Obstacle(FIELD, field)
    continued = with_text(body, exchange.route.shape, content, record.output_tokens)
    return Obstacle(NO_TOKENS) if continued is None else continued


def find_tokens(
    exchange: AttemptOwner, lease: Lease, response: ResponseWriter, since: float
) -> Sequence[int] | Obstacle:
    """Return the tokens of a stream that runs, or has ended since then, or why there are none."""
    sent, request = exchange.sent_text, exchange.request
    if sent is None or not request.body:
        return Obstacle(NO_TOKENS)
    if other := sent.other_output:
        return Obstacle(OTHER_OUTPUT, other)
    if exchange.begun_response is None and (field := why_not_continued(request.body)):
        return Obstacle(FIELD, field)
    if response.ends_inside_event:
        return Obstacle(TORN)
    tokens_of = exchange.wire.router.fleet.roster.stream_tokens
    if tokens_of is None or sent.has_ended or exchange.text_so_far or lease.prefill is not None:
        return Obstacle(NO_TOKENS)
    # Two streams would have one name in a journal.
    if request.head.id and exchange.wire.has_same_id(request):
        return Obstacle(NO_TOKENS)
    tokens = tokens_of(lease.worker, request.id.decode("latin-1"), since)
    return Obstacle(NO_TOKENS) if tokens is None else tokens


def may_regenerate(exchange: AttemptOwner) -> bool:
    """Return whether another worker generates the same text from the beginning, and soon."""
    sent = exchange.sent_text
    if sent is None or sent.is_empty:
        return sent is not None
    is_short = exchange.record.output_tokens <= MAX_REPEATED_TOKENS
    return is_short and is_greedy(exchange.request.body)


def prepare_continuation(
    exchange: AttemptOwner, lease: Lease, response: ResponseWriter, output: Output
) -> None:
    """Write the request that continues the stream."""
    restore_attempts(exchange, lease)
    needs = needs_journal(output)
    lease.attempts = continuing_attempts(exchange, lease.attempts, needs_journal=needs)
    if exchange.begun_response is None:
        exchange.whole_body = exchange.request.body
    if isinstance(output, TextSoFar):
        exchange.text_so_far, exchange.tokens_source = output, None
        exchange.request.body = output.body
    else:
        exchange.text_so_far = None
        exchange.tokens_source = TokensSource(lease.worker, lease.charged_at, len(output))
        exchange.request.body = with_output(exchange.whole_body, output)
    response.drop_partial_event()
    exchange.begun_response = response
    exchange.failed_worker = lease.worker.name


def restore_attempts(exchange: AttemptOwner, lease: Lease) -> None:
    """Forget the failures of a stream that its worker has served for a while."""
    first_at, last_at = lease.first_token_at, exchange.record.last_token_at
    if first_at is not None and last_at - first_at >= RECOVERED_S:
        lease.attempts = replace(lease.attempts, tried=NO_WORKERS, failures=0)


def continuing_attempts(
    exchange: AttemptOwner, attempts: Attempts, *, needs_journal: bool
) -> Attempts:
    """Return the attempts of a stream whose next attempt continues it."""
    any_worker = may_use_text(exchange) and not needs_journal
    return replace(attempts, why_whole="continued", continues=True, any_worker=any_worker)


def needs_journal(output: Output) -> bool:
    """Return whether only our scheduler takes it."""
    return not isinstance(output, TextSoFar) and bool(output)


def record_not_continued(
    exchange: AttemptOwner, now: float, obstacle: Obstacle, worker: str
) -> None:
    """Count and log a stream that ends because its worker failed."""
    exchange.failed_worker = ""
    exchange.why_not_continued = str(obstacle)
    exchange.wire.metrics.count_lost_stream(obstacle.reason)
    exchange.wire.continuations.log_lost(now, exchange.record, worker, str(obstacle))


def broken_message(exchange: AttemptOwner) -> str:
    if why := exchange.why_not_continued:
        return f"{BROKEN_MESSAGE} No other worker can continue the stream: {why}."
    return BROKEN_MESSAGE


def move_stream(
    exchange: AttemptOwner,
    lease: Lease | None,
    now: float,
    response: ResponseWriter,
    error: WorkerError,
    outcome: Outcome = Outcome.FAILED,
) -> bool:
    """Continue the stream on another worker; False if it can't be continued."""
    sent = exchange.sent_text
    if sent is None or lease is None:
        return False
    output = find_output(exchange, lease, response, lease.charged_at, regenerates=True)
    if not isinstance(output, Obstacle):
        prepare_continuation(exchange, lease, response, output)
        refusal = exchange.try_another(now, outcome, error)
        if refusal is None:
            return True
        output = Obstacle(NO_WORKER, refusal.message)
    record_not_continued(exchange, now, output, lease.worker.name)
    return False


def continue_after_failure(
    exchange: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter, body: bytes
) -> bool:
    """Continue on another worker if this one reports a failure, as after a 500."""
    sent = exchange.sent_text
    if sent is None or lease is None or FAILED.search(response.partial_event + body) is None:
        return False
    router = exchange.wire.router
    attempts = continuing_attempts(exchange, lease.attempts, needs_journal=False)
    if sent.is_empty and not router.may_retry(lease, now, attempts):
        record_not_continued(exchange, now, Obstacle(NO_WORKER), lease.worker.name)
        return False  # the request may be at fault: the client gets the error at once
    return move_stream(exchange, lease, now, response, WorkerError.STATUS, Outcome.ERRED)


def attempts_elsewhere(exchange: AttemptOwner, lease: Lease) -> Attempts:
    """Return the attempts of a stream that would leave its silent worker."""
    restore_attempts(exchange, lease)
    has_tokens = lease.worker.can_continue and lease.prefill is None
    needs = has_tokens and others_take_tokens(exchange, lease)
    return continuing_attempts(exchange, lease.attempts, needs_journal=needs)


def is_silent(exchange: AttemptOwner, now: float) -> bool:
    """Return whether a stream that may be continued has had no token for a while."""
    return exchange.sent_text is not None and now - exchange.record.last_token_at >= SILENT_S


def expect_repeated(exchange: AttemptOwner, begun: ResponseWriter) -> ResponseWriter:
    text, sent = exchange.text_so_far, exchange.sent_text
    if sent is not None:
        exchange.repeated = sent.rest(None if text is None else text.space)
    begun.output_in_prompt = 0 if text is None else text.tokens
    return begun


def remove_repeated(
    exchange: AttemptOwner, lease: Lease | None, now: float, body: bytes
) -> bytes | Refusal | None:
    """Return what the client does not have; None if the stream leaves this worker too."""
    rest = exchange.repeated
    if rest is None:
        return body
    try:
        new = rest.feed(body)
    except TextDiffersError:
        if lease is not None and continue_with_late_tokens(exchange, lease, now):
            return None
        record_not_continued(exchange, now, Obstacle(DIFFERS), exchange.failed_worker)
        return DIFFERENT
    except EngineFailedError as error:
        if exchange.try_another(now, Outcome.ERRED, WorkerError.STATUS) is None:
            return None
        return no_worker_left(f"another worker failed: {error}")
    if rest.is_caught_up:
        record_continued(exchange, lease, now)
    return new


def record_continued(exchange: AttemptOwner, lease: Lease | None, now: float) -> None:
    failed, exchange.failed_worker = exchange.failed_worker, ""
    exchange.repeated = None
    wire, record, by_text = exchange.wire, exchange.record, exchange.text_so_far is not None
    wire.metrics.count_continuation(failed)
    exchange.set_state(ANSWERING)
    if lease is not None:
        # Workers that failed the stream may get it again.
        lease.attempts = replace(lease.attempts, tried=NO_WORKERS, paused=NO_WORKERS)
        record.left_workers += (failed,)
        name = lease.worker.name
        wire.continuations.log_continued(now, record, failed, name, by_text=by_text)
        wire.router.leases.record_first_token(lease, now)


def continue_with_late_tokens(exchange: AttemptOwner, lease: Lease, now: float) -> bool:
    """Continue from the tokens that the journal has had since, if there are any.

    A busy engine's journal is later than its response, and another worker samples other tokens.
    """
    source, exchange.tokens_source = exchange.tokens_source, None
    tokens_of = exchange.wire.router.fleet.roster.stream_tokens
    if source is None or tokens_of is None:
        return False
    tokens = tokens_of(source.worker, exchange.request.id.decode("latin-1"), source.since)
    if tokens is None or len(tokens) <= source.number:
        return False
    lease.attempts = continuing_attempts(exchange, lease.attempts, needs_journal=True)
    exchange.request.body = with_output(exchange.whole_body, tokens)
    return exchange.try_another(now, Outcome.MOOT, WorkerError.LATE_TOKENS) is None
