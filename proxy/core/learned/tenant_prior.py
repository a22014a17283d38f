"""What is taken of a tenant of which nothing was learnt: the rates that tenants have in common.

Each tenant's prompts and answers teach its own rates alone, so that no tenant changes what another
is charged. A tenant without data of its own is taken to be like the median of the others: of
tenants, not of requests, so that a flood counts as one tenant. What was assumed before anything
was seen has a vote too, and a second one where the votes would be even: no single tenant decides.

Cost: the median of at most sixteen tenants' rates, again after an eighth more votes. How it fails:
a fleet of many languages has no median that suits them all, and then each tenant's first requests
are estimated as badly as on a new fleet.
"""

from __future__ import annotations

from proxy.core.learned.bytes_per_token import LearnedSizes
from proxy.core.learned.media_tokens import KINDS

MOST_VOTERS = 15  # tenants whose rates are kept: the last to learn
MOST_VOTES_OLD = 64  # votes after which the median is made anew


class TenantPrior:
    """Of one model on one route."""

    __slots__ = ("_common", "_due", "_voters", "_votes", "base")

    def __init__(self) -> None:
        self.base = LearnedSizes()  # what is assumed, or was learnt while there were no tenants
        self._voters: dict[str, LearnedSizes] = {}
        self._votes = 0
        self._due = 1
        self._common = self.base

    def vote(self, tenant: str, own: LearnedSizes) -> None:
        """Count a tenant's rates, which may go on changing."""
        voters = self._voters
        voters.pop(tenant, None)
        voters[tenant] = own
        if len(voters) > MOST_VOTERS:
            del voters[next(iter(voters))]
        self._votes += 1

    def common(self) -> LearnedSizes:
        """Return the rates that tenants have in common. Not to be changed."""
        if self._votes >= self._due:
            self._due = self._votes + min(self._votes // 8 + 1, MOST_VOTES_OLD)
            self._common = self._median()
        return self._common

    def first(self) -> LearnedSizes:
        """Return rates for a tenant to begin with, which it may change."""
        return _copy(self.common())

    @property
    def bytes_per_token(self) -> float | None:
        """What is known of text; None if nothing is."""
        if self.base.weight or any(voter.weight for voter in self._voters.values()):
            return self.common().bytes_per_token
        return None

    def _median(self) -> LearnedSizes:
        base = self.base
        prompts = [each for each in self._voters.values() if each.seen]
        outputs = [each for each in self._voters.values() if each.outputs]
        found = _copy(base)
        found.fixed = _middle([each.fixed for each in prompts], base.fixed)
        found.per_byte = _middle([each.per_byte for each in prompts], base.per_byte)
        found.per_tool = _middle([each.per_tool for each in prompts], base.per_tool)
        found.output = _middle([each.output for each in outputs], base.output)
        for kind in KINDS:
            voters = [each.media for each in self._voters.values() if each.media.seen[kind]]
            sizes = [media.means[kind] for media in voters]
            found.media.take(kind, _middle(sizes, base.media.means[kind]))
        return found


def _copy(learnt: LearnedSizes) -> LearnedSizes:
    """Return the same rates, as uncertain as at first."""
    found = LearnedSizes(learnt.fixed, learnt.per_byte, learnt.per_tool)
    found.output = learnt.output
    found.media = learnt.media.copy()
    return found


def _middle(votes: list[float], base: float) -> float:
    """Return the median of an odd number of votes: those, and one or two for what is assumed."""
    ordered = sorted([*votes, *[base] * (1 + len(votes) % 2)])
    return ordered[len(ordered) // 2]
