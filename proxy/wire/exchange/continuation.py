"""If its worker fails, a stream goes on from another worker, and the client sees one stream.

The other worker gets the request's body and the tokens of the first one's journal, and returns the
whole text; `RestOfText` passes what is new. Without the tokens, it may get the client's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from proxy.core.fleet.leases import NO_WORKERS, Attempts
from proxy.core.model.refusals import no_worker_left
from proxy.core.model.types import Outcome
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
from proxy.wire.exchange.state import ANSWERING
from proxy.wire.worker.connection import WorkerError

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease
    from proxy.core.model.types import Refusal
    from proxy.http.sent_text import SentText
    from proxy.wire.exchange.owner import AttemptOwner
    from proxy.wire.exchange.response_writer import ResponseWriter

# After this time without a token, a stream leaves a worker that is down.
SILENT_S = 10.0
MAX_REPEATED_TOKENS = 1024  # that are generated again
RECOVERED_S = 2.0  # on a worker, until a stream has all its attempts again
DIFFERENT = no_worker_left("another worker's response differs from what was sent")
REFUSED_TOO = no_worker_left("another worker refused it")


def keep_for_continuation(
    owner: AttemptOwner, lease: Lease | None, response: ResponseWriter
) -> bool:
    """Keep the body and count the text of a stream that may be continued."""
    wire, body = owner.wire, owner.request.body
    if lease is None or not wire.settings.continuation:
        return False
    by_text = may_use_text(owner)
    # A decode leg's tokens are those of its worker only.
    if not (by_text or (lease.worker.can_continue and lease.prefill is None)):
        return False
    ask = lease.ask
    if not (ask.stream and owner.route.continues and ask.samples == 1 and body):
        return False
    account = wire.collecting.account(owner.request.head.tenant)
    if owner.sent_text is None and wire.collecting.may_be_kept(account):
        owner.sent_text = response.collect_text(keeps_content=by_text)
    return owner.sent_text is not None


def may_use_text(owner: AttemptOwner) -> bool:
    """Return whether a stream may go on from its text, on any worker."""
    return owner.wire.settings.continues_by_text and owner.route.continues_by_text


class Obstacle:
    """Why a stream can't be continued."""

    __slots__ = ("detail", "reason")

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason  # as in metrics
        self.detail = detail  # the field of the request, or the other output


Output: TypeAlias = Sequence[int] | TextSoFar


def find_output(
    owner: AttemptOwner,
    lease: Lease,
    response: ResponseWriter,
    since: float,
    *,
    regenerates: bool = False,
) -> Output | Obstacle:
    """Return the output of a stream for another worker, or why there is none.

    `regenerates`: without tokens and text, it may begin anew.
    """
    found: Output | Obstacle = find_tokens(owner, lease, response, since)
    if not isinstance(found, Obstacle):
        if not (found and may_use_text(owner)) or others_take_tokens(owner, lease):
            return found
        by_text = find_text(owner)
        return found if isinstance(by_text, Obstacle) else by_text
    if found.reason != NO_TOKENS:
        return found
    if may_use_text(owner):
        found = find_text(owner)
    sent = owner.sent_text
    if not isinstance(found, Obstacle) or sent is None or not regenerates:
        return found
    return () if may_regenerate(owner, sent) else found


def others_take_tokens(owner: AttemptOwner, lease: Lease) -> bool:
    workers = owner.wire.router.fleet.roster.pool(lease.ask.model).all
    return any(each.can_continue and each is not lease.worker for each in workers)


def find_text(owner: AttemptOwner) -> Output | Obstacle:
    sent, record = owner.sent_text, owner.record
    body = owner.request.body if owner.begun is None else owner.whole_body
    if sent is None or sent.has_ended or not body:
        return Obstacle(NO_TOKENS)
    content = sent.content
    if content is None:
        return Obstacle(OTHER_OUTPUT, "reasoning, tool calls or a long text")
    if not content:
        return ()
    if field := why_not_by_text(body, owner.route.shape):
        return Obstacle(FIELD, field)
    found = with_text(body, owner.route.shape, content, record.opening + record.tokens)
    return Obstacle(NO_TOKENS) if found is None else found


def find_tokens(
    owner: AttemptOwner, lease: Lease, response: ResponseWriter, since: float
) -> Sequence[int] | Obstacle:
    """Return the tokens of a stream that runs, or has ended since then, or why there are none."""
    sent, request = owner.sent_text, owner.request
    if sent is None or not request.body:
        return Obstacle(NO_TOKENS)
    if other := sent.other_output:
        return Obstacle(OTHER_OUTPUT, other)
    if owner.begun is None and (field := why_not_continued(request.body)):
        return Obstacle(FIELD, field)
    if response.ends_inside_event:
        return Obstacle(TORN)
    tokens_of = owner.wire.router.fleet.roster.stream_tokens
    if tokens_of is None or sent.has_ended or owner.text_so_far or lease.prefill is not None:
        return Obstacle(NO_TOKENS)
    if request.head.id and owner.wire.has_same_id(request):  # two streams of one name in a journal
        return Obstacle(NO_TOKENS)
    tokens = tokens_of(lease.worker, request.id.decode("latin-1"), since)
    return Obstacle(NO_TOKENS) if tokens is None else tokens


def may_regenerate(owner: AttemptOwner, sent: SentText) -> bool:
    """Return whether another worker generates the same text from the beginning, and soon."""
    if sent.is_empty:
        return True
    is_short = owner.record.opening + owner.record.tokens <= MAX_REPEATED_TOKENS
    return is_short and is_greedy(owner.request.body)


