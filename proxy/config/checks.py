"""What can be wrong between fields that are each right by themselves.

A check sees the parts of a file that could be read, so that one mistake does not hide the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from proxy.config.admin import is_loopback
from proxy.config.models import PoolConfig, TransferConfig, WorkerConfig
from proxy.config.partial import Check, PartialConfig
from proxy.config.types import LAST_PORT
from proxy.errors import Problem

# What `up` says itself, and from where in the file it takes it.
OURS = {
    "--host": "comes from the worker's url",
    "--port": "comes from the worker's url",
    "--model": "comes from launch.model",
    "--served-model-name": "comes from the worker's model",
    "--api-key": "comes from the worker's api_key",
}
FOR_POLICIES = {
    "--scheduler-cls": "is what launch.policies stands for",
    "--additional-config": "is where launch.policies is written to",
}
# What each side of a hand-over is nothing without.
SIDES = {"prefill": "decode", "decode": "prefill"}
# The connectors that must be told addresses, and how one looks.
ADDRESS = {
    "p2p-nccl": (re.compile(r"[\w.-]+:\d{1,5}", re.ASCII), "host:port"),
    "mooncake": (re.compile(r"http://[\w.-]+:\d{1,5}", re.ASCII), "http://host:port"),
    "lmcache": (re.compile(r"[\w.-]+:\d{1,5}:\d{1,5}", re.ASCII), "host:init_port:alloc_port"),
}
PORT = re.compile(r":(\d+)")
# A flag and its value in one word, which vLLM takes for neither.
ONE_WORD = re.compile(r"(--?[a-z][\w.-]*)\s+(.*\S)\s*", re.ASCII | re.IGNORECASE | re.DOTALL)
FORM_BYTES = 64 * 1024  # of a form that holds a file, beside the file
# Names of this machine that can't share a port.
HERE = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"})  # noqa: S104 - only compared


def addresses(draft: PartialConfig) -> Iterator[Problem]:
    """Check that every worker has an address, and no two things share one."""
    taken: dict[tuple[str, int], str] = {}
    if router := draft.router:
        for block, host, port in (
            (("router",), router.host, router.port),
            (("router", "admin"), router.admin.host, router.admin.port),
        ):
            path = f"{'.'.join(block)}.port"
            if not port or not draft.sure(block, "host", "port"):
                continue
            if (other := taken.setdefault(_place(host, port), path)) != path:
                yield Problem(path, f"{port}: {other} is the same; give one of them another")
    for index, worker in draft.legible_workers.items():
        path, place = f"workers[{index}].url", ("workers", index)
        if worker.address is None:
            nobody = worker.launch is None and worker.profile is None
            if nobody and draft.sure(place, "url", "launch", "profile"):
                yield Problem(
                    path,
                    "is missing; give it as http://host:port, or say under launch how "
                    "`vllm-sched up` starts the worker",
                )
        elif (other := taken.setdefault(_place(*worker.address), path)) != path:
            yield Problem(
                path, f"{worker.url!r}: {other} is at the same place; correct one of them"
            )


def _place(host: str, port: int) -> tuple[str, int]:
    return ("here" if host in HERE else host.lower(), port)


def admin(draft: PartialConfig) -> Iterator[Problem]:
    """Check that nobody rules the fleet who was not given a key."""
    if (router := draft.router) is None:
        return
    admin, path = router.admin, "router.admin"
    if admin.key_file is not None and admin.key_env is not None:
        yield Problem(f"{path}.key_env", "key_file is given too; drop one of them")
    told = draft.sure(("router", "admin"), "host", "key_file", "key_env")
    if told and not admin.has_key and not is_loopback(admin.host):
        yield Problem(
            f"{path}.host",
            f"{admin.host!r}: whoever reaches it rules the fleet; name the file with its key in "
            f"{path}.key_file, or the variable in {path}.key_env, or listen on 127.0.0.1",
        )


def encryption(draft: PartialConfig) -> Iterator[Problem]:
    """Check that what is said of TLS to workers is whole, and of use."""
    blocks = {"worker_tls": draft.worker_tls}
    for index, worker in draft.legible_workers.items():
        path = f"workers[{index}]"
        blocks[f"{path}.tls"] = worker.tls
        encrypted = worker.url is not None and worker.url.startswith("https://")
        if worker.tls is not None and worker.url is not None and not encrypted:
            why = f"the url is {worker.url!r}; write https:// there, or leave this out"
            yield Problem(f"{path}.tls", why)
        if worker.launch is not None and (encrypted or worker.tls is not None):
            why = "`vllm-sched up` starts workers that speak http://; drop launch, or TLS"
            yield Problem(f"{path}.launch", why)
    pools = draft.pools.items()
    blocks |= {f"discovery.pools[{index}].tls": pool.tls for index, pool in pools}
    for path, block in blocks.items():
        if block is not None and (block.cert_file is None) != (block.key_file is None):
            missing = "cert_file" if block.cert_file is None else "key_file"
            yield Problem(f"{path}.{missing}", "is missing; a certificate and its key go together")


def names(draft: PartialConfig) -> Iterator[Problem]:
    """Check that no two workers have one name."""
    first: dict[str, int] = {}
    for index, worker in draft.legible_workers.items():
        if not draft.sure(("workers", index), "name"):
            continue
        if (other := first.setdefault(worker.name, index)) != index:
            yield Problem(
                f"workers[{index}].name",
                f"{worker.name!r}: workers[{other}] is called that too; rename one of them",
            )


def launches(draft: PartialConfig) -> Iterator[Problem]:
    """Check that no flag contradicts what the rest of the file says."""
    for index, worker in draft.legible_workers.items():
        if worker.launch is None:
            continue
        path = f"workers[{index}].launch.args"
        ours = OURS | (FOR_POLICIES if worker.launch.policies else {})
        for place, flag in enumerate(worker.launch.args):
            name = flag.partition("=")[0].replace("_", "-").partition(".")[0]
            if name in ours:
                yield Problem(f"{path}[{place}]", f"{name!r}: {ours[name]}; leave it out here")
            elif apart := ONE_WORD.fullmatch(flag):
                why = f"a flag and its value in one; write it as {apart[1]}={apart[2]}"
                yield Problem(f"{path}[{place}]", f"{flag!r}: {why}")
        told, flagged = worker.max_model_len, worker.flag_max_model_len
        if told and flagged and told > flagged:
            why = f"--max-model-len {flagged}: less than max_model_len, {told}; drop one of them"
            yield Problem(path, why)


def limits(draft: PartialConfig) -> Iterator[Problem]:
    """Check that what is called short and long fits the workers for it."""
    if draft.routing is None or not draft.sure_of_all("role", "model"):
        return
    limit = draft.routing.short_limit
    everyone = draft.everyone
    for model in dict.fromkeys(map(draft.model_of, everyone)):
        same = [worker for worker in everyone if draft.model_of(worker) == model]
        if len({worker.role for worker in same}) == 1:
            continue  # there is no other pool to tell apart
        if (short := _largest(same, "short")) and short[0] < limit:
            yield Problem(
                "routing.short_limit",
                f"{limit}: no short worker holds so much, the largest ({short[1]}) {short[0]} "
                f"tokens; give {short[0]} or less, or that worker a larger max_model_len",
            )
        if (long := _largest(same, "long")) and long[0] <= limit:
            yield Problem(
                "routing.short_limit",
                f"{limit}: nothing that fits would be long, the largest long worker ({long[1]}) "
                f"holds {long[0]} tokens; give less",
            )


def discovered(draft: PartialConfig) -> Iterator[Problem]:
    """Check that each pool is looked for in one way, and can be told from the others."""
    first: dict[str, int] = {}
    for index, pool in draft.pools.items():
        path, place = f"discovery.pools[{index}]", ("discovery", "pools", index)
        named = draft.sure(place, "name")
        if named and (other := first.setdefault(pool.name, index)) != index:
            why = f"{pool.name!r}: pools[{other}] is called that too; rename one of them"
            yield Problem(f"{path}.name", why)
        sure = draft.sure(place, "selector", "dns")
        if sure and (pool.selector is None) == (pool.dns is None):
            which = "neither" if pool.dns is None else "both"
            yield Problem(path, f"has {which} of selector and dns; give one of them")
        if pool.dns is not None and isinstance(pool.port, str):
            why = f"{pool.port!r}: a look-up of dns tells no ports by name; give the number"
            yield Problem(f"{path}.port", why)
        if pool.api_key is not None and pool.api_key_file is not None:
            yield Problem(f"{path}.api_key_file", "api_key is given too; drop one of them")


def _largest(workers: Iterable[WorkerConfig], role: str) -> tuple[int, str] | None:
    """Return what the workers of a role hold at most; None where one of them must be asked."""
    known = [(w.stated_max_model_len or 0, w.name) for w in workers if w.role == role]
    return max(known) if known and all(length for length, _ in known) else None


def sizes(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a body that is accepted can also be queued."""
    if (router := draft.router) is None:
        return
    if not draft.sure(("router",), "max_body_bytes"):
        return
    if router.queue.max_bytes < router.max_body_bytes:
        yield Problem(
            "router.queue.max_bytes",
            f"{router.queue.max_bytes}: a body may have router.max_body_bytes, "
            f"{router.max_body_bytes}, and could never wait; give at least that",
        )
    batches = router.batches
    if batches.path is not None and batches.max_file_bytes + FORM_BYTES > router.max_body_bytes:
        yield Problem(
            "router.batches.max_file_bytes",
            f"{batches.max_file_bytes}: a file comes as one body, which has at most "
            f"router.max_body_bytes, {router.max_body_bytes}; give "
            f"{max(router.max_body_bytes - FORM_BYTES, 1)} or less, or make that more",
        )


