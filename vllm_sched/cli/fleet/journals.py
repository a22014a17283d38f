"""The journals of workers that `up` starts, by `workers[].journal` or `launch.policies`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, cast

from proxy.config import FleetConfig, PartialConfig, WorkerConfig
from proxy.config.workers import AUTO
from proxy.errors import Problem
from vllm_sched.errors import UsageError
from vllm_sched.policies.journal_settings import TCP, JournalSettings
from vllm_sched.policies.registry import JOURNAL, settings_of

# Hosts that listen everywhere, and where the router on the same machine connects.
LOCAL_HOSTS = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104

Taken: TypeAlias = dict[str, tuple[str, bool]]  # path in the file; whether the file has the address


def launched_policies(config: FleetConfig, worker: WorkerConfig) -> Mapping[str, dict[str, Any]]:
    policies = worker.launch.policies if worker.launch else {}
    if not worker.journal or JOURNAL in policies:
        return policies
    journal = {"endpoint": worker.journal[0]}
    if (key_file := config.router.journal.key_file) is not None:
        journal["key_file"] = str(key_file.absolute())
    return {**policies, JOURNAL: journal}


def with_journal(worker: WorkerConfig) -> WorkerConfig:
    """Return a launched worker with one journal address per engine."""
    if worker.launch is None or worker.journal == (AUTO,):
        return worker
    return worker.model_copy(update={"journal": _addresses(worker)})


def tcp_address(endpoint: str) -> tuple[str, int] | None:
    """Return the host and port of a journal; None for a Unix socket."""
    tcp = TCP.fullmatch(endpoint)
    return None if tcp is None else (tcp["host"].strip("[]"), int(tcp["port"]))


def journal_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Check that the router can read the journals of launched workers."""
    key_file = draft.config.router.journal.key_file
    taken: Taken = {}
    for index, worker in enumerate(draft.config.workers):
        path, given, block = f"workers[{index}].journal", worker.journal, _block(worker)
        if block is not None and given and not _connects(given[0], block.endpoint):
            yield Problem(
                path,
                f"{given[0]!r}: launch.policies.journal listens on {block.endpoint!r}; give both "
                "the same address, or leave out this one",
            )
        elif worker.launch is not None and AUTO not in given:
            yield from _address_problems(path, worker, taken)
        if block is not None and key_file is not None:
            own = block.key_file
            if own is None or Path(own).absolute() != key_file.absolute():
                yield Problem(
                    f"workers[{index}].launch.policies",
                    f"journal.key_file: {own or 'none'}: router.journal.key_file is {key_file}, "
                    "and messages with another signature are dropped; give both the same file",
                )


def _address_problems(path: str, worker: WorkerConfig, taken: Taken) -> Iterator[Problem]:
    """Check the addresses of a launched worker's engines, and add them to `taken`."""
    try:
        addresses = _addresses(worker)
    except UsageError as error:
        yield Problem(path, str(error))
        return
    endpoints = worker.journal
    if endpoints not in ((), addresses[:1], addresses):
        why = f"the engines listen on {', '.join(addresses)}; give the first address alone"
        yield Problem(path, f"{', '.join(endpoints)}: {why}")
    for address in addresses:
        other, is_given = taken.setdefault(address, (path, address in endpoints))
        # `check_journals` compares two that are given.
        if other != path and not (is_given and address in endpoints):
            yield Problem(path, f"{address!r}: {other} is the same; give each engine its own")


def _addresses(worker: WorkerConfig) -> tuple[str, ...]:
    """Return where the router reads the journal of each of a launched worker's engines."""
    if worker.journal:
        settings = _settings({"endpoint": worker.journal[0]})
    elif (block := _block(worker)) is not None:
        settings = block
    else:
        return ()
    ranks = map(settings.endpoint_of, range(worker.engines))
    return tuple(map(_local, ranks))


def _block(worker: WorkerConfig) -> JournalSettings | None:
    """Return the journal's settings in `launch.policies`; None if they are absent or invalid."""
    if worker.launch is not None and JOURNAL in worker.launch.policies:
        with suppress(UsageError):  # `policies` reports it
            return _settings(worker.launch.policies[JOURNAL])
    return None


def _settings(block: Mapping[str, object]) -> JournalSettings:
    return cast("JournalSettings", settings_of(JOURNAL, block))


def _local(endpoint: str) -> str:
    tcp = TCP.fullmatch(endpoint)
    if tcp is None or tcp["host"] not in LOCAL_HOSTS:
        return endpoint
    return f"tcp://{LOCAL_HOSTS[tcp['host']]}:{tcp['port']}"


def _connects(endpoint: str, listening: str) -> bool:
    """Return whether a connection to an endpoint reaches the engine that listens."""
    ours, theirs = TCP.fullmatch(endpoint), TCP.fullmatch(listening)
    if ours is None or theirs is None or theirs["host"] not in LOCAL_HOSTS:
        return endpoint == listening
    return ours["port"] == theirs["port"]
