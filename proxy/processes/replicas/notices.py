"""Stored responses and drained workers, which replicas report to each other once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TypeVar

from proxy.core.request.response_owners import MAX_RESPONSES
from proxy.processes.ipc_messages import Joined, Message, Serving, StoredResponses, WorkerDrained
from proxy.processes.replicas.messages import Drained, Update

MAX_RESPONSES_SENT = 2000  # in an update
MAX_DRAINS = 4096
LATER_S = 1e-3
NEVER_DRAINED: Drained = (-inf, False, False)
Response = tuple[str, str, str]  # id, worker, tenant
Value = TypeVar("Value")


class Notices:
    """What this host knows, and what is new."""

    def __init__(self, send: Callable[[StoredResponses | WorkerDrained], None]) -> None:
        self._send = send
        self._responses: dict[str, Response] = {}
        self._drains: dict[str, Drained] = {}  # the last change of each worker
        self._new_drains: dict[str, Drained] = {}
        self._new_responses: deque[Response] = deque(maxlen=MAX_RESPONSES)

    @property
    def has_new(self) -> bool:
        return bool(self._new_drains or self._new_responses)

    def report(self, message: Message) -> None:
        """Take what other hosts must know from a message of a process."""
        match message:
            case StoredResponses(responses):
                for response in responses:
                    _keep_newest(self._responses, response[0], response, MAX_RESPONSES)
                    self._new_responses.append(response)
            case WorkerDrained():
                self._drain_elsewhere(message)
            case Joined():
                self._send(StoredResponses(tuple(self._responses.values())))
            case Serving():
                for name, (_, draining, _) in self._drains.items():
                    if draining:
                        self._send(WorkerDrained(name, draining=True))

    def write(self, update: Update) -> None:
        """Put what is new, or all, into an update; what is too much follows."""
        new = self._new_responses
        responses = [new.popleft() for _ in range(min(len(new), MAX_RESPONSES_SENT))]
        update.drains = self._new_drains
        if update.whole:
            update.drains = {**self._drains, **self._new_drains}
            newest = dict.fromkeys(list(self._responses.values())[-MAX_RESPONSES_SENT:])
            responses = [*(response for response in responses if response not in newest), *newest]
        update.responses, self._new_drains = responses, {}

    def apply(self, update: Update) -> None:
        """Drain workers as other hosts did; the last change counts."""
        for name, state in update.drains.items():
            at, draining, at_once = state
            if at > self._drains.get(name, NEVER_DRAINED)[0]:
                _keep_newest(self._drains, name, state, MAX_DRAINS)
                self._send(WorkerDrained(name, draining, at_once))
        new = [response for response in update.responses if response[0] not in self._responses]
        for response in new:
            _keep_newest(self._responses, response[0], response, MAX_RESPONSES)
        if new:
            self._send(StoredResponses(tuple(new)))

    def _drain_elsewhere(self, message: WorkerDrained) -> None:
        """Have other hosts follow the admin API of this one."""
        known_at = self._drains.get(message.name, NEVER_DRAINED)[0]
        # Later than the change that it follows, even if another host's time of day is ahead.
        state = max(time.time(), known_at + LATER_S), message.draining, message.at_once
        self._new_drains[message.name] = state
        _keep_newest(self._drains, message.name, state, MAX_DRAINS)


def _keep_newest(values: dict[str, Value], name: str, value: Value, limit: int) -> None:
    values[name] = value
    if len(values) > limit:
        del values[next(iter(values))]
