"""The commands `router` and `check`, and how every command reads a fleet file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import yaml

from proxy.config import Check, FleetConfig, PartialConfig, PoolConfig, WorkerConfig, load, shown
from proxy.core.model.settings import HEADROOM
from proxy.errors import ConfigError, Problem, short_list
from vllm_sched.cli.fleet.journals import journal_problems, with_journal
from vllm_sched.cli.fleet.transfer_checks import compatibility_problems, offloading_problems
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.workers.flags import stated_facts, with_config_file

MAX_NOTE_NAMES = 5  # names in a note

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def describe(commands: Commands) -> None:
    router = fleet_command(commands, "router", "serve a fleet of workers that are already running")
    router.set_defaults(func=lambda args: _router(args.fleet))

    check = fleet_command(commands, "check", "show all errors of a fleet file, or what will run")
    check.add_argument(
        "--print-config",
        action="store_true",
        help="print the file with all defaults, with secrets hidden",
    )
    check.set_defaults(func=lambda args: _check(args.fleet, args.print_config))


def fleet_command(commands: Commands, name: str, what: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False
    )
    command.add_argument("fleet", type=Path, metavar="FLEET.yaml", help="the fleet file")
    return command


def read(path: Path, *more: Check) -> FleetConfig:
    """Return a fleet file's content, with its launch: blocks checked, which the router skips."""
    transfers = (offloading_problems, compatibility_problems)
    config = load(path, also=[check_policies, *transfers, journal_problems, *more])
    return config.model_copy(update={"workers": tuple(map(with_journal, config.workers))})


def check_files(draft: PartialConfig) -> Iterator[Problem]:
    """Check the files and environment variables that a fleet file refers to."""
    from proxy.net.tls import tls_problems
    from proxy.setup.secret_files import secret_problems
    from proxy.setup.tenancy import key_problems

    yield from tls_problems(draft.config)
    yield from key_problems(draft.config)
    yield from secret_problems(draft.config.router)


def check_policies(draft: PartialConfig) -> Iterator[Problem]:
    for index, worker in enumerate(draft.config.workers):
        for text in dict.fromkeys(_policy_errors(worker)):
            yield Problem(f"workers[{index}].launch.policies", text)


def _policy_errors(worker: WorkerConfig) -> Iterator[str]:
    """Yield what is wrong with each policy, and then with all of them on this worker."""
    if (launch := worker.launch) is None:
        return
    context = worker.flag_max_model_len or worker.max_model_len  # as vLLM gets it
    facts = stated_facts(with_config_file(launch.args), context)
    checks: list[Callable[[], object]] = [
        *(partial(registry.settings_of, *policy) for policy in launch.policies.items()),
        partial(registry.build, launch.policies, facts),
    ]
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield str(error)


def _router(path: Path) -> int:
    config = read(path)
    if problems := [
        Problem(
            f"workers[{index}].{key}",
            "is missing, and this command starts no worker; add it, or use `vllm-sched up`",
        )
        for index, worker in enumerate(config.workers)
        for key in worker.keys_to_choose
    ]:
        raise ConfigError(str(path), problems)
    from proxy.app import run

    return run(path, config=config, read=read)


def _check(path: Path, print_config: bool) -> int:
    from proxy.setup.app import url_of

    config = read(path, check_files)
    if print_config:
        print(yaml.safe_dump(shown(config), sort_keys=False), end="")
        return 0
    router, routing = config.router, config.routing
    print(f"{path}: good")
    admin = router.admin
    listens = [url_of(port.host, port.port, port.tls) for port in (router, admin)]
    print(f"router  {listens[0]}, admin {listens[1]}")
    print(f"routing {routing.policy}, long above {routing.short_limit} tokens")
    print(f"tenants {_tenants(config)}")
    rows = [_summary(config, worker) for worker in config.workers]
    rows += [_pool(config, pool) for pool in config.pools]
    print(columns([("worker", "role", "url", "model", "context", "started by"), *rows]))
    for note in (*note_narrow_workers(config), *note_missing_limits(config)):
        print(f"note    {note}")
    return 0


class StatedContext(NamedTuple):
    """The context of a worker or a pool, as the fleet file states it."""

    name: str
    role: str
    model: str | None
    tokens: int | None


def note_narrow_workers(config: FleetConfig) -> Iterator[str]:
    """Yield a note for each short worker that may be too small for requests estimated as short.

    Only if another role has workers with a longer or unknown context.
    """
    limit = config.routing.short_limit
    stated = [
        StatedContext(w.name, w.role, config.model_of(w), w.stated_max_model_len)
        for w in config.workers
    ] + [StatedContext(p.name, p.role, config.model_of(p), p.max_model_len) for p in config.pools]
    for short in stated:
        if short.role != "short" or not short.tokens or short.tokens >= HEADROOM * limit:
            continue
        others = [o.tokens for o in stated if o.model == short.model and o.role != short.role]
        if any(tokens is None or tokens > short.tokens for tokens in others):
            yield (
                f"{short.name} holds {short.tokens} tokens, and routing.short_limit is {limit}: "
                f"estimates may be half the real size for numbers and rare scripts, and a request "
                f"that does not fit is sent twice; lower the limit to "
                f"{int(short.tokens / HEADROOM)}, or give the worker a longer context"
            )


def note_missing_limits(config: FleetConfig) -> Iterator[str]:
    """Yield a note if tenants without a limit can fill the workers' own queues."""
    workers = [worker.name for worker in config.workers if worker.max_requests is None]
    workers += [f"of pool {pool.name}" for pool in config.pools if pool.max_requests is None]
    crowds = [tenant.name for tenant in config.tenants if tenant.limits.concurrency is None]
    if len(config.tenants) > 1 and workers and crowds:
        yield (
            f"tenants {short_list(crowds, MAX_NOTE_NAMES)} have no limits.concurrency, and workers "
            f"{short_list(workers, MAX_NOTE_NAMES)} no max_requests: shares apply only to requests "
            "that wait in the router, and none waits until a worker has twice its KV cache in "
            "requests; set one of the two"
        )


def _tenants(config: FleetConfig) -> str:
    if config.tenants:
        return ", ".join(f"{tenant.name} ({tenant.class_})" for tenant in config.tenants)
    if config.router.allow_anonymous:
        return "none: any client that reaches the router may use it"
    return "none: any client on this machine may use it"


def _pool(config: FleetConfig, pool: PoolConfig) -> tuple[str, ...]:
    length = "from worker" if pool.max_model_len is None else str(pool.max_model_len)
    where = f"dns {pool.dns}" if pool.dns else f"EndpointSlices {pool.selector}"
    return f"{pool.name}: any", pool.role, where, config.model_of(pool), length, "discovered"


def _summary(config: FleetConfig, worker: WorkerConfig) -> tuple[str, ...]:
    length = worker.stated_max_model_len
    launched = "external" if worker.url else "none"
    if worker.launch is not None:
        how = [*worker.launch.policies]
        if worker.launch.cpus:
            how.append(f"cpus {' '.join(map(str, worker.launch.cpus))}")
        launched = f"up ({', '.join(how)})" if how else "up"
    return (
        worker.name,
        worker.role,
        worker.url or ("a free port" if worker.launch else "none: simulation only"),
        config.model_of(worker),
        "from worker" if length is None else str(length),
        launched,
    )


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, for `grep`; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
