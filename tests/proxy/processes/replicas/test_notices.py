"""Responses and drains: what a replica sends once, and to one that joins."""

from __future__ import annotations

from proxy.processes.ipc_messages import Joined, Serving, StoredResponses, WorkerDrained
from proxy.processes.replicas.messages import Update
from proxy.processes.replicas.notices import MAX_DRAINS, MAX_RESPONSES_SENT, Notices

FIRST, SECOND = ("resp_1", "a", "t"), ("resp_2", "b", "t")


class Host:
    def __init__(self) -> None:
        self.sent: list[StoredResponses | WorkerDrained] = []
        self.notices = Notices(self.sent.append)

    def update(self, *, whole: bool = False) -> Update:
        update = Update("m", 1, 0.0, whole=whole)
        self.notices.write(update)
        return update


def test_news_are_sent_once_and_all_to_a_replica_that_joins() -> None:
    host, other = Host(), Host()
    host.notices.report(StoredResponses((FIRST,)))
    host.notices.report(WorkerDrained("a", draining=True, at_once=True))
    assert host.notices.has_new
    update = host.update()
    assert not host.notices.has_new
    other.notices.apply(update)
    assert other.sent == [
        WorkerDrained("a", draining=True, at_once=True),
        StoredResponses((FIRST,)),
    ]
    other.notices.apply(update)
    assert len(other.sent) == 2
    assert not other.notices.has_new
    host.notices.report(StoredResponses((SECOND,)))
    update = host.update(whole=True)
    assert update.responses == [FIRST, SECOND]
    assert [state[1:] for state in update.drains.values()] == [(True, True)]  # after a lost message
    assert host.update().responses == []


def test_responses_stored_while_the_server_is_away_are_sent_in_slices() -> None:
    host, other = Host(), Host()
    stored = [(f"resp_{number}", "a", "t") for number in range(3 * MAX_RESPONSES_SENT)]
    host.notices.report(StoredResponses(tuple(stored)))
    other.notices.apply(host.update(whole=True))
    while host.notices.has_new:
        update = host.update()
        assert len(update.responses) <= MAX_RESPONSES_SENT
        other.notices.apply(update)
    other.notices.report(Joined())
    assert isinstance(known := other.sent[-1], StoredResponses)
    assert sorted(known.responses) == sorted(stored)


def test_the_last_change_of_a_worker_counts() -> None:
    host, other = Host(), Host()
    host.notices.report(WorkerDrained("a", draining=True))
    early = host.update()
    other.notices.apply(early)
    other.notices.report(WorkerDrained("a", draining=False))
    host.notices.apply(other.update())
    assert host.sent == [WorkerDrained("a", draining=False)]
    other.notices.apply(early)
    assert len(other.sent) == 1


def test_drains_of_others_are_bounded() -> None:
    host = Host()
    for number in range(MAX_DRAINS + 1):
        drains = {f"w{number}": (float(number), True, False)}
        host.notices.apply(Update("n", number, 0.0, drains=drains))
    assert len(host.update(whole=True).drains) == MAX_DRAINS


def test_process_that_starts_learns_what_it_could_not_hear() -> None:
    host = Host()
    host.notices.report(StoredResponses((FIRST,)))
    host.notices.report(WorkerDrained("a", draining=True))
    host.notices.report(Joined())
    host.notices.report(Serving())
    assert host.sent == [StoredResponses((FIRST,)), WorkerDrained("a", draining=True)]
