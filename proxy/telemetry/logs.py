"""The router's log: a line for each request at its end, and the router's own lines.

Nobody's secret is in it: keys never come near a request's line, and those of the fleet file, of the
files and variables that it names, and of workers that an operator adds are cut out of all others.
Tenants' keys are not known here: of them there are only hashes. A prompt is in it only where the
fleet file says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from proxy.config.redact import HIDDEN, is_secret
from proxy.metrics.recent import MAX_TEXT
from proxy.metrics.registry import BATCH, CLIENT_GONE, class_of
from proxy.telemetry.log_writer import LogWriter

if TYPE_CHECKING:
    from proxy.config import FleetConfig
    from proxy.core.model.types import Reason, RequestInfo
    from proxy.metrics.observed import ObservedRequest
    from proxy.metrics.registry import Metrics

OURS = ("proxy", "vllm_sched")
LEAD = "%(asctime)s %(levelname)s "
MAX_PROMPT = 64 << 10
LEAST_SECRET = 4  # a shorter one would be cut out of ordinary words
BAD_REQUEST, SERVER_ERROR = 400, 500
UNREAD: dict[str, Any] = dict.fromkeys(
    ("model", "tenant", "class", "stream", "body_bytes", "prompt_tokens", "counted")
)


class Logs:
    """What one process of a router writes; without metrics, its own lines only."""

    def __init__(
        self,
        config: FleetConfig,
        metrics: Metrics | None = None,
        writer: LogWriter | None = None,
        wall: Callable[[], float] = time.time,
        *,
        keys: Iterable[str] = (),
    ) -> None:
        self.writer = writer or LogWriter()
        self.settings = config.router.logs
        self.requests = False
        # Where several processes serve: has all of them change.
        self.tell_all: Callable[[bool | None, Mapping[str, str]], Awaitable[None]] | None = None
        self._metrics = metrics
        self._wall = wall
        self._handler: LogHandler | None = None
        self._before: list[logging.Handler] = []  # who wrote until this took over
        self._secrets: tuple[str, ...] = ()
        self.reconfigure(config, keys)

    # The router's own lines

    def take_over(self, mark: str = "") -> None:
        """Write what is logged in this process from now on; `mark` tells it from others."""
        root = logging.getLogger()
        if self._handler is None:
            self._before = root.handlers[:]
        self._handler = LogHandler(self, mark)
        root.handlers[:] = [self._handler]
        self._set_level(self.settings.level)

    def reconfigure(self, config: FleetConfig, keys: Iterable[str] = ()) -> None:
        """Be as the fleet file says; levels that were changed by hand are forgotten.

        `keys` are those that stand elsewhere, and are to be cut out too.
        """
        self.settings = config.router.logs
        self._secrets = ()
        self.hide([*secrets_in(config.model_dump(mode="json")), *keys])
        self.log_requests(self.settings.requests)
        for name in self.levels():
            if name:
                logging.getLogger(name).setLevel(logging.NOTSET)
        if self._handler is not None:
            self._set_level(self.settings.level)

    def hide(self, keys: Iterable[str]) -> None:
        """Cut these out too, until the fleet file is read again."""
        secrets = {*self._secrets, *long_enough(keys)}
        if len(secrets) == len(self._secrets):
            return  # nothing new: followers are told of workers each second
        # Of one that is the beginning of another, nothing may be left either.
        self._secrets = tuple(sorted(secrets, key=len, reverse=True))

    def levels(self) -> dict[str, str]:
        """Return the levels that are set, by logger; the one without a name is for all others."""
        found = {"": logging.getLevelName(logging.getLogger().level).lower()}
        for name, each in list(logging.Logger.manager.loggerDict.items()):
            if isinstance(each, logging.Logger) and each.level and name.split(".")[0] in OURS:
                found[name] = logging.getLevelName(each.level).lower()
        return found

    def change(self, requests: bool | None, levels: Mapping[str, str]) -> None:
        """Log otherwise until the next reload."""
        if requests is not None:
            self.log_requests(requests)
        for name, level in levels.items():
            logging.getLogger(name or None).setLevel(level.upper())

    def _set_level(self, level: str) -> None:
        logging.getLogger().setLevel(level.upper())

    def line_of(self, record: logging.LogRecord, mark: str) -> bytes:
        """Write one of them."""
        if self.settings.format == "text":
            formatter = logging.Formatter(f"{LEAD}{mark}%(message)s")
            return self._without_secrets(formatter.format(record)).encode(errors="replace") + b"\n"
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._without_secrets(record.getMessage()),
        }
        if mark:
            told["process"] = mark.strip()
        if record.exc_info:
            told["exception"] = self._without_secrets(
                logging.Formatter().formatException(record.exc_info)
            )
        return written(told)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    # Requests

    def log_requests(self, wanted: bool) -> None:
        """Write a line for each request, or none."""
        metrics = self._metrics
        if metrics is None:
            return
        self.requests = wanted
        others = tuple(each for each in metrics.at_end if each != self.ended)
        metrics.at_end = (*others, self.ended) if wanted else others
        metrics.keeps_prompts = wanted and self.settings.prompts

    def ended(
        self, seen: ObservedRequest, now: float, route: str, status: int, reason: Reason
    ) -> None:
        """Write the line of a request that is over."""
        told = account(seen, now, route, status, reason)
        if seen.prompt:
            told["prompt"] = seen.prompt[:MAX_PROMPT].decode(errors="replace")
        if self.settings.format == "json":
            wall = datetime.fromtimestamp(self._wall(), UTC)
            self.writer.put(written({"time": wall, "event": "request", **told}))
            return
        stamp = datetime.fromtimestamp(self._wall()).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        said = " ".join(f"{name}={value}" for name, value in told.items() if value is not None)
        self.writer.put(f"{stamp} REQUEST {one_line(said)}\n".encode(errors="replace"))

    def close(self) -> None:
        """Write what there is to be written, and let others write again."""
        self.log_requests(False)
        if self._handler is not None:
            logging.getLogger().handlers[:] = self._before
            self._handler = None
        self.writer.close()


class LogHandler(logging.Handler):
    """Hands the lines of Python's logging on."""

    def __init__(self, logs: Logs, mark: str) -> None:
        super().__init__()
        self._logs = logs
        self._mark = mark

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one on."""
        try:
            self._logs.writer.put(self._logs.line_of(record, self._mark))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until they are written."""
        self._logs.writer.flush()


