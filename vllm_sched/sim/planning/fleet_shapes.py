"""Candidate fleets: workers by role, the boundary between short and long, the policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from proxy.core.model.role import Role
from proxy.core.model.settings import HEADROOM
from proxy.core.router import RouterSettings
from vllm_sched.sim.fleet.aggregate_flow import PlacedWorker
from vllm_sched.sim.types import WorkerModel

ONE_POOL, SHORT_LONG, PREFILL_DECODE = "one pool", "short/long", "prefill/decode"
SHORT_APART = "short + prefill/decode"
FAMILIES: Final = (ONE_POOL, SHORT_LONG, PREFILL_DECODE, SHORT_APART)
DEFAULT, LONG_PROMPT, CHUNKS, BOTH = "default", "long_prompt", "chunk_budget", "both"
POLICIES: Final = (DEFAULT, LONG_PROMPT, CHUNKS, BOTH)
CONTEXT_STEP: Final = 1024  # contexts are multiples of this
# Roles with long prompts, and roles with both prompts and decodes.
LONG_PROMPT_ROLES: Final = (Role.GENERAL, Role.LONG, Role.PREFILL)
MIXED_STEP_ROLES: Final = (Role.GENERAL, Role.LONG, Role.SHORT, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    general: int = 0
    short: int = 0
    long: int = 0
    prefill: int = 0
    decode: int = 0
    short_limit: int = 10_000  # prompt + output tokens above which a request is long
    disaggregate_above: int | None = None
    policy: str = DEFAULT
    itl_ms: int = 100  # for chunk_budget

    @property
    def family(self) -> str:
        if self.prefill:
            return SHORT_APART if self.short else PREFILL_DECODE
        return SHORT_LONG if self.short else ONE_POOL

    @property
    def workers(self) -> int:
        return self.general + self.short + self.long + self.prefill + self.decode

    @property
    def pools(self) -> dict[Role, int]:
        counts = {
            Role.GENERAL: self.general,
            Role.SHORT: self.short,
            Role.LONG: self.long,
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
        }
        return {role: count for role, count in counts.items() if count}

    def with_more(self, role: Role, change: int) -> FleetShape:
        counts: dict[str, Any] = {role.value: self.pools[role] + change}
        return replace(self, **counts)

    def __str__(self) -> str:
        text = " + ".join(f"{count} {role.value}" for role, count in self.pools.items())
        if self.short:
            text += f", long above {self.short_limit:,}"
        if self.prefill and self.disaggregate_above is not None:
            text += f", handed over above {self.disaggregate_above:,}"
        names = " and ".join(self.policies_of(role=None))
        return f"{text}; {names or 'no policy'}"

    def policies_of(self, role: Role | None) -> dict[str, dict[str, Any]]:
        """Return the policies of a role's workers, or of all roles for None."""
        policies: dict[str, dict[str, Any]] = {}
        roles = tuple(self.pools) if role is None else (role,)
        if self.policy in (LONG_PROMPT, BOTH) and any(role in LONG_PROMPT_ROLES for role in roles):
            policies["long_prompt"] = {}
        if self.policy in (CHUNKS, BOTH) and any(role in MIXED_STEP_ROLES for role in roles):
            policies["chunk_budget"] = {"itl_ms": self.itl_ms}
        return policies

    def context_of(self, role: Role, whole: int) -> int:
        if role is not Role.SHORT:
            return whole
        return min(-(-HEADROOM * self.short_limit // CONTEXT_STEP) * CONTEXT_STEP, whole)

    def place_workers(
        self, machine: WorkerModel, prefill_machine: WorkerModel | None = None
    ) -> list[PlacedWorker]:
        """Return the workers; `prefill_machine` is for prefill workers, if it differs."""
        workers: list[PlacedWorker] = []
        for role, count in self.pools.items():
            model = prefill_machine or machine if role is Role.PREFILL else machine
            model = replace(
                model,
                max_model_len=self.context_of(role, model.max_model_len),
                policies=self.policies_of(role),
                transfers=role in (Role.PREFILL, Role.DECODE),
            )
            workers += [
                PlacedWorker(replace(model, name=f"{role.value}-{index}"), role)
                for index in range(count)
            ]
        return workers

    def gpus(self, machine: WorkerModel, prefill_machine: WorkerModel | None = None) -> int:
        prefill_gpus = (prefill_machine or machine).gpus
        return self.prefill * prefill_gpus + (self.workers - self.prefill) * machine.gpus

    def settings(self) -> RouterSettings:
        return RouterSettings(
            short_limit=self.short_limit,
            transfer=bool(self.prefill),
            disaggregate_above=self.disaggregate_above,
        )

    def to_fleet(
        self, model: str, machine: WorkerModel, prefill_machine: WorkerModel | None = None
    ) -> dict[str, Any]:
        workers = [
            {
                "name": worker.model.name,
                "role": worker.role.value,
                "profile": worker.model.profile,
                "launch": _launch(worker.model),
            }
            for worker in self.place_workers(machine, prefill_machine)
        ]
        routing: dict[str, Any] = {"policy": "adaptive", "short_limit": self.short_limit}
        if self.prefill and self.disaggregate_above is not None:
            routing["disaggregate_above"] = self.disaggregate_above
        transfer: Mapping[str, Any] = {"transfer": "nixl"} if self.prefill else {}
        return {"model": model, **transfer, "workers": workers, "routing": routing}


def _launch(model: WorkerModel) -> dict[str, Any]:
    args = [f"--tensor-parallel-size={model.gpus}"] if model.gpus > 1 else []
    args += [
        *model.flags,
        f"--max-model-len={model.max_model_len}",
        f"--max-num-batched-tokens={model.max_num_batched_tokens}",
        f"--max-num-seqs={model.max_num_seqs}",
    ]
    policies = {name: dict(settings) for name, settings in model.policies.items()}
    return {"args": args, **({"policies": policies} if policies else {})}


# Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHints:
    boundaries: Mapping[int, float]  # tokens -> share of the work above
    prefill_share: float  # of the GPUs' work
    gpus: int = 1  # of a worker
    prefill_gpus: int = 1  # of a prefill worker
    itl_ms: int = 100


def shapes(family: str, gpus: int, hints: SplitHints) -> Iterator[FleetShape]:
    """Yield the promising splits of a family into pools, the likeliest first."""
    workers = gpus // hints.gpus
    if family == ONE_POOL:
        splits = iter([FleetShape(general=workers)] if workers else [])
    elif family == PREFILL_DECODE:
        splits = _prefill_decode(gpus, hints)
    else:
        split = _short_long if family == SHORT_LONG else _short_apart
        splits = split(workers, hints) if workers > 1 else iter(())
    return (replace(shape, itl_ms=hints.itl_ms) for shape in splits)


def _prefill_decode(gpus: int, hints: SplitHints) -> Iterator[FleetShape]:
    max_prefills = (gpus - hints.gpus) // hints.prefill_gpus  # leaves a decode worker
    if max_prefills > 0:
        for prefills in _near(hints.prefill_share * gpus / hints.prefill_gpus, max_prefills + 1):
            decodes = (gpus - prefills * hints.prefill_gpus) // hints.gpus
            yield FleetShape(prefill=prefills, decode=decodes)


def _short_long(workers: int, hints: SplitHints) -> Iterator[FleetShape]:
    for limit, share in hints.boundaries.items():
        for longs in _near(share * workers, workers):
            yield FleetShape(short=workers - longs, long=longs, short_limit=limit)


def _short_apart(workers: int, hints: SplitHints) -> Iterator[FleetShape]:
    """Yield only two counts per pool: this family has many shapes and is rarely the best."""
    for limit, share in hints.boundaries.items():
        for rest in [count for count in _near(share * workers, workers) if count > 1][:2]:
            pools = FleetShape(short=workers - rest, short_limit=limit)
            for prefills in _near(hints.prefill_share * rest, rest)[:2]:
                yield replace(pools, prefill=prefills, decode=rest - prefills)


def _near(wanted: float, workers: int) -> list[int]:
    """Return counts near `wanted`, with more above than below."""
    step = max(round(workers / 16), 1)
    middle = round(wanted)
    counts = (middle, middle + step, middle - step, middle + 2 * step)
    return list(dict.fromkeys(min(max(count, 1), workers - 1) for count in counts))