def roles(draft: PartialConfig) -> Iterator[Problem]:
    """Check that prefill and decode workers have each other, and something between them."""
    if not draft.sure_of_all("role", "model"):
        return
    have = {(draft.model_of(worker), worker.role) for worker in draft.everyone}
    each: list[tuple[str, WorkerConfig | PoolConfig]] = [
        *((f"workers[{index}].role", worker) for index, worker in draft.legible_workers.items()),
        *((f"discovery.pools[{index}].role", pool) for index, pool in draft.pools.items()),
    ]
    for path, worker in each:
        if worker.role not in SIDES:
            continue
        other = SIDES[worker.role]
        if (draft.model_of(worker), other) not in have:
            why = "could not hand a prompt on" if other == "decode" else "would get none"
            yield Problem(
                path,
                f"{worker.role!r}: no worker of its model has the role {other}, so it {why}; add "
                "one, or make this one general",
            )
        elif not draft.moves and worker.role == "prefill":
            yield Problem(
                path,
                "'prefill': nothing moves its KV cache to a decode worker; name the connector at "
                "the top of the file, as in transfer: nixl",
            )


def transfers(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a transfer has two ends and what its connector needs."""
    transfer = draft.transfer
    if transfer is None:
        routing = draft.routing
        if routing is not None and routing.disaggregate_above != "auto" and not draft.moves:
            yield Problem(
                "routing.disaggregate_above",
                f"{routing.disaggregate_above}: there is no transfer between prefill and "
                "decode workers; name its connector, as in transfer: nixl, or leave this out",
            )
        return
    connector, workers = transfer.connector, list(draft.legible_workers.values())
    is_known = draft.sure_of_all("name", "role") and draft.sure(("transfer",), "addresses")
    if is_known and not any(worker.role in SIDES for worker in draft.everyone):
        why = "no worker has the role prefill or decode; give the roles, or leave this out"
        yield Problem("transfer", f"{connector!r}: {why}")
    if transfer.mode != "pull" and connector != "nixl":
        yield Problem("transfer.mode", f"{transfer.mode!r}: only nixl has modes; leave it out")
    if transfer.path is not None and connector != "shared-storage":
        yield Problem(
            "transfer.path", f"only shared-storage has one, not {connector}; leave it out"
        )
    unknown = transfer.addresses.keys() - {worker.name for worker in workers}
    for name in unknown if is_known and not draft.pools else ():  # pools' are known later
        yield Problem(f"transfer.addresses.{name}", "no worker has that name; correct or drop it")
    if transfer.addresses and connector not in ADDRESS:
        yield Problem("transfer.addresses", f"{connector} takes none; leave them out")
    elif connector in ADDRESS:
        yield from _places(transfer, workers if is_known else ())


def _places(transfer: TransferConfig, workers: Iterable[WorkerConfig]) -> Iterator[Problem]:
    pattern, example = ADDRESS[transfer.connector]
    for name, place in transfer.addresses.items():
        if not pattern.fullmatch(place) or any(int(p) > LAST_PORT for p in PORT.findall(place)):
            yield Problem(f"transfer.addresses.{name}", f"{place!r}: write it as {example}")
    if transfer.connector != "p2p-nccl":
        return
    for worker in workers:
        if worker.role in SIDES and worker.name not in transfer.addresses:
            yield Problem(
                "transfer.addresses",
                f"{worker.name!r} is missing: p2p-nccl has to know where it listens; give "
                f"{worker.name}: {example}",
            )


CHECKS: tuple[Check, ...] = (
    addresses,
    admin,
    encryption,
    names,
    launches,
    limits,
    discovered,
    sizes,
    roles,
    transfers,
)
