"""The live workers of one model, grouped by role and context length.

A decision looks at every worker of a small group. A large group is sorted by the rule's load key: a
decision looks at its first workers and at prefix holders.

Cost: a change in load moves one entry of a sorted list.

How it fails: the first workers need not include the best one for a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from proxy.core.fleet.worker import NO_LIMIT, Group, Worker
from proxy.core.model.role import Role
from proxy.core.model.types import RequestInfo

MAX_PREFIX_HOLDERS = 4  # that a decision looks at


class Pool:
    """The live workers of one model. Changes make a new pool."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.all = [worker for worker in workers if worker.is_live]
        self.members = frozenset(self.all)
        self.bits = sum(worker.bit for worker in self.all)
        self.prefills = [worker for worker in workers if worker.can_prefill]
        self.for_longs = [worker for worker in self.all if worker.role is not Role.SHORT]
        self.for_shorts = [worker for worker in self.all if worker.role is not Role.LONG]
        by_role = Counter(worker.role for worker in self.all)
        self.num_decodes = by_role[Role.DECODE]
        self.num_shorts, self.num_longs = by_role[Role.SHORT], by_role[Role.LONG]
        self.mixed = bool(self.num_shorts or self.num_longs) and len(by_role) > 1
        self.groups = _groups_of(self.all)
        self.ranked = any(group.ranked for group in self.groups)
        limits = sorted({group.context_limit for group in self.groups})
        self.smallest_context, self.largest_context = (limits[0], limits[-1]) if limits else (0, 0)
        self.boundaries = limits[:-1]
        # Includes workers that are down or draining.
        whole = [worker.context_limit for worker in workers if worker.role.can_serve]
        self.context_limit = max(whole, default=NO_LIMIT)

    def groups_for(self, info: RequestInfo) -> list[Group]:
        """Return the groups that can hold a request.

        An uncertain request goes to the largest context.
        """
        needs, error = info.needed_context, info.prompt_error
        sure = [group for group in self.groups if needs + error <= group.context_limit]
        if sure or needs - error > self.largest_context:
            return sure
        return [group for group in self.groups if group.context_limit == self.largest_context]

    def available_workers(
        self,
        info: RequestInfo,
        now: float,
        ejected: Collection[Worker],
        holders: Collection[Worker],
    ) -> list[Worker]:
        fits_all = info.needed_context + info.prompt_error <= self.smallest_context
        if fits_all and not self.ranked:  # the usual case
            groups = self.groups
            available = [worker for worker in self.all if not worker.unavailable]
        else:
            groups = self.groups_for(info)
            available = [worker for group in groups for worker in group.candidates()]
        if not ejected and not holders:
            return available
        for worker in (*ejected, *holders):
            if (
                worker in self.members
                and worker.accepts(now)
                and worker not in available
                and any(worker.context_limit == group.context_limit for group in groups)
            ):
                available.append(worker)
        return available


def _groups_of(workers: Iterable[Worker]) -> list[Group]:
    """Return the workers by role and context length; set `Worker.ranked_in`."""
    members: dict[tuple[Role, int], list[Worker]] = {}
    for worker in workers:
        members.setdefault((worker.role, worker.context_limit), []).append(worker)
    groups = [Group(role, limit, workers) for (role, limit), workers in members.items()]
    for group in groups:
        if group.ranked:
            for worker in group.workers:
                worker.ranked_in += (group,)
    return groups


NO_POOL = Pool(())
