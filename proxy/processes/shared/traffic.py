"""What all processes are asked: the tide of longs and shorts that the pools' reserve follows."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from proxy.processes.shared.shared_memory import LIFE, PLACES, ProcessSheet, TrafficRow

if TYPE_CHECKING:
    from proxy.core.router import Router
    from proxy.processes.shared.load import SharedLoad

TAKE_S = 0.05
NOTHING = TrafficRow()


class TrafficPeer:
    """Another process's say."""

    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self._life = 0
        self._read: dict[int, TrafficRow] = {}

    def grown(self, at: int) -> TrafficRow:
        """Say what was asked there since the last time."""
        if (life := self.sheet.count(LIFE)) != self._life:
            self._life = life
            self._read.clear()
        tide, before = self.sheet.read_tide(at), self._read.get(at, NOTHING)
        self._read[at] = tide
        return TrafficRow(
            tide.shorts - before.shorts, tide.longs - before.longs, tide.long_s - before.long_s
        )


class SharedTraffic:
    """Shares the traffic of all models."""

    def __init__(self, router: Router, sharing: SharedLoad) -> None:
        self._router = router
        self._sheet = sharing.sheet
        self._peers = [TrafficPeer(peer.sheet) for peer in sharing.peers]
        self._next = 0.0

    def tell(self) -> None:
        """Say nothing at the end of a turn: it is early enough when it is taken."""

    def take(self, now: float) -> None:
        """Say what was asked here, and take what was asked elsewhere."""
        if now < self._next:
            return
        self._next = now + TAKE_S
        own: dict[int, TrafficRow] = {}
        for model, traffic in self._router.traffic.items():
            at = crc32(model.encode(errors="replace")) % PLACES
            shorts, longs, long_s = own.get(at, NOTHING)
            own[at] = TrafficRow(
                shorts + traffic.shorts_ever,
                longs + traffic.longs_ever,
                long_s + traffic.long_s_ever,
            )
        for at, tide in own.items():
            self._sheet.write_tide(at, tide)
        for model in self._router.fleet.models():
            at = crc32(model.encode(errors="replace")) % PLACES
            for peer in self._peers:
                tide = peer.grown(at)
                if tide != NOTHING:
                    self._router.traffic_of(model).saw_elsewhere(now, *tide)
