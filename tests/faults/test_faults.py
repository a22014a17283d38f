"""A fleet under load while everything goes wrong with it: each request has one end.

And when it is over, nothing is left of any: no charge, task, socket, nor object.

`python -m benchmarks.soak` does the same for as long as one likes, with the router in a process of
its own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path

import pytest

from proxy.batches import scheduler
from proxy.config import load
from proxy.discovery.dns import DnsSource
from proxy.setup.app import App
from tests.faults import audit
from tests.faults.crowd import LEFT, REFUSED, TORN, WHOLE, Crowd
from tests.faults.disk import DiskHere
from tests.faults.night import Night
from tests.faults.troupe import KEYS, NIGHT, Troupe
from tests.proxy.certificates import Authority
from tests.proxy.wire.site import eventually, sockets

CLIENTS, SECONDS, CALM_S = 24, 3.0, 60.0
# Some tickets are known by their deadlines for a while, and their asks with them; a connection
# that was reset just now may be in its last turn.
KEPT = {"Ticket": 65, "RequestInfo": 65}
KEPT_OF_ANY = 2
ENOUGH, FEW = 2 * max(KEPT.values()), 3  # requests; of each that became of them


@pytest.mark.parametrize(("seed", "guarded"), [(1, False), (2, True)], ids=["open", "guarded"])
async def test_each_request_has_one_end_and_nothing_is_left(
    seed: int, guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarded: with tenants, TLS and admission, and with a file of requests run meanwhile.

    The disk fills up, too: at first until it is noticed, and then at times.
    """
    authority = Authority(tmp_path / "certificates") if guarded else None
    tls = authority.client() if authority else None
    troupe = Troupe(seed, authority=authority)
    look_up = DnsSource._look_up

    async def at_times(self: DnsSource) -> set[str]:
        if not troupe.names_resolve:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer from any server")
        return await look_up(self)

    monkeypatch.setattr(DnsSource, "_look_up", at_times)
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.2)  # until it is tried again
    tasks, open_before = asyncio.all_tasks(), sockets()
    await troupe.start()
    source = tmp_path / "fleet.yaml"
    kept = tmp_path / "batches" if guarded else None
    source.write_text(troupe.fleet(tenants=guarded, batches=kept))
    app = App(load(source), source)
    await app.start()
    ever = set(app.fleet.roster)
    before = audit.objects()
    night = Night(app.url, seed, tls) if tls else None
    try:
        await eventually(lambda: sum(w.up for w in app.fleet.roster) == 7, within=CALM_S)
        ever |= set(app.fleet.roster)
        if night is not None:
            await night.begin()
        crowd = await under_fire(troupe, app, seed, tls)
        ever |= set(app.fleet.roster)
        if night is not None:
            async with asyncio.timeout(2 * CALM_S):  # lines that came back rest, for up to a minute
                while not await night.over():  # noqa: ASYNC110  # another asks, of another
                    await asyncio.sleep(0.05)
            await night.judge()
            await night.leave()
        await eventually(
            lambda: not audit.unfinished(app, ever),
            lambda: audit.unfinished(app, ever),
            within=CALM_S,
        )
        reconcile(app, crowd)
        # The last connections and their transports go with the loop's next turns.
        await asyncio.sleep(0.1)
        grown = audit.objects() - before
        grown.pop("WorkerConnection", None)
        left = {
            kind: number for kind, number in grown.items() if number > KEPT.get(kind, KEPT_OF_ANY)
        }
        assert left == {}
        # All comes back by itself.
        await eventually(
            lambda: all(w.up for w in app.fleet.roster),
            lambda: [w.name for w in app.fleet.roster if not w.up],
            within=CALM_S,
        )
        calm = Crowd(app.wire.port, seed + 100, keys=crowd.keys, tls=tls)
        until = time.monotonic() + 1.0
        await calm.play(0, lambda: calm.sent >= 20 or (calm.sent > 0 and time.monotonic() > until))
        assert calm.wrong == []
        assert calm.outcomes[WHOLE] + calm.outcomes[LEFT] == calm.sent > 0
    finally:
        await app.stop()
        await troupe.stop()
    assert troupe.faults() == []
    await eventually(
        lambda: asyncio.all_tasks() <= tasks,
        lambda: f"tasks are left: {asyncio.all_tasks() - tasks}",
    )
    await eventually(lambda: sockets() <= open_before, lambda: "sockets are left")


async def under_fire(
    troupe: Troupe, app: App, seed: int, tls: ssl.SSLContext | None = None
) -> Crowd:
    """Let the crowd ask while things befall the workers; all is well again at the end."""
    keys = tuple(KEYS.values()) if app.router.tenants else ()
    crowd = Crowd(app.wire.port, seed, keys=keys, tls=tls)
    until = time.monotonic() + SECONDS

    def enough() -> bool:
        kinds = min(crowd.outcomes[WHOLE], crowd.outcomes[LEFT])
        troubled = crowd.outcomes[REFUSED] + crowd.outcomes[TORN]
        return crowd.sent > ENOUGH and kinds > FEW and troubled > 0

    def over() -> bool:
        """Whether it was long enough; longer on a machine that got little done meanwhile."""
        late_s = time.monotonic() - until
        return late_s > CALM_S or (late_s > 0 and enough())

    async def befall() -> None:
        while not over():
            await troupe.befalls(troupe.dice.random() * 1.0)

    async def fill() -> None:
        """Fill the disk until somebody has noticed; from then on it is full at times."""
        if app.batches is not None:
            disk = DiskHere(app.batches)
            await disk.is_missed(CALM_S)
            troupe.disk = disk

    # Two troubles at a time.
    asked = (crowd.play(n, over) for n in range(CLIENTS))
    await asyncio.gather(fill(), befall(), befall(), *asked)
    assert crowd.wrong == []
    assert enough(), crowd.outcomes
    assert crowd.outcomes[REFUSED] + crowd.outcomes[TORN] > 0
    return crowd


def reconcile(app: App, crowd: Crowd) -> None:
    """Hold the router's own counts against the clients': every request once, as it ended."""
    counted = audit.counted(app, but=NIGHT)
    answered = crowd.sent - crowd.outcomes[LEFT]
    gone = counted.pop(499, 0)
    assert gone <= crowd.outcomes[LEFT]
    assert answered <= counted.total() <= crowd.sent - gone
    assert crowd.outcomes[WHOLE] <= counted[200] <= crowd.outcomes[WHOLE] + crowd.outcomes[LEFT]
