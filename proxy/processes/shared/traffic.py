"""Shares the traffic of long and short requests, which the pools' reserve follows."""

from __future__ import annotations

from zlib import crc32

from proxy.core.router import Router
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.process_sheet import LIFE, PLACES, ProcessSheet, TrafficRow

EXCHANGE_INTERVAL_S = 0.05
NO_TRAFFIC = TrafficRow()


class TrafficPeer:
    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self._life = 0
        self._read: dict[int, TrafficRow] = {}

    def grown(self, at: int) -> TrafficRow:
        """Return the growth at an index since the last call."""
        if (life := self.sheet.count(LIFE)) != self._life:
            self._life = life
            self._read.clear()
        traffic_row, before = self.sheet.read_traffic(at), self._read.get(at, NO_TRAFFIC)
        self._read[at] = traffic_row
        return TrafficRow(
            traffic_row.shorts - before.shorts,
            traffic_row.longs - before.longs,
            traffic_row.long_s - before.long_s,
        )


class SharedTraffic:
    def __init__(self, router: Router, shared_load: SharedLoad) -> None:
        self._router = router
        self._sheet = shared_load.sheet
        self._peers = shared_load.peers_of(TrafficPeer)
        self._next = 0.0

    def publish(self) -> None:
        """Do nothing: `read_peers` also writes."""

    def read_peers(self, now: float) -> None:
        """Write this process's traffic and add the growth in other processes."""
        if now < self._next:
            return
        self._next = now + EXCHANGE_INTERVAL_S
        own: dict[int, TrafficRow] = {}
        for model, traffic in self._router.placer.traffic.items():
            at = crc32(model.encode(errors="replace")) % PLACES
            shorts, longs, long_s = own.get(at, NO_TRAFFIC)
            own[at] = TrafficRow(
                shorts + traffic.shorts_ever,
                longs + traffic.longs_ever,
                long_s + traffic.long_s_ever,
            )
        for at, traffic_row in own.items():
            self._sheet.write_traffic(at, traffic_row)
        for model in self._router.fleet.roster.models():
            at = crc32(model.encode(errors="replace")) % PLACES
            for peer in self._peers:
                traffic_row = peer.grown(at)
                if traffic_row != NO_TRAFFIC:
                    self._router.placer.traffic[model].record_remote(now, *traffic_row)
