"""A fleet under load and faults: each request has one end.

Afterwards no charge, task, socket or object is left.

`python -m benchmarks.soak` does the same for any time, with the router in another process.
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
from tests.faults.batch_run import BatchRun
from tests.faults.clients import LEFT, REFUSED, TORN, WHOLE, ClientLoad
from tests.faults.disk import LocalDisk
from tests.faults.faulty_fleet import BATCH_TENANT, KEYS, FaultyFleet
from tests.proxy.certificates import Authority
from tests.proxy.wire.site import eventually, sockets

CLIENTS, SECONDS, CALM_S = 24, 3.0, 60.0
# Some tickets stay in the deadline list for a while, with their requests; a connection that was
# just reset may be in its last turn.
ALLOWED_LEFT = {"Ticket": 65, "RequestInfo": 65}
ALLOWED_LEFT_DEFAULT = 2
MIN_SENT, MIN_OF_OUTCOME = 2 * max(ALLOWED_LEFT.values()), 3  # requests; of each outcome


@pytest.mark.parametrize(("seed", "guarded"), [(1, False), (2, True)], ids=["open", "guarded"])
async def test_each_request_has_one_end_and_nothing_is_left_over(
    seed: int, guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarded: with tenants, TLS, admission and a batch, on a disk that fills up at times."""
    authority = Authority(tmp_path / "certificates") if guarded else None
    tls = authority.client() if authority else None
    fleet = FaultyFleet(seed, authority=authority)
    look_up = DnsSource._look_up

    async def failing_look_up(self: DnsSource) -> set[str]:
        if not fleet.names_resolve:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer from any server")
        return await look_up(self)

    monkeypatch.setattr(DnsSource, "_look_up", failing_look_up)
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.2)  # shortens the pause before a retry
    tasks, open_before = asyncio.all_tasks(), sockets()
    await fleet.start()
    source = tmp_path / "fleet.yaml"
    batches = tmp_path / "batches" if guarded else None
    source.write_text(fleet.fleet(tenants=guarded, batches=batches))
    app = App(load(source), source)
    await app.start()
    workers = set(app.fleet.roster)
    before = audit.objects()
    batch = BatchRun(app.url, seed, tls) if tls else None
    try:
        await eventually(lambda: sum(w.up for w in app.fleet.roster) == 7, within=CALM_S)
        workers |= set(app.fleet.roster)
        if batch is not None:
            await batch.begin()
        clients = await load_with_faults(fleet, app, seed, tls)
        workers |= set(app.fleet.roster)
        if batch is not None:
            async with asyncio.timeout(2 * CALM_S):  # failed lines pause for up to a minute
                while not await batch.is_done():  # noqa: ASYNC110  # no event for this
                    await asyncio.sleep(0.05)
            await batch.judge()
            await batch.close()
        await eventually(
            lambda: not audit.unfinished(app, workers),
            lambda: audit.unfinished(app, workers),
            within=CALM_S,
        )
        reconcile(app, clients)
        # The last connections and transports end with the loop's next turns.
        await asyncio.sleep(0.1)
        grown = audit.objects() - before
        grown.pop("WorkerConnection", None)
        left = {
            kind: number
            for kind, number in grown.items()
            if number > ALLOWED_LEFT.get(kind, ALLOWED_LEFT_DEFAULT)
        }
        assert left == {}
        # All workers recover without help.
        await eventually(
            lambda: all(w.up for w in app.fleet.roster),
            lambda: [w.name for w in app.fleet.roster if not w.up],
            within=CALM_S,
        )
        calm_clients = ClientLoad(app.wire.port, seed + 100, keys=clients.keys, tls=tls)
        until = time.monotonic() + 1.0
        await calm_clients.play(
            0,
            lambda: calm_clients.sent >= 20 or (calm_clients.sent > 0 and time.monotonic() > until),
        )
        assert calm_clients.wrong == []
        assert calm_clients.outcomes[WHOLE] + calm_clients.outcomes[LEFT] == calm_clients.sent > 0
    finally:
        await app.stop()
        await fleet.stop()
    assert fleet.faults() == []
    await eventually(
        lambda: asyncio.all_tasks() <= tasks,
        lambda: f"tasks are left: {asyncio.all_tasks() - tasks}",
    )
    await eventually(lambda: sockets() <= open_before, lambda: "sockets are left")


async def load_with_faults(
    fleet: FaultyFleet, app: App, seed: int, tls: ssl.SSLContext | None = None
) -> ClientLoad:
    """Run clients while faults are injected; all faults are undone at the end."""
    keys = tuple(KEYS.values()) if app.router.tenants else ()
    clients = ClientLoad(app.wire.port, seed, keys=keys, tls=tls)
    until = time.monotonic() + SECONDS

    def enough() -> bool:
        kinds = min(clients.outcomes[WHOLE], clients.outcomes[LEFT])
        failed = clients.outcomes[REFUSED] + clients.outcomes[TORN]
        return clients.sent > MIN_SENT and kinds > MIN_OF_OUTCOME and failed > 0

    def over() -> bool:
        """Return whether the load ran long enough; a slow machine runs longer."""
        late_s = time.monotonic() - until
        return late_s > CALM_S or (late_s > 0 and enough())

    async def inject() -> None:
        while not over():
            await fleet.inject_fault(fleet.dice.random() * 1.0)

    async def fill() -> None:
        """Fill the disk until the batches notice; afterwards it fills at times."""
        if app.batches is not None:
            disk = LocalDisk(app.batches)
            await disk.fill_until_noticed(CALM_S)
            fleet.disk = disk

    # Two faults at a time.
    requests = (clients.play(n, over) for n in range(CLIENTS))
    await asyncio.gather(fill(), inject(), inject(), *requests)
    assert clients.wrong == []
    assert enough(), clients.outcomes
    assert clients.outcomes[REFUSED] + clients.outcomes[TORN] > 0
    return clients


def reconcile(app: App, clients: ClientLoad) -> None:
    """Compare the router's counts with the clients': every request once, by outcome."""
    counted = audit.requests_by_status(app, without=BATCH_TENANT)
    answered = clients.sent - clients.outcomes[LEFT]
    gone = counted.pop(499, 0)
    assert gone <= clients.outcomes[LEFT]
    assert answered <= counted.total() <= clients.sent - gone
    assert (
        clients.outcomes[WHOLE] <= counted[200] <= clients.outcomes[WHOLE] + clients.outcomes[LEFT]
    )
