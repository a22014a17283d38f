"""A place in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from proxy.core.fleet.leases import Attempts, CacheWait
from proxy.core.model.types import RequestInfo


@dataclass(slots=True, eq=False)
class Ticket:
    info: RequestInfo
    attempts: Attempts
    since: float
    deadline: float  # refused then
    for_client: bool  # the deadline is that of the client
    key: float  # the least of a tenant and class goes first: see `urgency`
    removed: bool = False
    cache_wait: CacheWait | None = None
    cache_due: float = inf  # when the slot was predicted
    cache_until: float = inf  # it waits for a cache no longer
    aged: bool = False  # went ahead of its class by age
