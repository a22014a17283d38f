"""The router's log: its own lines, and one line per request.

Workers' keys are removed from all lines, also of workers added later. Tenants' keys are unknown to
the router, which has only hashes. Prompts are logged only if the fleet file allows it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from proxy.config import FleetConfig
from proxy.config.redact import HIDDEN, is_secret
from proxy.core.model.types import Reason, RequestInfo
from proxy.metrics.observed import ObservedRequest
from proxy.metrics.recent import text
from proxy.metrics.registry import BATCH, CLIENT_GONE, Metrics, class_of
from proxy.telemetry.log_writer import LogWriter

OWN_LOGGERS = ("proxy", "vllm_sched")
PREFIX = "%(asctime)s %(levelname)s "
MAX_PROMPT_BYTES = 64 << 10
MIN_SECRET_CHARS = 4  # shorter secrets occur in ordinary words
BAD_REQUEST, SERVER_ERROR = 400, 500
UNREAD: dict[str, Any] = dict.fromkeys(
    ("model", "tenant", "class", "stream", "session", "body_bytes", "prompt_tokens", "counted")
)


class Logs:
    """The log of one process; without metrics it has no lines for requests."""

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
        # Changes the log of all router processes, if there are several.
        self.change_all: Callable[[bool | None, Mapping[str, str]], Awaitable[None]] | None = None
        self._metrics = metrics
        self._wall = wall
        self._handler: LogHandler | None = None
        self._before: list[logging.Handler] = []  # handlers that `take_over` replaced
        self._secrets: tuple[str, ...] = ()
        self.reconfigure(config, keys)

    def take_over(self, mark: str = "") -> None:
        """Replace the root logger's handlers; `mark` names the process."""
        root = logging.getLogger()
        if self._handler is None:
            self._before = root.handlers[:]
        self._handler = LogHandler(self, mark)
        root.handlers[:] = [self._handler]
        self._set_level(self.settings.level)

    def reconfigure(self, config: FleetConfig, keys: Iterable[str] = ()) -> None:
        """Apply the fleet file's settings, and reset levels that were changed at run time.

        `keys` are secrets that are not in the fleet file.
        """
        self.settings = config.router.logs
        self._secrets = ()
        self.hide_keys([*secrets_in(config.model_dump(mode="json")), *keys])
        self.log_requests(wanted=self.settings.requests)
        for name in self.levels():
            if name:
                logging.getLogger(name).setLevel(logging.NOTSET)
        if self._handler is not None:
            self._set_level(self.settings.level)

    def hide_keys(self, keys: Iterable[str]) -> None:
        """Remove these keys from lines too, until the next reload."""
        secrets = {*self._secrets, *long_enough(keys)}
        if len(secrets) == len(self._secrets):
            return  # the common case: called every second
        # Longest first: one secret may be the beginning of another.
        self._secrets = tuple(sorted(secrets, key=len, reverse=True))

    def levels(self) -> dict[str, str]:
        """Return the levels by logger; the empty name is the default."""
        levels = {"": logging.getLevelName(logging.getLogger().level).lower()}
        for name, log in list(logging.Logger.manager.loggerDict.items()):
            if isinstance(log, logging.Logger) and log.level and name.split(".")[0] in OWN_LOGGERS:
                levels[name] = logging.getLevelName(log.level).lower()
        return levels

    def change(self, requests: bool | None, levels: Mapping[str, str]) -> None:
        """Change what is logged, until the next reload."""
        if requests is not None:
            self.log_requests(wanted=requests)
        for name, level in levels.items():
            logging.getLogger(name or None).setLevel(level.upper())

    def _set_level(self, level: str) -> None:
        logging.getLogger().setLevel(level.upper())

    def line_of(self, record: logging.LogRecord, mark: str) -> bytes:
        if self.settings.format == "text":
            formatter = logging.Formatter(f"{PREFIX}{mark}%(message)s")
            return self._without_secrets(formatter.format(record)).encode(errors="replace") + b"\n"
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._without_secrets(record.getMessage()),
        }
        if mark:
            fields["process"] = mark.strip()
        if record.exc_info:
            fields["exception"] = self._without_secrets(
                logging.Formatter().formatException(record.exc_info)
            )
        return written(fields)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def log_requests(self, *, wanted: bool) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        self.requests = wanted
        others = tuple(hook for hook in metrics.at_end if hook != self.log_end)
        metrics.at_end = (*others, self.log_end) if wanted else others
        metrics.keeps_prompts = wanted and self.settings.prompts

    def log_end(
        self, seen: ObservedRequest, now: float, route: str, status: int, reason: Reason
    ) -> None:
        fields = log_fields(seen, now, route, status, reason)
        if seen.prompt:
            fields["prompt"] = seen.prompt[:MAX_PROMPT_BYTES].decode(errors="replace")
        if self.settings.format == "json":
            wall = datetime.fromtimestamp(self._wall(), UTC)
            self.writer.put(written({"time": wall, "event": "request", **fields}))
            return
        stamp = datetime.fromtimestamp(self._wall()).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        pairs = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        self.writer.put(f"{stamp} REQUEST {one_line(pairs)}\n".encode(errors="replace"))

    def close(self) -> None:
        self.log_requests(wanted=False)
        if self._handler is not None:
            logging.getLogger().handlers[:] = self._before
            self._handler = None
        self.writer.close()