def prepare(owner: AttemptOwner, lease: Lease, response: ResponseWriter, output: Output) -> None:
    """Write the request that continues the stream."""
    restore_attempts(owner, lease)
    lease.attempts = continued(owner, lease.attempts, needs_journal=needs_journal(output))
    if owner.begun is None:
        owner.whole_body = owner.request.body
    if isinstance(output, TextSoFar):
        owner.text_so_far = output
        owner.request.body = output.body
    else:
        owner.text_so_far = None
        owner.request.body = with_output(owner.whole_body, output)
    response.drop_partial_event()
    owner.begun = response
    owner.failed_worker = lease.worker.name


def restore_attempts(owner: AttemptOwner, lease: Lease) -> None:
    """Forget the failures of a stream that its worker has served for a while."""
    first_at, last_at = lease.first_token_at, owner.record.last_token_at
    if first_at is not None and last_at - first_at >= RECOVERED_S:
        lease.attempts = replace(lease.attempts, tried=NO_WORKERS, earlier_failures=0)


def continued(owner: AttemptOwner, attempts: Attempts, *, needs_journal: bool) -> Attempts:
    """Return the attempts of a stream whose next attempt continues it."""
    any_worker = may_use_text(owner) and not needs_journal
    return replace(attempts, whole="continued", continues=True, any_worker=any_worker)


def needs_journal(output: Output) -> bool:
    """Return whether only our scheduler takes it."""
    return not isinstance(output, TextSoFar) and bool(output)


def reset_tried_workers(attempts: Attempts) -> Attempts:
    """Return the attempts of a stream that has new tokens; its first workers may run again."""
    return replace(
        attempts, tried=NO_WORKERS, paused=NO_WORKERS, earlier_failures=attempts.failures
    )


def not_continued(owner: AttemptOwner, now: float, obstacle: Obstacle, worker: str) -> None:
    """Count and log a stream that ends because its worker failed."""
    owner.failed_worker = ""
    owner.wire.metrics.count_lost_stream(obstacle.reason)
    owner.wire.continuations.log_lost(now, owner.record, worker, obstacle.reason, obstacle.detail)


def move_stream(
    owner: AttemptOwner,
    lease: Lease | None,
    now: float,
    response: ResponseWriter,
    error: WorkerError,
    outcome: Outcome = Outcome.FAILED,
) -> bool:
    """Continue the stream on another worker; False if it can't be continued."""
    sent = owner.sent_text
    if sent is None or lease is None:
        return False
    found = find_output(owner, lease, response, lease.charged_at, regenerates=True)
    if not isinstance(found, Obstacle):
        prepare(owner, lease, response, found)
        refusal = owner.try_another(now, outcome, error)
        if refusal is None:
            return True
        found = Obstacle(NO_WORKER, refusal.message)
    not_continued(owner, now, found, lease.worker.name)
    return False


def continue_after_failure(
    owner: AttemptOwner, lease: Lease | None, now: float, response: ResponseWriter, body: bytes
) -> bool:
    """Continue on another worker if this one reports a failure, as after a 500."""
    sent = owner.sent_text
    if sent is None or lease is None or FAILED.search(response.partial_event + body) is None:
        return False
    router = owner.wire.router
    attempts = continued(owner, lease.attempts, needs_journal=False)
    if sent.is_empty and not router.may_retry(lease, now, attempts):
        not_continued(owner, now, Obstacle(NO_WORKER), lease.worker.name)
        return False  # the request may be at fault: its client gets to know at once
    return move_stream(owner, lease, now, response, WorkerError.STATUS, Outcome.ERRED)


def attempts_elsewhere(owner: AttemptOwner, lease: Lease) -> Attempts:
    """Return the attempts of a stream that would leave its silent worker."""
    restore_attempts(owner, lease)
    has_tokens = lease.worker.can_continue and lease.prefill is None
    needs = has_tokens and others_take_tokens(owner, lease)
    return continued(owner, lease.attempts, needs_journal=needs)


def is_silent(owner: AttemptOwner, now: float) -> bool:
    """Return whether a stream that may be continued has had no token for a while."""
    return owner.sent_text is not None and now - owner.record.last_token_at >= SILENT_S


def expect_rest(owner: AttemptOwner, begun: ResponseWriter) -> ResponseWriter:
    """Expect the other worker's text from its beginning."""
    text, sent = owner.text_so_far, owner.sent_text
    if sent is not None:
        owner.rest = sent.rest(None if text is None else text.space)
    begun.output_in_prompt = 0 if text is None else text.tokens
    return begun


def rest_of(
    owner: AttemptOwner, lease: Lease | None, now: float, body: bytes
) -> bytes | Refusal | None:
    """Return what the client does not have; None if the stream leaves this worker too."""
    rest = owner.rest
    if rest is None:
        return body
    try:
        new = rest.feed(body)
    except TextDiffersError:
        not_continued(owner, now, Obstacle(DIFFERS), owner.failed_worker)
        return DIFFERENT
    except EngineFailedError as error:
        if owner.try_another(now, Outcome.ERRED, WorkerError.STATUS) is None:
            return None
        return no_worker_left(f"another worker failed: {error}")
    if rest.is_reached:
        failed, owner.failed_worker = owner.failed_worker, ""
        owner.rest = None
        owner.wire.metrics.count_continuation(failed)
        owner.set_state(ANSWERING)
        if lease is not None:
            lease.attempts = reset_tried_workers(lease.attempts)
            owner.record.left_workers += (failed,)
            owner.wire.continuations.log_continued(
                now, owner.record, failed, lease.worker.name, by_text=owner.text_so_far is not None
            )
            owner.wire.router.leases.record_first_token(lease, now)
    return new
