"""A fleet of fakes whose moods change: two general workers, two for prefill, two for decode.

Their KV blocks are accounted for (`tests.proxy.wire.kv`), so that what is read twice, or by
somebody else, is a fault, whatever else goes wrong meanwhile.
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
FOUND = "g2"  # by DNS
ENCRYPTED = "g1"  # where anybody is
MODEL, MAX_MODEL_LEN = "tiny", 1_000_000
ENDS = ("reset", "close", "stall")
# What fakes say of their own making. First: the router heard half of some nonsense, and went on.
# Second: one that hung finds a request in its socket that was given up, and its blocks given
# back, meanwhile; who asked is gone, so nobody is told what it read.
THEIR_OWN = (
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
"""
# Keys of those who ask, and of who has a file of requests run.
KEYS = {name: f"key-of-{name}-0123456789" for name in ("people", "jobs")}
NIGHT = "night"
NIGHTS_KEY = "key-of-night-0123456789"


async def half_close(call: Call) -> None:
    """End the sending half in place of an answer, and go on listening."""
    call.half_close()
    await call.lost.wait()


async def late(call: Call) -> None:
    """Begin an answer, and end it after everybody's patience."""
    await call.send(scripts.head(200, (b"content-type", scripts.SSE), (b"x", b"y"))[:-2])
    await call.lost.wait()


async def listens(fake: FakeWorker) -> None:
    """Listen again; a connection of somebody else's may have the port for a while."""
    await fake.refuse()
    for patience in range(200, -1, -1):
        try:
            await fake.listen()
        except OSError:
            if not patience:
                raise
            await asyncio.sleep(0.05)
        else:
            return


