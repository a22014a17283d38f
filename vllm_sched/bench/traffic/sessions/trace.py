"""Traces of sessions in AIPerf's formats: one JSON object per line.

- A request per line, with `session_id`, as in AIPerf's `mooncake_trace`: the first turn has
  `input_length`, `hash_ids` and perhaps `timestamp`; later turns have their new tokens as
  `input_length`, and `delay`. Instead of `input_length`: `text_input`, or `messages` as `delta`.
- A session per line, with `turns`, as in `multi_turn` and `dag_jsonl`: a turn has `text` or
  `messages`, and perhaps `output_length`, `delay`, `forks` and `spawns` (names of sub-agents).

Texts count as a token per four bytes. The text fields `tenant` and `class` are optional.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_sched.bench.traffic.sessions.conversation import first_request
from vllm_sched.bench.traffic.traces import (
    BLOCK_TOKENS,
    SESSION_KEYS,
    BadLineError,
    TrafficFile,
    is_pipe,
    pieces_of,
    read_lines,
    read_milliseconds,
    read_text,
    read_tokens,
)
from vllm_sched.bench.traffic.types import Piece, Request, Session, Turn
from vllm_sched.errors import UsageError

BYTES_PER_TOKEN: Final = 4
DEFAULT_OUTPUT_TOKENS: Final = 128  # as in vLLM's benchmark
DEFAULT_RATE: Final = 0.05  # sessions per second, without times
OUTPUT_KEYS: Final = ("output_length", "max_tokens")
MAX_DELAY_MS: Final = 24 * 3600 * 1000
MAX_DEPTH: Final = 50  # of sub-agents
UNSUPPORTED: Final = ("orchestrator", "pre_session_spawns", "context_mode", "payload")
MEDIA: Final = ("image", "images", "audio", "audios", "video", "videos")


class _Fork(NamedTuple):
    name: str
    fresh: bool


@dataclass(slots=True)
class _ReadSession:
    name: str
    line: int  # its first
    at: float | None
    klass: str
    tenant: str
    shared: tuple[Piece, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    forks: dict[int, list[_Fork]] = field(default_factory=dict)  # by turn


def has_sessions(path: Path) -> bool:
    """Return whether a file's first line is of a session; False for a pipe."""
    try:
        if is_pipe(path):
            return False
        with path.open(encoding="utf-8-sig") as lines:
            entry = json.loads(next((line for line in lines if line.strip()), ""))
    except (OSError, ValueError, RecursionError):  # the reader reports the error
        return False
    return isinstance(entry, dict) and not SESSION_KEYS.isdisjoint(entry)