def account(
    seen: ObservedRequest, now: float, route: str, status: int, reason: Reason
) -> dict[str, Any]:
    """Say what became of a request. Times are in milliseconds; what there was not is null."""
    ask, decision = seen.ask, seen.decision
    first, placed, prefilled = seen.first_token_at, seen.placed_at, seen.prefilled_at
    handover = None if decision is None else decision.handover
    predicted = None if decision is None else decision.predicted_ttft_s
    return {
        "id": text(seen.id),
        "trace": seen.trace_id or None,
        "route": route,
        "reason": reason.value,
        "worker": None if decision is None else decision.worker.name,
        "prefill_worker": None if handover is None else handover.prefill.name,
        "status": status,
        "outcome": outcome(status),
        **(_unread(seen) if ask is None else _sizes(ask)),
        "sent_bytes": seen.sent_bytes,
        "output_tokens": None if first is None else seen.opening + seen.tokens,
        "queue_ms": milliseconds(seen.queue_s),
        "prefill_ms": between(placed, first if handover is None else prefilled),
        "transfer_ms": None if handover is None else between(prefilled, first),
        "decode_ms": between(first, now),
        "ttft_ms": between(seen.started, first),
        "predicted_ttft_ms": None if predicted is None else milliseconds(predicted),
        "total_ms": between(seen.started, now),
    }


def _sizes(ask: RequestInfo) -> dict[str, Any]:
    return {
        "model": text(ask.model),
        "tenant": None if ask.tenant is None else ask.tenant.name,
        "class": class_of(ask),
        "stream": ask.stream,
        "body_bytes": ask.body_bytes,
        "prompt_tokens": ask.prompt_tokens,
        "counted": ask.counted,
    }


def _unread(seen: ObservedRequest) -> dict[str, Any]:
    """Say what is known by the head: of what was refused by a limit, or asked of the router."""
    whose = {
        "tenant": None if seen.tenant is None else seen.tenant.name,
        "class": BATCH if seen.in_the_gaps else None,
    }
    return UNREAD | whose


def outcome(status: int) -> str:
    """Say in a word how a request ended."""
    if status < BAD_REQUEST:
        return "done"
    if status == CLIENT_GONE:
        return "client_gone"
    return "failed" if status >= SERVER_ERROR else "refused"


def between(start: float | None, end: float | None) -> float | None:
    """Return the time between two moments, if both were."""
    return None if start is None or end is None else milliseconds(end - start)


def milliseconds(seconds: float) -> float:
    """Return seconds as milliseconds, to a hundredth."""
    return round(seconds * 1000, 2)


def text(value: str) -> str:
    """Cut what a client chose, and replace what is no text."""
    return value[:MAX_TEXT].encode(errors="replace").decode()


def one_line(value: str) -> str:
    """Let nobody begin a line of his own."""
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)


def written(told: dict[str, Any]) -> bytes:
    """Write an object on a line of its own."""
    return orjson.dumps(told, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)


def secrets_in(data: object, name: str = "") -> Iterator[str]:
    """Yield every value in a configuration whose name says that it is a secret."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from secrets_in(value, str(key))
    elif isinstance(data, list):
        for value in data:
            yield from secrets_in(value, name)
    elif isinstance(data, str) and is_secret(name):
        yield from long_enough([data])


def long_enough(secrets: Iterable[str]) -> Iterator[str]:
    """Yield those that can be cut out of a text, and leave words whole."""
    return (each for each in secrets if len(each) >= LEAST_SECRET)
