"""KV cache of a fluid engine: requests, their room, cached prefixes, and transfers to it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from heapq import heappop, heappush

from vllm_sched.bench.traffic.types import Piece
from vllm_sched.sim.types import Job, WorkerModel


class Task:
    """A job in a fluid engine."""

    __slots__ = (
        "cached", "decodes_from", "ends_at", "fetching", "gone", "has_kv", "job", "left", "long",
        "medium", "need", "number", "own", "pieces", "ready", "since",
    )  # fmt: skip

    def __init__(self, job: Job, number: int, now: float, need: int) -> None:
        self.job = job
        self.number = number
        self.since = now
        self.need = need  # largest KV size in tokens
        self.own = 0  # tokens that are not shared
        self.pieces: Sequence[Piece] = ()  # shared pieces in use
        self.left = job.prompt_tokens  # not yet computed
        self.cached = 0
        self.ready = 0  # first possible step
        self.decodes_from = self.ends_at = 0  # in decode steps of the worker; 0 = not decoding
        self.gone = self.has_kv = self.fetching = False
        self.long = self.medium = False

    @property
    def done(self) -> int:
        return self.job.prompt_tokens - self.left


class CachedPrefixes:
    """The cached prompt prefixes of a worker; the least recently used piece is evicted first.

    Of one prompt, later pieces are evicted first: they are useless without the earlier pieces.
    """

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens
        self._cached: OrderedDict[int | str, int] = OrderedDict()
        self._tokens = 0

    def cached_beginning(self, shared: Sequence[Piece]) -> list[Piece]:
        beginning: list[Piece] = []
        for name, tokens in shared:
            if not (have := self._cached.get(name, 0)):
                break
            beginning.append((name, min(have, tokens)))
            if have < tokens:
                break
        return beginning

    def count_cached(self, shared: Sequence[Piece]) -> int:
        """Return the cached tokens of a prefix, and mark them as used."""
        cached = 0
        for name, tokens in reversed(self.cached_beginning(shared)):
            self._cached.move_to_end(name)
            cached += tokens
        return cached

    def release(self, name: int | str) -> None:
        """Mark a piece as used when its last running request leaves."""
        if name in self._cached:
            self._cached.move_to_end(name)

    def store(self, shared: Sequence[Piece], room: int, running: Container[int | str] = ()) -> None:
        """Cache a computed prefix and evict down to `room`, except pieces in `running`."""
        if not self._capacity:
            return
        held = self._cached
        for name, tokens in reversed(shared):
            have = held.get(name, 0)
            if tokens > have:
                held[name] = tokens
                self._tokens += tokens - have
            held.move_to_end(name)
        over = self._tokens - min(max(room, 0), self._capacity)
        forgotten = []
        for name, tokens in held.items():
            if over <= 0:
                break
            if name not in running:
                forgotten.append(name)
                over -= tokens
        for name in forgotten:
            self._tokens -= held.pop(name)


class KvBlocks:
    """The KV of running requests; shared prefixes count once, after they are computed.

    Cost: each shared piece is visited at admission, first token and end. How it fails: the longest
    used part of a piece is held until the last user leaves.
    """

    def __init__(self, tokens: int, prefixes: CachedPrefixes) -> None:
        self.tokens = tokens
        self.prefixes = prefixes
        self._own = self._shared = 0
        self._users: dict[int | str, int] = {}  # by piece
        self._piece_tokens: dict[int | str, int] = {}  # in use

    @property
    def used(self) -> int:
        return self._own + self._shared

    def fits(self, task: Task) -> bool:
        free = self.tokens - self.used
        if task.need <= free or not self.used:
            return True
        saved = sum(
            min(tokens, self._piece_tokens[name])
            for name, tokens in self.prefixes.cached_beginning(task.job.shared)
            if name in self._piece_tokens
        )
        return task.need - saved <= free

    def allocate(self, task: Task) -> None:
        task.pieces = self.prefixes.cached_beginning(task.job.shared)
        own = task.need
        for name, tokens in task.pieces:
            own -= tokens
            self._users[name] = self._users.get(name, 0) + 1
            if tokens > (used := self._piece_tokens.get(name, 0)):
                self._shared += tokens - used
                self._piece_tokens[name] = tokens
        task.own = max(own, 0)
        self._own += task.own

    def free(self, task: Task) -> None:
        self._own -= task.own
        for name, _ in reversed(task.pieces):
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._shared -= self._piece_tokens.pop(name)
                self.prefixes.release(name)
        task.own, task.pieces = 0, ()

    def record_computed(self, task: Task) -> None:
        self.free(task)
        shared = task.job.shared
        alone = max(task.need - sum(tokens for _, tokens in shared), 0)
        self.prefixes.store(shared, self.tokens - self._own - alone, self._users)
        self.allocate(task)


class KvTransfers:
    """Decode legs that wait for KV room, and transfers under way."""

    __slots__ = ("_kv", "_link_free", "_model", "under_way", "waiting")

    def __init__(self, model: WorkerModel, kv: KvBlocks) -> None:
        self.under_way: list[tuple[float, int, Task]] = []  # heap by end time
        self.waiting: deque[Task] = deque()  # for KV room
        self._model = model
        self._kv = kv
        self._link_free = 0.0

    def start(self, now: float) -> None:
        kv = self._kv
        while self.waiting:
            task = self.waiting[0]
            if not task.gone:
                if not kv.fits(task):
                    return
                kv.allocate(task)
                cached = min(kv.prefixes.count_cached(task.job.shared), task.job.prompt_tokens)
                seconds = self._model.transfer_s(task.job.prompt_tokens - cached)
                self._link_free = max(self._link_free, now) + seconds
                task.fetching = True
                heappush(self.under_way, (self._link_free, task.number, task))
            self.waiting.popleft()

    def finish(self) -> Task:
        return heappop(self.under_way)[2]
