"""Request and response models of the admin API, as in its OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.refusals import model_not_served
from proxy.core.model.role import Role
from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, Refusal, RequestInfo
from proxy.core.request.session_key import session_key
from proxy.core.request.sizing import shrink_to_fit
from proxy.core.router import Router
from proxy.health.worker_state import State, state, why_not

CHAT = "chat/completions"


class EngineShown(BaseModel):
    """The values of a worker's own /metrics."""

    age_s: float
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int | None


class WorkerShown(BaseModel):
    """A worker, its state and the load charged to it."""

    name: str
    url: str
    role: Role
    model: str
    serves: tuple[str, ...]
    state: State = Field(
        description="resting: the worker failed or was busy and gets no requests for a while; "
        "wrong_model: the worker does not list its configured model"
    )
    why: str = Field(
        description="if down, the last probe's error; if resting, the reason; if wrong_model, the "
        "models that the worker lists"
    )
    max_model_len: int | None
    max_requests: int | None
    requests: int = Field(description="in flight")
    held: int = Field(description="prefilled prompts that decode workers have not yet fetched")
    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int
    prefill_tokens_per_s: float | None = Field(description="learned; null until the first prefill")
    engine: EngineShown | None


class Drained(WorkerShown):
    """A drained worker, and the requests that left it at once."""

    moved: int = Field(0, description="with `now`: requests that went on to other workers")
    remaining: dict[str, int] = Field(
        {},
        description="with `now`: requests that are still there, by reason. These move later: "
        "`waits` for its turn, `no_worker` has room, `no_tokens`, `torn`. These end there: "
        "`field` of the request, `other_output`, `not_kept`, `handover`, `pinned`, `ends`",
    )


class Removed(BaseModel):
    """A removed worker."""

    name: str
    requests: int = Field(description="still in flight on the worker; they finish")


class Reloaded(BaseModel):
    """The fleet after a reload of its file."""

    workers: tuple[str, ...]
    needs_restart: tuple[str, ...] = Field(description="changed settings that need a restart")


class Question(BaseModel):
    """A hypothetical request, to see where it would be sent."""

    model_config = ConfigDict(extra="forbid")

    prompt_tokens: int = Field(ge=1)
    max_tokens: int | None = Field(None, ge=1, description="null: the client sends no limit")
    model: str | None = Field(None, description="null: the fleet's model")
    session: str = Field("", description="the session's id, as the client sends it")
    tenant: str = Field("", description="the tenant of the session")


class Explanation(BaseModel):
    """The worker or the refusal that a request would get, and the score of every worker."""

    worker: str | None
    prefill_worker: str | None = Field(None, description="of a hand-over; `worker` decodes")
    reason: Reason
    handover: str | None = Field(
        None, description="the hand-over verdict; null without decode workers"
    )
    turn: str | None = Field(None, description="how the session's turn is placed")
    predicted_ttft_s: float | None = None
    predicted_transfer_s: float | None = None
    status: int | None = None
    message: str | None = None
    retry_after_s: float | None = None
    scores: tuple[Score, ...]


def shown_worker(worker: Worker, now: float) -> WorkerShown:
    pace, gauges = worker.pace, worker.gauges
    return WorkerShown(
        name=worker.name,
        url=worker.url,
        role=worker.role,
        model=worker.model,
        serves=worker.models,
        state=state(worker),
        why=why_not(worker, now),
        max_model_len=worker.max_model_len,
        max_requests=worker.max_requests,
        requests=worker.requests,
        held=worker.unfetched_handovers,
        prefill_tokens=worker.prefill_tokens,
        decode_tokens=worker.decode_tokens,
        kv_tokens=worker.kv_tokens,
        prefill_tokens_per_s=round(1 / pace.token_s, 1) if pace.prefills else None,
        engine=gauges
        and EngineShown(
            age_s=round(now - gauges.at, 3),
            running=gauges.running,
            waiting=gauges.waiting,
            kv_usage=gauges.kv_usage,
            kv_capacity_tokens=gauges.kv_capacity_tokens,
        ),
    )


def shown_answer(outcome: Decision | Refusal) -> Explanation:
    if isinstance(outcome, Decision):
        handover = outcome.handover
        return Explanation(
            worker=outcome.worker.name,
            prefill_worker=None if handover is None else handover.prefill.name,
            predicted_transfer_s=None if handover is None else handover.transfer_s,
            reason=outcome.reason,
            handover=outcome.verdict or None,
            turn=outcome.turn or None,
            predicted_ttft_s=outcome.predicted_ttft_s,
            scores=outcome.scores,
        )
    return Explanation(
        worker=None,
        reason=outcome.reason,
        status=outcome.status,
        message=outcome.message,
        retry_after_s=outcome.retry_after_s,
        scores=outcome.scores,
    )


def explanation(router: Router, question: Question, default_model: str, now: float) -> Explanation:
    model = question.model or default_model
    if model not in (models := router.fleet.roster.models()):
        return shown_answer(
            model_not_served(model, models, all_listed=router.fleet.roster.all_listed(model))
        )
    usual = int(router.sizer.prior(model, CHAT).median().output)
    limit = router.settings.short_limit
    info = request_info_of(question, model, usual_output=usual, short_limit=limit)
    info.session = session_key(question.tenant, model, question.session.encode())
    shrink_to_fit(
        info, router.fleet.roster.pool(model).context_limit, cuts_output=router.settings.cut_output
    )
    outcome = shown_answer(router.placer.explain(info, now))
    # These workers get no requests because they do not list their model. They are shown because the
    # fleet file configures them for it.
    strays = (w for w in router.fleet.roster if w.model == model and w.lacks_model)
    scores = (
        *outcome.scores,
        *(Score(w.name, 0.0, note=w.not_served_because or "down") for w in strays),
    )
    return outcome.model_copy(update={"scores": scores})


def request_info_of(
    question: Question, model: str, *, usual_output: int, short_limit: int
) -> RequestInfo:
    limit = question.max_tokens
    tokens = question.prompt_tokens
    info = RequestInfo(
        id="explain",
        route=CHAT,
        model=model,
        body_bytes=0,
        prompt_tokens=tokens,
        prompt_error=0,
        largest_prompt=tokens,
        output_tokens=limit,
        expected_output=usual_output if limit is None else min(limit, usual_output),
        counted=True,
    )
    info.long = info.expected_tokens > short_limit
    return info