class LogHandler(logging.Handler):
    def __init__(self, logs: Logs, mark: str) -> None:
        super().__init__()
        self._logs = logs
        self._mark = mark

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._logs.writer.put(self._logs.line_of(record, self._mark))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._logs.writer.flush()


def log_fields(
    seen: ObservedRequest, now: float, route: str, status: int, reason: Reason
) -> dict[str, Any]:
    info, decision = seen.info, seen.decision
    first, placed, prefilled = seen.first_token_at, seen.placed_at, seen.prefilled_at
    handover = None if decision is None else decision.handover
    predicted = None if decision is None else decision.predicted_ttft_s
    return {
        "id": text(seen.id),
        "trace": seen.trace_id or None,
        "route": route,
        "reason": reason.value,
        "worker": None if decision is None else decision.worker.name,
        "turn": None if decision is None else decision.turn or None,
        "prefill_worker": None if handover is None else handover.prefill.name,
        "status": status,
        "outcome": outcome(status),
        **(_unread(seen) if info is None else _sizes(info)),
        "sent_bytes": seen.sent_bytes,
        "output_tokens": None if first is None else seen.output_tokens,
        "queue_ms": milliseconds(seen.queue_s),
        "prefill_ms": ms_between(placed, first if handover is None else prefilled),
        "transfer_ms": None if handover is None else ms_between(prefilled, first),
        "decode_ms": ms_between(first, now),
        "ttft_ms": ms_between(seen.started, first),
        "predicted_ttft_ms": None if predicted is None else milliseconds(predicted),
        "total_ms": ms_between(seen.started, now),
    }


def _sizes(info: RequestInfo) -> dict[str, Any]:
    return {
        "model": text(info.model),
        "tenant": None if info.tenant is None else info.tenant.name,
        "class": class_of(info),
        "stream": info.stream,
        "session": f"{info.session:016x}" if info.session else None,
        "body_bytes": info.body_bytes,
        "prompt_tokens": info.prompt_tokens,
        "counted": info.counted,
    }


def _unread(seen: ObservedRequest) -> dict[str, Any]:
    fields = {
        "tenant": None if seen.tenant is None else seen.tenant.name,
        "class": BATCH if seen.is_batch else None,
    }
    return UNREAD | fields


def outcome(status: int) -> str:
    if status < BAD_REQUEST:
        return "done"
    if status == CLIENT_GONE:
        return "client_gone"
    return "failed" if status >= SERVER_ERROR else "refused"


def ms_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else milliseconds(end - start)


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)


def one_line(value: str) -> str:
    """Return a text with unprintable characters escaped."""
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)


def written(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z)


def secrets_in(data: object, name: str = "") -> Iterator[str]:
    """Yield the secrets in a configuration, by the names of their keys."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from secrets_in(value, str(key))
    elif isinstance(data, list):
        for value in data:
            yield from secrets_in(value, name)
    elif isinstance(data, str) and is_secret(name):
        yield from long_enough([data])


def long_enough(secrets: Iterable[str]) -> Iterator[str]:
    return (secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS)