class Moody(Kv):
    """The books, and how badly the workers behave just now."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)
        self.share = 0.0  # of requests that go wrong
        self.slow_s = 0.0
        self.number = seed * 1000

    def next_faults(self, fake: FakeWorker, role: str) -> Faults:  # noqa: ARG002
        """Say what goes wrong with one request."""
        dice = self.dice
        if dice.random() >= self.share:
            return Faults()
        what = dice.random()
        if what < 0.3:
            return Faults(before=self._instead())
        if what < 0.5:
            return Faults(during=self._instead())
        return Faults(cut=(dice.randrange(4), dice.choice(ENDS)))

    def _instead(self) -> Script:
        ready: list[Script] = [
            scripts.reset,
            scripts.hang_up,
            scripts.stall,
            half_close,
            late,
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
        """Let a script take its time."""

        async def run(call: Call) -> None:
            if self.slow_s:
                await asyncio.sleep(self.dice.random() * self.slow_s)
            await script(call)

        return run


class Troupe:
    """The workers, and what befalls them."""

    def __init__(
        self, seed: int, no_names: Path | None = None, authority: Authority | None = None
    ) -> None:
        self.kv = Moody(seed)
        self._authority = authority  # whose certificates the router and one worker show
        self._no_names = no_names  # a file, for a router that is another process
        self.dice = random.Random(seed + 1)
        self.fakes: dict[str, FakeWorker] = {}
        self.disk: Disk | None = None  # once it may fill up
        self.names_resolve = True
        self.befell: dict[str, int] = {}
        self._struck: set[str] = set()

    async def start(self) -> None:
        """Let all listen."""
        for name, role in {**ROLES, FOUND: "general"}.items():
            fake = FakeWorker(name, model=MODEL, max_model_len=MAX_MODEL_LEN)
            if self._authority is not None and name == ENCRYPTED:
                fake.tls = server_context(self._authority.port(name))
            await fake.listen()
            fake.always(self.kv.slowly(self.kv.worker(fake, role)))
            self.fakes[name] = fake

    def fleet(
        self,
        *,
        listen: int = 0,
        admin: int = 0,
        processes: int = 1,
        tenants: bool = False,
        batches: Path | None = None,
    ) -> str:
        """Write the fleet file; with `batches` some requests are refused for their wait, too."""
        keys = {**KEYS, NIGHT: NIGHTS_KEY}
        hashes = {name: f"sha256:{sha256(key.encode()).hexdigest()}" for name, key in keys.items()}
        more = ""
        if batches is not None:
            more = f"  admission: {{ttft_s: 0.5}}\n  batches: {{path: {batches}, concurrency: 2}}\n"
        ca = ""
        if (authority := self._authority) is not None:
            shown = authority.port("router")
            more += f"  tls: {{cert_file: {shown.cert_file}, key_file: {shown.key_file}}}\n"
            ca = f"worker_tls: {{ca_file: {authority.ca_file}}}\n"
        workers = [
            f"  - {{name: {name}, url: '{self.fakes[name].url}', role: {role}, max_requests: 8}}"
            for name, role in ROLES.items()
        ]
        return FLEET.format(
            port=self.fakes[FOUND].port, workers="\n".join(workers), listen=listen, admin=admin,
            processes=processes, more=more,
            tenants=ca + (TENANTS.format(**hashes) if tenants else ""),
        )  # fmt: skip

    async def stop(self) -> None:
        """Leave nothing open."""
        for fake in self.fakes.values():
            await fake.stop()

    def faults(self) -> list[str]:
        """Say what the workers found wrong with the router."""
        said = [f"{f.name}: {what}" for f in self.fakes.values() for what in f.faults]
        return [
            each
            for each in (*self.kv.faults, *said)
            if not any(words in each for words in THEIR_OWN)
        ]

    def forget(self) -> None:
        """Drop what was served so far, for long runs."""
        self.kv.pinned = self.kv.pinned[-2000:]
        for fake in self.fakes.values():
            fake.calls.clear()
            fake.connections = fake.open

    # What befalls them, each for a while

    async def befalls(self, seconds: float) -> None:
        """Do one thing to them, and undo it after so long."""
        acts: tuple[Callable[[float], object], ...] = (
            self._killed, self._killed, self._refuses, self._hangs, self._deaf, self._cut_off,
            self._moody, self._moody, self._slow, self._slow_wire, self._names_fail, self._nothing,
        )  # fmt: skip
        if self.disk is not None:
            acts += (self._disk_fills,)
        act = self.dice.choice(acts)
        name = act.__name__.strip("_")
        self.befell[name] = self.befell.get(name, 0) + 1
        await act(seconds)  # type: ignore[misc]

    @contextmanager
    def _one(self) -> Iterator[FakeWorker]:
        """Choose one whom nothing else befalls just now."""
        name = self.dice.choice(sorted({*self.fakes} - self._struck))
        self._struck.add(name)
        yield self.fakes[name]
        self._struck.discard(name)

    async def _killed(self, seconds: float) -> None:
        with self._one() as fake:
            await fake.die()
            await asyncio.sleep(seconds)
            await listens(fake)

    async def _refuses(self, seconds: float) -> None:
        with self._one() as fake:
            await fake.refuse()
            await asyncio.sleep(seconds)
            await listens(fake)

    async def _hangs(self, seconds: float) -> None:
        with self._one() as fake:
            await fake.refuse()
            try:
                await fake.hang()
            except OSError:  # the port went to somebody else meanwhile
                await listens(fake)
                return
            await asyncio.sleep(seconds)
            await fake.wake()

    async def _deaf(self, seconds: float) -> None:
        """Have it take connections and read nothing."""
        with self._one() as fake:
            fake.reads = False
            await asyncio.sleep(seconds)
            fake.reads = True
            for each in fake.open:
                each.reset()

    async def _cut_off(self, seconds: float) -> None:
        with self._one() as fake:
            fake.cuts_left, fake.cut_after = 5, self.dice.randrange(2000)
            await asyncio.sleep(seconds)
            fake.cuts_left = 0

    async def _moody(self, seconds: float) -> None:
        self.kv.share = self.dice.choice((0.1, 0.3, 0.9))
        await asyncio.sleep(seconds)
        self.kv.share = 0.0

    async def _slow(self, seconds: float) -> None:
        self.kv.slow_s = 0.4
        await asyncio.sleep(seconds)
        self.kv.slow_s = 0.0

    async def _slow_wire(self, seconds: float) -> None:
        """Have one be read from and written to a little at a time, its probes too."""
        with self._one() as fake:
            fake.slow_wire = SlowWire()
            await asyncio.sleep(seconds)
            fake.slow_wire = None

    async def _names_fail(self, seconds: float) -> None:
        self.names_resolve = False
        if self._no_names is not None:
            self._no_names.touch()
        await asyncio.sleep(seconds)
        self.names_resolve = True
        if self._no_names is not None:
            self._no_names.unlink(missing_ok=True)

    async def _disk_fills(self, seconds: float) -> None:
        if (disk := self.disk) is not None:
            await disk.fill()
            await asyncio.sleep(seconds)
            await disk.clear()

    async def _nothing(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
