"""What the admin API takes and gives, as it stands in its OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.refusals import model_not_served
from proxy.core.model.role import Role
from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, Refusal, RequestInfo
from proxy.core.request.sizing import fit
from proxy.core.router import Router
from proxy.health.worker_state import State, state, why_not

CHAT = "chat/completions"


class EngineShown(BaseModel):
    """What a worker's own /metrics said."""

    age_s: float
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int | None


class WorkerShown(BaseModel):
    """A worker, how it fares, and what is charged to it."""

    name: str
    url: str
    role: Role
    model: str
    serves: tuple[str, ...]
    state: State = Field(
        description="resting: it failed or was busy, and is left alone a while; wrong_model: it "
        "lists models, and its own is not among them"
    )
    why: str = Field(
        description="what its last probe found where it is down; what it rests for; or what it "
        "serves"
    )
    max_model_len: int | None
    max_requests: int | None
    requests: int = Field(description="in flight")
    held: int = Field(description="prompts it has prefilled that decode workers are yet to fetch")
    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int
    prefill_tokens_per_s: float | None = Field(description="learnt; null until it was")
    engine: EngineShown | None


class Removed(BaseModel):
    """A worker that was taken out."""

    name: str
    requests: int = Field(description="still in flight on it; they finish by themselves")


class Reloaded(BaseModel):
    """The fleet after its file was read again."""

    workers: tuple[str, ...]
    needs_restart: tuple[str, ...] = Field(description="settings that changed, but not yet here")


class Question(BaseModel):
    """A request that is not made: where would it go?"""

    model_config = ConfigDict(extra="forbid")

    prompt_tokens: int = Field(ge=1)
    max_tokens: int | None = Field(None, ge=1, description="null: the client states none")
    model: str | None = Field(None, description="null: the fleet's")


class Explanation(BaseModel):
    """Where it would go, or what its client would be told; and what every worker offers."""

    worker: str | None
    prefill_worker: str | None = Field(None, description="of a hand-over; worker decodes")
    reason: Reason
    handover: str | None = Field(
        None, description="whether it is handed over, or why not; null without decode workers"
    )
    predicted_ttft_s: float | None = None
    predicted_transfer_s: float | None = None
    status: int | None = None
    message: str | None = None
    retry_after_s: float | None = None
    scores: tuple[Score, ...]


def shown_worker(worker: Worker, now: float) -> WorkerShown:
    """Describe a worker."""
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
        held=worker.pinned,
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


def shown_answer(answer: Decision | Refusal) -> Explanation:
    """Describe what became of a question."""
    if isinstance(answer, Decision):
        handover = answer.handover
        return Explanation(
            worker=answer.worker.name,
            prefill_worker=None if handover is None else handover.prefill.name,
            predicted_transfer_s=None if handover is None else handover.transfer_s,
            reason=answer.reason,
            handover=answer.whether or None,
            predicted_ttft_s=answer.predicted_ttft_s,
            scores=answer.scores,
        )
    return Explanation(
        worker=None,
        reason=answer.reason,
        status=answer.status,
        message=answer.message,
        retry_after_s=answer.retry_after_s,
        scores=answer.scores,
    )


def explanation(router: Router, question: Question, fleets_model: str, now: float) -> Explanation:
    """Say where such a request would go now."""
    model = question.model or fleets_model
    if model not in (known := router.fleet.models()):
        return shown_answer(model_not_served(model, known, all_told=router.fleet.all_told(model)))
    usual = int(router.sizer.prior(model, CHAT).common().output)
    limit = router.settings.short_limit
    ask = ask_of(question, model, usual_output=usual, short_limit=limit)
    fit(ask, router.fleet.pool(model).limit, cuts_output=router.settings.cut_output)
    answer = shown_answer(router.explain(ask, now))
    # Nothing is asked of these, as if they were not there; but somebody meant them to serve it.
    strays = (w for w in router.fleet if w.model == model and w.strays)
    scores = (*answer.scores, *(Score(w.name, 0.0, note=w.why or "down") for w in strays))
    return answer.model_copy(update={"scores": scores})


def ask_of(question: Question, model: str, *, usual_output: int, short_limit: int) -> RequestInfo:
    """Make the ask that such a request would become, were it a chat."""
    limit = question.max_tokens
    tokens = question.prompt_tokens
    ask = RequestInfo(
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
    ask.long = ask.budget > short_limit
    return ask