class SessionTrace(TrafficFile):
    """A file of sessions, read once. Sessions have times of their own if their times differ."""

    has_sessions = True

    def __init__(self, path: Path, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(path, block_tokens)
        self._sessions: dict[str, _ReadSession] = {}
        for _ in read_lines(path, self._read):
            pass
        roots = self._roots()
        times = [root.at for root, _ in roots if root.at is not None]
        last = max(times, default=0.0) - min(times, default=0.0)
        self.timed = len(times) == len(roots) and last > 0
        self.count = len(roots)
        self.rate = len(roots) / last if self.timed else DEFAULT_RATE
        begin = min(times, default=0.0) if self.timed else 0.0
        self._requests = [
            first_request(session, (root.at or 0.0) - begin, root.klass, root.tenant)
            for root, session in roots
        ]
        self._requests.sort(key=lambda request: request.at if self.timed else 0.0)

    def requests(self, rng: random.Random) -> Iterator[Request]:
        del rng
        return iter(self._requests)

    def _read(self, entry: dict[str, Any], number: int) -> None:
        name = read_text(entry, "session_id") or f"line {number}"
        if unsupported := [key for key in UNSUPPORTED if entry.get(key)]:
            raise BadLineError(f"{unsupported[0]} is not supported")
        session = self._sessions.get(name)
        if "turns" in entry and session is not None:
            raise BadLineError(f"session_id {name!r} is in line {session.line} too")
        if session is None:
            at = None if entry.get("timestamp") is None else read_milliseconds(entry, "timestamp")
            klass, tenant = read_text(entry, "class") or self.name, read_text(entry, "tenant")
            session = self._sessions[name] = _ReadSession(name, number, at, klass, tenant)
        if "turns" in entry:
            _add_turns(session, entry["turns"])
        else:
            self._add_request(session, entry)

    def _add_request(self, session: _ReadSession, entry: dict[str, Any]) -> None:
        if "messages" in entry and entry.get("message_mode") != "delta":
            raise BadLineError("messages need message_mode delta; or give input_length")
        if "messages" in entry or "text_input" in entry:
            size = _size("".join(_flat(entry.get("messages", entry.get("text_input")))))
        else:
            size = read_tokens(entry, "input_length")
        if not session.turns:
            session.shared = pieces_of(entry.get("hash_ids"), size, self._block)
            size -= sum(tokens for _, tokens in session.shared)
        elif entry.get("timestamp") is not None and entry.get("delay") is None:
            raise BadLineError("a later turn of a session takes delay, not timestamp")
        session.turns.append(_turn(entry, size))

    def _roots(self) -> list[tuple[_ReadSession, Session]]:
        children: set[str] = set()
        for parent in self._sessions.values():
            for fork in chain.from_iterable(parent.forks.values()):
                if fork.name not in self._sessions:
                    raise self._error(parent, f"sub-agent {fork.name!r} has no line of its own")
                if fork.name in children:
                    raise self._error(parent, f"sub-agent {fork.name!r} has more than one parent")
                children.add(fork.name)
        made: dict[str, Session] = {}
        roots = [
            (root, self._make_session(root, made, MAX_DEPTH))
            for name, root in self._sessions.items()
            if name not in children
        ]
        for name, session in self._sessions.items():
            if name not in made:
                raise self._error(session, f"session {name!r} is a sub-agent of itself")
        return roots

    def _make_session(self, read: _ReadSession, made: dict[str, Session], depth: int) -> Session:
        if not depth:
            raise self._error(read, f"sub-agents are nested deeper than {MAX_DEPTH} levels")
        turns = []
        for number, turn in enumerate(read.turns):
            forks = [
                replace(self._make_session(self._sessions[name], made, depth - 1), fresh=fresh)
                for name, fresh in read.forks.get(number, ())
            ]
            turns.append(replace(turn, forks=tuple(forks)))
        made[read.name] = Session(read.name, tuple(turns), read.shared)
        return made[read.name]

    def _error(self, session: _ReadSession, text: str) -> UsageError:
        return UsageError(f"{self._path}, line {session.line}: {text}")


def _add_turns(session: _ReadSession, turns: Any) -> None:
    if not (isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns)):
        raise BadLineError(f"turns is {turns!r:.60}; it must be a list of objects, at least one")
    if len(turns) > 1 and _is_system(turns[0]):
        text = _texts(turns[0])
        digest = blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
        session.shared = ((f"text-{digest}", _size(text)),)
        turns = turns[1:]
    if session.at is None and turns[0].get("timestamp") is not None:
        session.at = read_milliseconds(turns[0], "timestamp")
    for turn in turns:
        if session.turns and turn.get("timestamp") is not None:
            raise BadLineError("a later turn of a session takes delay, not timestamp")
        forks = _forks(turn, "forks", fresh=False) + _forks(turn, "spawns", fresh=True)
        if forks:
            session.forks[len(session.turns)] = forks
        session.turns.append(_turn(turn, _size(_texts(turn))))


def _is_system(turn: dict[str, Any]) -> bool:
    """Return whether a turn is a system prompt that AIPerf puts before all turns."""
    return turn.get("role") == "system" and not {"timestamp", "delay", *OUTPUT_KEYS} & set(turn)


def _turn(entry: dict[str, Any], size: int) -> Turn:
    key = next((key for key in OUTPUT_KEYS if entry.get(key) is not None), None)
    output = DEFAULT_OUTPUT_TOKENS if key is None else read_tokens(entry, key)
    waits = entry.get("delay") is not None
    return Turn(size, output, read_milliseconds(entry, "delay", MAX_DELAY_MS) if waits else 0.0)


def _texts(turn: dict[str, Any]) -> str:
    if media := [key for key in MEDIA if turn.get(key)]:
        raise BadLineError(f"{media[0]} is not supported in a turn; only text is")
    texts = [turn[key] for key in ("text", "texts", "messages") if turn.get(key) is not None]
    if len(texts) != 1:
        raise BadLineError("a turn must have one of text, texts and messages")
    return "".join(_flat(texts[0]))


def _flat(value: Any) -> Iterator[str]:
    """Yield the texts in a text, a list, a message or AIPerf's `{"contents": [...]}`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict) and (keys := {"content", "contents", "text"} & set(value)):
        for key in sorted(keys):
            if value[key] is not None:  # as in a message with tool calls only
                yield from _flat(value[key])
    else:
        raise BadLineError(f"a turn's text is {value!r:.60}; it must be text")


def _size(text: str) -> int:
    return max(1, -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN))


def _forks(turn: dict[str, Any], key: str, *, fresh: bool) -> list[_Fork]:
    names = turn.get(key) or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise BadLineError(f"{key} is {names!r:.60}; it must be a list of session_ids")
    return [_Fork(name, fresh) for name in names]
