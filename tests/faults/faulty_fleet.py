"""A fleet of faulty fakes: two general workers, two for prefill, two for decode.

Their KV blocks are counted (`tests.proxy.wire.kv`): blocks read twice, or by the wrong worker, are
a fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from proxy.net.tls import server_context
from tests.faults.disk import Disk
from tests.fuzz.mutate import Mutator
from tests.proxy.certificates import Authority
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script, SlowWire
from tests.proxy.wire.kv import Faults, Kv

ROLES = {
    "g0": "general", "g1": "general", "p0": "prefill", "p1": "prefill", "d0": "decode",
    "d1": "decode",
}  # fmt: skip
DNS_WORKER = "g2"  # discovered by DNS
TLS_WORKER = "g1"  # with an authority
MODEL, MAX_MODEL_LEN = "tiny", 1_000_000
ENDS = ("reset", "close", "stall")
# Faults that the fakes cause themselves. First: the router read half of some garbage and went on.
# Second: a fake that hung finds an abandoned request in its socket, whose blocks were released.
EXPECTED_FAULTS = (
    "bytes came before the last answer was complete",
    "was released before, and is read now",
)
FLEET = """\
model: tiny
discovery:
  dns_every_s: 0.1
  pools: [{{name: found, dns: localhost, port: {port}, role: general}}]
workers:
{workers}
transfer: {{connector: nixl, warmup: false}}
routing: {{disaggregate_above: 1}}
{tenants}router:
{more}  port: {listen}
  processes: {processes}
  admin: {{port: {admin}}}
  drain_s: 2.0
  queue: {{max_requests: 200, max_wait_s: 2.0}}
  fairness: {{standard_age_s: 1.0}}
  retries: {{budget: 0.5}}
  probe: {{interval_s: 0.2, timeout_s: 0.3}}
  timeouts: {{connect_s: 0.3, first_byte_s: 0.6, prefill_s: 0.3, idle_s: 0.6,
             client_idle_s: 3.0, client_header_s: 2.0, request_s: 4.0}}
"""
TENANTS = """\
tenants:
  - {{name: people, class: interactive, key_hashes: ['{people}'], limits: {{concurrency: 64}}}}
  - {{name: jobs, weight: 2, key_hashes: ['{jobs}'], limits: {{tokens_per_minute: 100000000}}}}
  - {{name: night, class: batch, key_hashes: ['{night}']}}
  - {{name: metered, key_hashes: ['{metered}'], limits: {{requests_per_minute: {rpm}}}}}
"""
# Keys of the clients' tenants, and of the batch's tenant.
KEYS = {name: f"key-of-{name}-0123456789" for name in ("people", "jobs")}
BATCH_TENANT = "night"
BATCH_KEY = "key-of-night-0123456789"
METERED_TENANT = "metered"
METERED_KEY = "key-of-metered-0123456789"
METERED_PER_MINUTE = 600


async def half_close(call: Call) -> None:
    """Close the sending half instead of an answer, and keep reading."""
    call.half_close()
    await call.lost.wait()


async def never_ending(call: Call) -> None:
    await call.send(scripts.head(200, (b"content-type", scripts.SSE), (b"x", b"y"))[:-2])
    await call.lost.wait()


class FaultyKv(Kv):
    """The KV accounts, and the current share of failing requests."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)
        self.share = 0.0  # of failing requests
        self.slow_s = 0.0
        self.number = seed * 1000

    def next_faults(self, fake: FakeWorker, role: str) -> Faults:  # noqa: ARG002
        dice = self.dice
        if dice.random() >= self.share:
            return Faults()
        kind = dice.random()
        if kind < 0.3:
            return Faults(before=self._replacement())
        if kind < 0.5:
            return Faults(during=self._replacement())
        return Faults(cut=(dice.randrange(4), dice.choice(ENDS)))

    def _replacement(self) -> Script:
        ready: list[Script] = [
            scripts.reset,
            scripts.hang_up,
            scripts.stall,
            half_close,
            never_ending,
            scripts.error(500),
            scripts.error(503, "busy", (b"Retry-After", b"0")),
            scripts.error(429, "busy"),
            self._garbage,
        ]
        return self.dice.choice(ready)

    async def _garbage(self, call: Call) -> None:
        self.number += 1
        mutator = Mutator(7, self.number)
        pieces = [b"SSH-2.0-x\r\n", *mutator.cuts(b"".join(mutator.answers()))]
        await scripts.raw(*pieces[:20], gap_s=0.001, end=self.dice.choice(ENDS))(call)

    def slowly(self, script: Script) -> Script:
        async def run(call: Call) -> None:
            if self.slow_s:
                await asyncio.sleep(self.dice.random() * self.slow_s)
            await script(call)

        return run


