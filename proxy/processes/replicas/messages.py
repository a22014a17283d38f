"""What replicas send each other: changes of the sheets of their processes.

Numbers are totals, not differences, so an update may be applied twice. Workers are named, because
each host numbers them in its own way. Times are those of the sender's clock.

The decoder refuses a message with a number that does not fit its place in a sheet.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from proxy.core.fleet.worker_load import NO_LOAD
from proxy.processes.shared.process_sheet import CLASSES, FRONTS, LOG, PLACES, WORD

MAX_INT = 2**63 - 1
Int: TypeAlias = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
Mark: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INT)]  # of a tenant
FrontIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=FRONTS)]
PlaceIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=PLACES)]
Charges: TypeAlias = Annotated[
    tuple[Int, ...], Meta(min_length=len(NO_LOAD), max_length=len(NO_LOAD))
]
Words: TypeAlias = Annotated[bytes, Meta(max_length=LOG * WORD)]
Load: TypeAlias = tuple[Charges, float]  # and when the next progress is due
Breaker: TypeAlias = tuple[float, tuple[bool, bool, float, Int, Int, float, str]]
Front: TypeAlias = tuple[Int, float, float, float]
Last: TypeAlias = tuple[float, bool, Int]
Traffic: TypeAlias = tuple[Int, Int, float]
# One number per class.
Shares: TypeAlias = Annotated[tuple[float, ...], Meta(min_length=CLASSES, max_length=CLASSES)]
Usage: TypeAlias = tuple[Int, Int, Shares, Shares, Shares]
Drained: TypeAlias = tuple[float, bool, bool]  # time of day, whether it drains, and at once
Settled: TypeAlias = dict[Mark, Shares]  # charges of processes, by tenant


class ProcessChanges(msgspec.Struct, array_like=True):
    """Changes of a process's sheet, or all of it."""

    index: int
    life: int  # differs after a restart of the process
    waiting: Int = 0
    loads: dict[str, Load] = {}
    breakers: dict[str, Breaker] = {}
    fronts: dict[FrontIndex, Front] = {}
    lasts: dict[PlaceIndex, Last] = {}
    traffic: dict[PlaceIndex, Traffic] = {}
    usage: dict[Mark, Usage] = {}
    floors: Shares | None = None
    prefixes: Words = b""  # as in the log


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
