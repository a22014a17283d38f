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
from pathlib import Path
from typing import Any, Final

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


@dataclass(slots=True)
class _Line:
    name: str
    line: int
    at: float | None
    klass: str
    tenant: str
    shared: tuple[Piece, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    forks: dict[int, list[tuple[str, bool]]] = field(default_factory=dict)  # by turn: name, fresh


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
        self._lines: dict[str, _Line] = {}
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
        line = self._lines.get(name)
        if "turns" in entry and line is not None:
            raise BadLineError(f"session_id {name!r} is in line {line.line} too")
        if line is None:
            at = None if entry.get("timestamp") is None else read_milliseconds(entry, "timestamp")
            klass, tenant = read_text(entry, "class") or self.name, read_text(entry, "tenant")
            line = self._lines[name] = _Line(name, number, at, klass, tenant)
        if "turns" in entry:
            _add_turns(line, entry["turns"])
        else:
            self._add_request(line, entry)

    def _add_request(self, session: _Line, entry: dict[str, Any]) -> None:
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

    def _roots(self) -> list[tuple[_Line, Session]]:
        parents: dict[str, _Line] = {}
        for line in self._lines.values():
            for name, _ in (fork for forks in line.forks.values() for fork in forks):
                if name not in self._lines:
                    raise self._error(line, f"sub-agent {name!r} has no line of its own")
                if name in parents:
                    raise self._error(line, f"sub-agent {name!r} has more than one parent")
                parents[name] = line
        sessions: dict[str, Session] = {}
        roots = [
            (line, self._make_session(line, sessions, MAX_DEPTH))
            for line in self._lines.values()
            if line.name not in parents
        ]
        for name, line in self._lines.items():
            if name not in sessions:
                raise self._error(line, f"session {name!r} is a sub-agent of itself")
        return roots

    def _make_session(self, line: _Line, sessions: dict[str, Session], depth: int) -> Session:
        if not depth:
            raise self._error(line, f"sub-agents are nested deeper than {MAX_DEPTH} levels")
        turns = [
            replace(
                turn,
                forks=tuple(
                    replace(self._make_session(self._lines[name], sessions, depth - 1), fresh=fresh)
                    for name, fresh in line.forks.get(number, ())
                ),
            )
            for number, turn in enumerate(line.turns)
        ]
        sessions[line.name] = Session(line.name, tuple(turns), line.shared)
        return sessions[line.name]

    def _error(self, line: _Line, text: str) -> UsageError:
        return UsageError(f"{self._path}, line {line.line}: {text}")


def _add_turns(session: _Line, turns: Any) -> None:
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
        forks = _names(turn, "forks", fresh=False) + _names(turn, "spawns", fresh=True)
        if forks:
            session.forks[len(session.turns)] = forks
        session.turns.append(_turn(turn, _size(_texts(turn))))


def _is_system(turn: dict[str, Any]) -> bool:
    """Return whether a turn is a system prompt that AIPerf puts before all turns."""
    return turn.get("role") == "system" and not {"timestamp", "delay", *OUTPUT_KEYS} & set(turn)


def _turn(entry: dict[str, Any], size: int) -> Turn:
    key = next((key for key in OUTPUT_KEYS if entry.get(key) is not None), None)
    output = DEFAULT_OUTPUT_TOKENS if key is None else read_tokens(entry, key)
    think = (
        read_milliseconds(entry, "delay", MAX_DELAY_MS) if entry.get("delay") is not None else 0.0
    )
    return Turn(size, output, think)


def _texts(turn: dict[str, Any]) -> str:
    if media := [key for key in MEDIA if turn.get(key)]:
        raise BadLineError(f"{media[0]} is not supported in a turn; only text is")
    texts = [turn.get("text"), turn.get("texts"), turn.get("messages")]
    if texts.count(None) != len(texts) - 1:
        raise BadLineError("a turn must have one of text, texts and messages")
    return "".join(_flat(next(text for text in texts if text is not None)))


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


def _names(turn: dict[str, Any], key: str, *, fresh: bool) -> list[tuple[str, bool]]:
    names = turn.get(key) or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise BadLineError(f"{key} is {names!r:.60}; it must be a list of session_ids")
    return [(name, fresh) for name in names]