class FaultyFleet:
    def __init__(
        self, seed: int, no_names: Path | None = None, authority: Authority | None = None
    ) -> None:
        self.kv = FaultyKv(seed)
        self._authority = authority  # of the router's and one worker's certificates
        self._no_names = no_names  # a flag file for a router in another process
        self.dice = random.Random(seed + 1)
        self.fakes: dict[str, FakeWorker] = {}
        self.disk: Disk | None = None  # set once it may fill up
        self.names_resolve = True
        self.injected: dict[str, int] = {}
        self._faulty: set[str] = set()

    async def start(self) -> None:
        for name, role in {**ROLES, DNS_WORKER: "general"}.items():
            fake = FakeWorker(name, model=MODEL, max_model_len=MAX_MODEL_LEN)
            if self._authority is not None and name == TLS_WORKER:
                fake.tls = server_context(self._authority.port(name))
            await fake.listen()
            fake.always(self.observed(fake, self.kv.slowly(self.kv.worker(fake, role))))
            self.fakes[name] = fake

    def observed(self, fake: FakeWorker, script: Script) -> Script:  # noqa: ARG002
        """Return a worker's script; a subclass may count its calls."""
        return script

    def fleet(
        self,
        *,
        listen: int = 0,
        admin: int = 0,
        processes: int = 1,
        tenants: bool = False,
        batches: Path | None = None,
        max_requests: int = 8,
        more: str = "",
    ) -> str:
        """Return the fleet file; `batches` also sets an admission limit."""
        keys = {**KEYS, BATCH_TENANT: BATCH_KEY, METERED_TENANT: METERED_KEY}
        hashes = {name: f"sha256:{sha256(key.encode()).hexdigest()}" for name, key in keys.items()}
        if batches is not None:
            more += (
                f"  admission: {{ttft_s: 0.5}}\n  batches: {{path: {batches}, concurrency: 2}}\n"
            )
        ca = ""
        if (authority := self._authority) is not None:
            certificate = authority.port("router")
            more += (
                f"  tls: {{cert_file: {certificate.cert_file}, key_file: {certificate.key_file}}}\n"
            )
            ca = f"worker_tls: {{ca_file: {authority.ca_file}}}\n"
        workers = [
            f"  - {{name: {name}, url: '{self.fakes[name].url}', role: {role}, "
            f"max_requests: {max_requests}}}"
            for name, role in ROLES.items()
        ]
        return FLEET.format(
            port=self.fakes[DNS_WORKER].port, workers="\n".join(workers), listen=listen,
            admin=admin, processes=processes, more=more,
            tenants=ca + (TENANTS.format(**hashes, rpm=METERED_PER_MINUTE) if tenants else ""),
        )  # fmt: skip

    async def stop(self) -> None:
        for fake in self.fakes.values():
            await fake.stop()

    def faults(self) -> list[str]:
        """Return the faults of the router that the workers found."""
        found = [f"{f.name}: {fault}" for f in self.fakes.values() for fault in f.faults]
        return [
            fault
            for fault in (*self.kv.faults, *found)
            if not any(words in fault for words in EXPECTED_FAULTS)
        ]

    def forget(self) -> None:
        """Drop the records of served requests, for long runs."""
        self.kv.pinned = self.kv.pinned[-2000:]
        for fake in self.fakes.values():
            fake.calls.clear()
            fake.connections = fake.open

    # Faults, each for a while

    async def inject_fault(self, seconds: float) -> None:
        """Inject one random fault, and undo it after `seconds`."""
        faults: tuple[Callable[[float], object], ...] = (
            self._kill, self._kill, self._refuse, self._hang, self._stop_reading,
            self._cut_connections, self._fail_requests, self._fail_requests, self._slow_answers,
            self._slow_wire, self._fail_lookups, self._no_fault,
        )  # fmt: skip
        if self.disk is not None:
            faults += (self._fill_disk,)
        fault = self.dice.choice(faults)
        name = fault.__name__.strip("_")
        self.injected[name] = self.injected.get(name, 0) + 1
        await fault(seconds)  # type: ignore[misc]

    @contextmanager
    def _healthy_worker(self) -> Iterator[FakeWorker]:
        """Choose a worker without a current fault."""
        name = self.dice.choice(sorted({*self.fakes} - self._faulty))
        self._faulty.add(name)
        yield self.fakes[name]
        self._faulty.discard(name)

    async def _kill(self, seconds: float) -> None:
        with self._healthy_worker() as fake:
            await fake.die()
            await asyncio.sleep(seconds)
            await fake.listen()

    async def _refuse(self, seconds: float) -> None:
        with self._healthy_worker() as fake:
            await fake.refuse()
            await asyncio.sleep(seconds)
            await fake.listen()

    async def _hang(self, seconds: float) -> None:
        with self._healthy_worker() as fake:
            await fake.refuse()
            await fake.hang()
            await asyncio.sleep(seconds)
            await fake.wake()

    async def _stop_reading(self, seconds: float) -> None:
        with self._healthy_worker() as fake:
            fake.reads = False
            await asyncio.sleep(seconds)
            fake.reads = True
            for connection in fake.open:
                connection.reset()

    async def _cut_connections(self, seconds: float) -> None:
        with self._healthy_worker() as fake:
            fake.cuts_left, fake.cut_after = 5, self.dice.randrange(2000)
            await asyncio.sleep(seconds)
            fake.cuts_left = 0

    async def _fail_requests(self, seconds: float) -> None:
        self.kv.share = self.dice.choice((0.1, 0.3, 0.9))
        await asyncio.sleep(seconds)
        self.kv.share = 0.0

    async def _slow_answers(self, seconds: float) -> None:
        self.kv.slow_s = 0.4
        await asyncio.sleep(seconds)
        self.kv.slow_s = 0.0

    async def _slow_wire(self, seconds: float) -> None:
        """Slow all bytes of one worker, its probes too."""
        with self._healthy_worker() as fake:
            fake.slow_wire = SlowWire()
            await asyncio.sleep(seconds)
            fake.slow_wire = None

    async def _fail_lookups(self, seconds: float) -> None:
        self.names_resolve = False
        if self._no_names is not None:
            self._no_names.touch()
        await asyncio.sleep(seconds)
        self.names_resolve = True
        if self._no_names is not None:
            self._no_names.unlink(missing_ok=True)

    async def _fill_disk(self, seconds: float) -> None:
        if (disk := self.disk) is not None:
            await disk.fill()
            await asyncio.sleep(seconds)
            await disk.clear()

    async def _no_fault(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
