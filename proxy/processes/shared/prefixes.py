"""Shares which prompt prefixes were sent to which worker, and turns of sessions.

An entry of the log is the worker's mark with the number of hashes, and the hashes. Hosts copy logs
unread, so a mark is the same on all hosts.

A prompt of another process is recorded once a prompt with the same first block comes to this one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.worker import Worker
from proxy.core.learned.sessions import Session, Visit
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.process_sheet import LENGTH_BITS, LENGTH_MASK, LIFE, ProcessSheet

# Then key, tokens, depths and marks of the session and of the visit, 1 if it is the only visit, the
# key before.
TURN = 0
TURN_WORDS = 11
MAX_UNREAD = 32_768  # prompts of other processes
MAX_UNREAD_HASHES = 1_048_576


class UnreadPrompt(NamedTuple):
    worker: Worker
    up_since: float
    hashes: array[int]


class PrefixPeer:
    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self._life = self._read = 0

    def new_entries(self) -> Iterator[tuple[int, array[int]]]:
        """Return the marks and hashes since the last call."""
        if (life := self.sheet.count(LIFE)) != self._life:
            self._life, self._read = life, 0
        self._read, entries = self.sheet.read_log(self._read)
        words = array("Q", entries)
        at = 0
        while at < len(words):
            end = at + 1 + (words[at] & LENGTH_MASK)
            yield words[at] >> LENGTH_BITS, words[at + 1 : end]
            at = end


class SharedPrefixes:
    def __init__(self, fleet: Fleet, shared_load: SharedLoad) -> None:
        self._fleet = fleet
        self._shared_load = shared_load
        self._peers = shared_load.peers_of(PrefixPeer)
        self._new = array("Q")
        self._records_remote = False
        self._turns: list[tuple[int, tuple[int, ...]]] = []  # whose tokens are not read yet
        self._unread: dict[int, list[UnreadPrompt]] = {}  # by the first block, the oldest first
        self._unread_prompts = self._unread_hashes = 0
        fleet.roster.prefixes.record_remote_prompts = self._record_unread
        fleet.roster.prefixes.report_prefix = self._note_prefix
        fleet.roster.sessions.report_turn = self._note_turn

    def _note_prefix(self, hashes: tuple[int, ...], index: int) -> None:
        if self._records_remote:
            return
        worker = self._fleet.roster.by_index.get(index)
        if worker is not None and not worker.reports_prefixes:  # each process reads its journal
            self._add(worker, hashes)

    def _add(self, worker: Worker, hashes: tuple[int, ...]) -> None:
        if mark := self._shared_load.marks.mark_of(worker):
            self._new.append(mark << LENGTH_BITS | len(hashes))
            self._new.extend(hashes)
            self._shared_load.schedule_flush()

    def _note_turn(self, session: Session, visit: Visit) -> None:
        worker = self._fleet.roster.by_index.get(visit.worker)
        if worker is not None and self._shared_load.marks.mark_of(worker):
            sole = len(session.visits) == 1
            marks = session.depth, session.mark, *session.tail, visit.depth, visit.mark
            entry = (TURN, session.key, visit.tokens, *marks, int(sole), session.known_as)
            session.known_as = session.key
            self._add(worker, entry)

    def _apply_turn(self, entry: tuple[int, ...], worker: Worker, now: float) -> None:
        _, key, tokens, depth, mark, tail_depth, tail_mark, end_depth, end, sole, known_as = entry
        sessions = self._fleet.roster.sessions
        session = sessions.get_or_create(known_as, now)
        sessions.rename(session, key)
        session.known_as = key
        if sole:
            session.visits = []
        session.depth, session.mark, session.tail = depth, mark, (tail_depth, tail_mark)
        since, written = worker.up_since, worker.total_written
        session.add_visit(Visit(worker.index, since, tokens, written, end_depth, end))

    def publish(self) -> None:
        """Log the prefixes that were sent in this turn."""
        if self._new:
            self._shared_load.sheet.write_log(self._new.tobytes())
            self._new = array("Q")

    def read_peers(self, now: float) -> None:
        turns, self._turns = self._turns, []
        for mark, entry in turns:
            if (worker := self._shared_load.marks.worker_of(mark)) is not None:
                self._apply_turn(entry, worker, now)
        for peer in self._peers:
            for mark, hashes in peer.new_entries():
                worker = self._shared_load.marks.worker_of(mark)
                if worker is None:
                    continue
                if len(hashes) == TURN_WORDS and hashes[0] == TURN:
                    self._turns.append((mark, tuple(hashes)))
                elif hashes:
                    self._keep_unread(worker, hashes)
        while self._unread_prompts > MAX_UNREAD or self._unread_hashes > MAX_UNREAD_HASHES:
            self._pop_unread(next(iter(self._unread)))

    def _keep_unread(self, worker: Worker, hashes: array[int]) -> None:
        prompt = UnreadPrompt(worker, worker.up_since, hashes)
        if (prompts := self._unread.get(hashes[0])) is None:
            self._unread[hashes[0]] = [prompt]
        else:
            prompts.append(prompt)
        self._unread_prompts += 1
        self._unread_hashes += len(hashes)

    def _pop_unread(self, first: int) -> list[UnreadPrompt]:
        prompts = self._unread.pop(first)
        self._unread_prompts -= len(prompts)
        self._unread_hashes -= sum(len(prompt.hashes) for prompt in prompts)
        return prompts

    def _record_unread(self, first: int) -> None:
        if first not in self._unread:
            return
        roster = self._fleet.roster
        self._records_remote = True
        for worker, up_since, hashes in self._pop_unread(first):
            if worker.up_since == up_since and roster.by_index.get(worker.index) is worker:
                roster.prefixes.record(tuple(hashes), worker.index)
        self._records_remote = False
