"""What can be wrong between fields that are each right by themselves.

A check sees the parts of a file that could be read, so that one mistake does not hide the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from proxy.config.models import RouterConfig, RoutingConfig, WorkerConfig
from proxy.errors import Problem

# What `up` says itself, and from where in the file it takes it.
OURS = {
    "--host": "comes from the worker's url",
    "--port": "comes from the worker's url",
    "--model": "comes from launch.model",
    "--served-model-name": "comes from the worker's model",
    "--api-key": "comes from the worker's api_key",
}
FOR_POLICIES = {
    "--scheduler-cls": "is what launch.policies stands for",
    "--additional-config": "is where launch.policies is written to",
}
# Names of this machine that can't share a port.
HERE = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"})  # noqa: S104 - only compared


@dataclass(frozen=True, slots=True)
class Draft:
    """The parts of a fleet file that are right by themselves; `workers` by their place in it."""

    workers: Mapping[int, WorkerConfig] = field(default_factory=dict)
    router: RouterConfig | None = None
    routing: RoutingConfig | None = None


Check = Callable[[Draft], Iterable[Problem]]


def addresses(draft: Draft) -> Iterator[Problem]:
    """Check that every worker has an address, and no two things share one."""
    taken: dict[tuple[str, int], str] = {}
    if router := draft.router:
        for path, host, port in (
            ("router.port", router.host, router.port),
            ("router.admin.port", router.admin.host, router.admin.port),
        ):
            if port and (other := taken.setdefault(_place(host, port), path)) != path:
                yield Problem(path, f"{port}: {other} is the same; give one of them another")
    for index, worker in draft.workers.items():
        path = f"workers[{index}].url"
        if worker.address is None:
            if worker.launch is None:
                yield Problem(
                    path,
                    "is missing; give it as http://host:port, or say under launch how "
                    "`vllm-sched up` starts the worker",
                )
        elif (other := taken.setdefault(_place(*worker.address), path)) != path:
            yield Problem(
                path, f"{worker.url!r}: {other} is at the same place; correct one of them"
            )


def _place(host: str, port: int) -> tuple[str, int]:
    return ("here" if host in HERE else host.lower(), port)


def names(draft: Draft) -> Iterator[Problem]:
    """Check that no two workers have one name."""
    first: dict[str, int] = {}
    for index, worker in draft.workers.items():
        if (other := first.setdefault(worker.name, index)) != index:
            yield Problem(
                f"workers[{index}].name",
                f"{worker.name!r}: workers[{other}] is called that too; rename one of them",
            )


def launches(draft: Draft) -> Iterator[Problem]:
    """Check that no flag contradicts what the rest of the file says."""
    for index, worker in draft.workers.items():
        if worker.launch is None:
            continue
        path = f"workers[{index}].launch.args"
        ours = OURS | (FOR_POLICIES if worker.launch.policies else {})
        for place, flag in enumerate(worker.launch.args):
            name = flag.partition("=")[0].replace("_", "-")
            if name in ours:
                yield Problem(f"{path}[{place}]", f"{name!r}: {ours[name]}; leave it out here")
        told, flagged = worker.max_model_len, worker.flag_max_model_len
        if told and flagged and told > flagged:
            why = f"--max-model-len {flagged}: less than max_model_len, {told}; drop one of them"
            yield Problem(path, why)


def limits(draft: Draft) -> Iterator[Problem]:
    """Check that what is called short and long fits the workers for it."""
    if draft.routing is None:
        return
    limit = draft.routing.short_limit
    for model in dict.fromkeys(worker.model for worker in draft.workers.values()):
        same = [worker for worker in draft.workers.values() if worker.model == model]
        if len({worker.role for worker in same}) == 1:
            continue  # there is no other pool to tell apart
        if (short := _largest(same, "short")) and short[0] < limit:
            yield Problem(
                "routing.short_limit",
                f"{limit}: no short worker holds so much, the largest ({short[1]}) {short[0]} "
                f"tokens; give {short[0]} or less, or that worker a larger max_model_len",
            )
        if (long := _largest(same, "long")) and long[0] <= limit:
            yield Problem(
                "routing.short_limit",
                f"{limit}: nothing that fits would be long, the largest long worker ({long[1]}) "
                f"holds {long[0]} tokens; give less",
            )


def _largest(workers: Iterable[WorkerConfig], role: str) -> tuple[int, str] | None:
    """Return what the workers of a role hold at most; None where one of them must be asked."""
    known = [(w.stated_max_model_len or 0, w.name) for w in workers if w.role == role]
    return max(known) if known and all(length for length, _ in known) else None


def sizes(draft: Draft) -> Iterator[Problem]:
    """Check that a body that is accepted can also be queued."""
    if (router := draft.router) is None:
        return
    if router.queue.max_bytes < router.max_body_bytes:
        yield Problem(
            "router.queue.max_bytes",
            f"{router.queue.max_bytes}: a body may have router.max_body_bytes, "
            f"{router.max_body_bytes}, and could never wait; give at least that",
        )


CHECKS: tuple[Check, ...] = (addresses, names, launches, limits, sizes)
