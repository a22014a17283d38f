"""Scheduler classes for upstream's runs, which import this module by its bare name."""

from __future__ import annotations

import threading
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_sched.engine.journal.journal import Outputs
from vllm_sched.engine.journal.scheduler import JournalMixin, journal_of
from vllm_sched.engine.scheduler import PolicyScheduler, SyncPolicyScheduler


class Careless(AsyncScheduler):  # type: ignore[misc]
    """Serves running requests in the wrong order, a fault that upstream's tests must detect."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.running.reverse()
        return output


class SocketlessPublisher:
    """Makes all messages and sends none, because upstream's tests never shut schedulers down."""

    def __init__(self, scheduler: Any) -> None:
        self.lock = threading.RLock()
        self.journal = journal_of(scheduler)

    def publish_step(self, outputs: Outputs) -> None:
        self.journal.pop_step(outputs)
        self.journal.snapshot()


class Journaled(JournalMixin):
    """Publishes its journal; an error in it is the test's error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._publisher: Any = SocketlessPublisher(self)

    def _record_in_journal(self, note: Any, *args: object) -> None:
        note(*args)


class JournaledSync(Journaled, SyncPolicyScheduler):
    """The synchronous scheduler with its journal on."""


class JournaledAsync(Journaled, PolicyScheduler):
    """The asynchronous scheduler with its journal on."""
