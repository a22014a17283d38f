"""What replicas send each other: changes of the sheets of their processes.

Numbers are totals, not differences, so an update may be applied twice. Workers are named, because
each host numbers them in its own way. Times are those of the sender's clock.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Load: TypeAlias = tuple[tuple[int, ...], float]  # charges, and when the next progress is due
Breaker: TypeAlias = tuple[float, tuple[bool, bool, float, int, int, float, str]]
Front: TypeAlias = tuple[int, float, float, float]
Last: TypeAlias = tuple[float, bool, int]
Traffic: TypeAlias = tuple[int, int, float]
Shares: TypeAlias = tuple[float, float, float]  # one number per class
Usage: TypeAlias = tuple[int, int, Shares, Shares, Shares]
Drained: TypeAlias = tuple[float, bool, bool]  # time of day, whether it drains, and at once
Settled: TypeAlias = dict[int, Shares]  # charges of processes, by tenant mark


class ProcessChanges(msgspec.Struct, array_like=True):
    """Changes of a process's sheet, or all of it."""

    index: int
    life: int  # differs after a restart of the process
    waiting: int = 0
    loads: dict[str, Load] = {}
    breakers: dict[str, Breaker] = {}
    fronts: dict[int, Front] = {}
    lasts: dict[int, Last] = {}
    traffic: dict[int, Traffic] = {}
    usage: dict[int, Usage] = {}
    floors: tuple[float, ...] | None = None
    prefixes: list[tuple[str, tuple[int, ...]]] = []


class Update(msgspec.Struct, array_like=True):
    """One message of a replica."""

    member: str
    number: int  # one more than that of the member's last update
    clock: float
    whole: bool = False
    wants_whole: bool = False  # of the others
    leaves: bool = False
    heard: dict[str, int] = {}  # the last number of each other member
    processes: list[ProcessChanges] = []
    gone: list[int] = []  # processes that ended
    history: dict[str, Settled] = {}  # of processes that ended for good, on any host
    drains: dict[str, Drained] = {}  # by the worker's name in the fleet file
    responses: list[tuple[str, str, str]] = []  # stored responses: id, worker, tenant
    folded: Settled = {}  # the sum of earlier processes, which are named next
    folded_names: list[str] = []


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Update).decode
