"""Checks of values that are valid by themselves, but contradict each other.

A check gets the valid parts of a file, so that one error does not hide the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from proxy.config.admin import is_loopback
from proxy.config.partial import Check, PartialConfig
from proxy.config.shared import database_of
from proxy.config.tenants import TenantConfig
from proxy.config.types import LAST_PORT
from proxy.config.workers import AUTO, PoolConfig, WorkerConfig, server_at
from proxy.errors import Problem

# Flags that `vllm-sched up` sets itself, and where in the file the value is.
GENERATED_FLAGS = {
    "--host": "comes from the worker's url",
    "--port": "comes from the worker's url",
    "--model": "comes from launch.model",
    "--served-model-name": "comes from the worker's model",
    "--api-key": "comes from the worker's api_key",
}
POLICY_FLAGS = {
    "--scheduler-cls": "is set by launch.policies and journal",
    "--additional-config": "is set by launch.policies and journal",
}
# Each role of a hand-over, and the role that it needs.
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
# The connectors that use transfer.addresses, with the format of an address.
ADDRESS_FORMATS = {
    "mooncake": (re.compile(r"http://[\w.-]+:\d{1,5}", re.ASCII), "http://host:port"),
    "lmcache": (re.compile(r"[\w.-]+:\d{1,5}:\d{1,5}", re.ASCII), "host:init_port:alloc_port"),
}
PORT = re.compile(r":(\d+)")
# A flag and its value in one argument, which vLLM does not parse.
FLAG_AND_VALUE = re.compile(r"(--?[a-z][\w.-]*)\s+(.*\S)\s*", re.ASCII | re.IGNORECASE | re.DOTALL)
FORM_BYTES = 64 * 1024  # of an upload's form, without the file


def check_addresses(draft: PartialConfig) -> Iterator[Problem]:
    """Check that every worker has an address, and that no two servers share one."""
    taken: dict[tuple[str, int], str] = {}
    router = draft.config.router
    for block, host, port in (
        (("router",), router.host, router.port),
        (("router", "admin"), router.admin.host, router.admin.port),
    ):
        path = f"{'.'.join(block)}.port"
        if not port or not draft.has_valid(block, "host", "port"):
            continue
        if (other := taken.setdefault(server_at(host, port), path)) != path:
            yield Problem(path, f"{port}: {other} is the same; change one of them")
    for index, worker in enumerate(draft.config.workers):
        path, place = f"workers[{index}].url", ("workers", index)
        if worker.address is None:
            no_source = worker.launch is None and worker.profile is None
            if no_source and draft.has_valid(place, "url", "launch", "profile"):
                yield Problem(
                    path,
                    "is missing; give it as http://host:port, or give a launch block so that "
                    "`vllm-sched up` starts the worker",
                )
        elif (other := taken.setdefault(server_at(*worker.address), path)) != path:
            yield Problem(path, f"{worker.url!r}: {other} is the same address; change one of them")


def check_admin(draft: PartialConfig) -> Iterator[Problem]:
    """Check that an admin API that other machines reach requires a key."""
    admin, path = draft.config.router.admin, "router.admin"
    if admin.key_file is not None and admin.key_env is not None:
        yield Problem(f"{path}.key_env", "key_file is given too; remove one of them")
    sure = draft.has_valid(("router", "admin"), "host", "key_file", "key_env")
    if sure and not admin.has_key and not is_loopback(admin.host):
        yield Problem(
            f"{path}.host",
            f"{admin.host!r}: without a key, any client that reaches this address controls the "
            f"fleet; give {path}.key_file or {path}.key_env, or listen on 127.0.0.1",
        )


def check_tls(draft: PartialConfig) -> Iterator[Problem]:
    """Check that TLS settings for workers are complete and have an effect."""
    blocks = {"worker_tls": draft.config.worker_tls}
    for index, worker in enumerate(draft.config.workers):
        path = f"workers[{index}]"
        blocks[f"{path}.tls"] = worker.tls
        encrypted = worker.url is not None and worker.url.startswith("https://")
        if worker.tls is not None and worker.url is not None and not encrypted:
            why = f"the url is {worker.url!r}; change it to https://, or leave this out"
            yield Problem(f"{path}.tls", why)
        if worker.launch is not None and (encrypted or worker.tls is not None):
            why = "`vllm-sched up` starts workers with http:// URLs only; remove launch, or TLS"
            yield Problem(f"{path}.launch", why)
    pools = enumerate(draft.config.pools)
    blocks |= {f"discovery.pools[{index}].tls": pool.tls for index, pool in pools}
    for path, block in blocks.items():
        if block is not None and (block.cert_file is None) != (block.key_file is None):
            missing = "cert_file" if block.cert_file is None else "key_file"
            yield Problem(f"{path}.{missing}", "is missing; give both cert_file and key_file")


def check_names(draft: PartialConfig) -> Iterator[Problem]:
    """Check that no two workers, pools or tenants have the same name."""
    config = draft.config
    named: dict[str, Sequence[WorkerConfig | PoolConfig | TenantConfig]] = {
        "workers": config.workers, "discovery.pools": config.pools, "tenants": config.tenants,
    }  # fmt: skip
    for path, blocks in named.items():
        parts = path.split(".")
        first: dict[str, int] = {}
        for index, block in enumerate(blocks):
            if not draft.has_valid((*parts, index), "name"):
                continue
            if (other := first.setdefault(block.name, index)) != index:
                why = f"{block.name!r}: {parts[-1]}[{other}] has the same name; rename one of them"
                yield Problem(f"{path}[{index}].name", why)


def check_journals(draft: PartialConfig) -> Iterator[Problem]:
    """Check that no two engines have the same journal."""
    first: dict[str, str] = {}
    for index, worker in enumerate(draft.config.workers):
        for place, endpoint in enumerate(worker.journal):
            path = f"workers[{index}].journal[{place}]"
            if endpoint == AUTO:
                if worker.launch is None or len(worker.journal) > 1:
                    yield Problem(
                        path,
                        "'auto' is the whole journal of a worker with a launch block; give the "
                        "address of each engine's journal",
                    )
            elif (other := first.setdefault(endpoint, path)) != path:
                yield Problem(path, f"{endpoint!r}: {other} is the same; give each engine its own")


def check_launches(draft: PartialConfig) -> Iterator[Problem]:
    """Check that no flag of a worker contradicts the rest of the file."""
    for index, worker in enumerate(draft.config.workers):
        if worker.launch is None:
            continue
        path = f"workers[{index}].launch.args"
        generated = GENERATED_FLAGS | (POLICY_FLAGS if worker.sets_scheduler else {})
        for place, flag in enumerate(worker.launch.args):
            name = flag.partition("=")[0].replace("_", "-").partition(".")[0]
            if name in generated:
                yield Problem(f"{path}[{place}]", f"{name!r}: {generated[name]}; leave it out here")
            elif apart := FLAG_AND_VALUE.fullmatch(flag):
                why = f"a flag and its value in one argument; write it as {apart[1]}={apart[2]}"
                yield Problem(f"{path}[{place}]", f"{flag!r}: {why}")
        stated, flagged = worker.max_model_len, worker.flag_max_model_len
        if stated and flagged and stated > flagged:
            why = f"--max-model-len {flagged}: less than max_model_len, {stated}; remove one"
            yield Problem(path, why)


def check_short_limit(draft: PartialConfig) -> Iterator[Problem]:
    """Check that `short_limit` fits the context lengths of short and long workers."""
    is_valid = draft.has_valid(("routing",), "short_limit")
    if not (is_valid and draft.all_have_valid("role", "model")):
        return
    limit = draft.config.routing.short_limit
    workers, model_of = draft.all_workers, draft.config.model_of
    for model in dict.fromkeys(map(model_of, workers)):
        same = [worker for worker in workers if model_of(worker) == model]
        if len({worker.role for worker in same}) == 1:
            continue  # the limit has no effect within one role
        if (short := _largest(same, "short")) and short[0] < limit:
            yield Problem(
                "routing.short_limit",
                f"{limit}: above the context length of every short worker, {short[0]} tokens at "
                f"most ({short[1]}); give {short[0]} or less, or raise that worker's max_model_len",
            )
        if (long := _largest(same, "long")) and long[0] <= limit:
            yield Problem(
                "routing.short_limit",
                f"{limit}: no long request would fit on a long worker, {long[0]} tokens at most "
                f"({long[1]}); give less",
            )


def check_pools(draft: PartialConfig) -> Iterator[Problem]:
    """Check that each pool has one way of discovery."""
    for index, pool in enumerate(draft.config.pools):
        path, place = f"discovery.pools[{index}]", ("discovery", "pools", index)
        sure = draft.has_valid(place, "selector", "dns")
        if sure and (pool.selector is None) == (pool.dns is None):
            given = "neither" if pool.dns is None else "both"
            yield Problem(path, f"has {given} of selector and dns; give exactly one")
        if pool.dns is not None and isinstance(pool.port, str):
            why = f"{pool.port!r}: a DNS look-up returns no port names; give the number"
            yield Problem(f"{path}.port", why)
        if pool.api_key is not None and pool.api_key_file is not None:
            yield Problem(f"{path}.api_key_file", "api_key is given too; remove one of them")


def _largest(workers: Iterable[WorkerConfig], role: str) -> tuple[int, str] | None:
    """Return the largest context length of a role; None if the file does not state all of them."""
    contexts = [(w.stated_max_model_len or 0, w.name) for w in workers if w.role == role]
    return max(contexts) if contexts and all(length for length, _ in contexts) else None


def check_sizes(draft: PartialConfig) -> Iterator[Problem]:
    """Check that an accepted body fits in the queue, and an uploaded file in a body."""
    router = draft.config.router
    if not draft.has_valid(("router",), "max_body_bytes"):
        return
    if router.queue.max_bytes < router.max_body_bytes:
        yield Problem(
            "router.queue.max_bytes",
            f"{router.queue.max_bytes}: less than router.max_body_bytes, "
            f"{router.max_body_bytes}, so a large request could never wait; give at least that",
        )
    batches = router.batches
    if batches.path is not None and batches.database is not None:
        yield Problem("router.batches.database", "path is given too; remove one of them")
    if batches.database is None and batches.database_password_file is not None:
        why = "has no effect without database; remove it"
        yield Problem("router.batches.database_password_file", why)
    if batches.are_on and batches.max_file_bytes + FORM_BYTES > router.max_body_bytes:
        yield Problem(
            "router.batches.max_file_bytes",
            f"{batches.max_file_bytes}: a file is uploaded in one body, of at most "
            f"router.max_body_bytes, {router.max_body_bytes}; give "
            f"{max(router.max_body_bytes - FORM_BYTES, 1)} or less, or raise router.max_body_bytes",
        )


def check_drain(draft: PartialConfig) -> Iterator[Problem]:
    """Check that requests have time to finish after the notice of a drain."""
    router = draft.config.router
    notice_s, drain_s = router.drain_notice_s, router.drain_s
    if notice_s and notice_s >= drain_s and draft.has_valid(("router",), "drain_s"):
        why = f"is part of drain_s, {drain_s:g}, and leaves requests no time to finish; give less"
        yield Problem("router.drain_notice_s", f"{notice_s:g}: {why}")


def check_shared(draft: PartialConfig) -> Iterator[Problem]:
    """Check that the settings of the Redis server fit its URL."""
    if (shared := draft.config.router.shared) is None:
        return
    if shared.ca_file is not None and not shared.url.startswith("rediss://"):
        why = "has no effect without TLS; write the url with rediss://, or remove ca_file"
        yield Problem("router.shared.ca_file", why)
    if shared.cluster and (shared.url.startswith("unix:") or database_of(shared.url)):
        why = "a cluster has no socket, and no database but 0; correct it, or remove cluster"
        yield Problem("router.shared.url", why)


def check_roles(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a prefill worker has a decode worker of its model, a connector, and vice versa."""
    if not draft.all_have_valid("role", "model"):
        return
    config = draft.config
    served = {(config.model_of(worker), worker.role) for worker in draft.all_workers}
    blocks: list[tuple[str, WorkerConfig | PoolConfig]] = [
        *((f"workers[{index}].role", worker) for index, worker in enumerate(config.workers)),
        *((f"discovery.pools[{index}].role", pool) for index, pool in enumerate(config.pools)),
    ]
    for path, worker in blocks:
        if (other := OTHER_ROLE.get(worker.role)) is None:
            continue
        if (config.model_of(worker), other) not in served:
            why = "has no worker to hand over to" if other == "decode" else "gets no hand-overs"
            yield Problem(
                path,
                f"{worker.role!r}: no worker of its model has the role {other}, so it {why}; add "
                f"a {other} worker, or change this role to general",
            )
        elif not draft.has_transfer and worker.role == "prefill":
            yield Problem(
                path,
                "'prefill': no connector moves its KV cache to a decode worker; give the connector "
                "at the top of the file, as in transfer: nixl",
            )


def check_threshold(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a threshold of hand-overs has a transfer."""
    above = draft.config.routing.disaggregate_above
    if above != "auto" and not draft.has_transfer:
        yield Problem(
            "routing.disaggregate_above",
            f"{above}: has no effect without transfer; give the connector, as in transfer: nixl, "
            "or leave this out",
        )


def check_transfer(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a transfer has both roles and the settings of its connector."""
    if (transfer := draft.config.transfer) is None:
        return
    connector = transfer.connector
    if _knows_workers(draft) and not any(worker.role in OTHER_ROLE for worker in draft.all_workers):
        why = "no worker has the role prefill or decode; set the roles, or leave this out"
        yield Problem("transfer", f"{connector!r}: {why}")
    if transfer.mode != "pull" and connector != "nixl":
        yield Problem("transfer.mode", f"{transfer.mode!r}: only nixl has modes; leave it out")
    if transfer.path is not None and connector != "shared-storage":
        why = f"{connector} has no path, only shared-storage; leave it out"
        yield Problem("transfer.path", why)


def check_transfer_addresses(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a transfer's addresses are of workers, in the format of the connector."""
    if (transfer := draft.config.transfer) is None or not transfer.addresses:
        return
    names = {worker.name for worker in draft.config.workers}
    if _knows_workers(draft) and not draft.config.pools:  # pools' names come later
        for name in transfer.addresses.keys() - names:
            why = "no worker has this name; correct or remove it"
            yield Problem(f"transfer.addresses.{name}", why)
    if transfer.connector not in ADDRESS_FORMATS:
        why = f"{transfer.connector} does not use addresses; leave them out"
        yield Problem("transfer.addresses", why)
        return
    pattern, example = ADDRESS_FORMATS[transfer.connector]
    for name, address in transfer.addresses.items():
        ports = map(int, PORT.findall(address))
        if not pattern.fullmatch(address) or any(port > LAST_PORT for port in ports):
            yield Problem(f"transfer.addresses.{name}", f"{address!r}: write it as {example}")


def _knows_workers(draft: PartialConfig) -> bool:
    return draft.all_have_valid("name", "role") and draft.has_valid(("transfer",), "addresses")


CHECKS: tuple[Check, ...] = (
    check_addresses,
    check_admin,
    check_tls,
    check_names,
    check_journals,
    check_launches,
    check_short_limit,
    check_pools,
    check_sizes,
    check_drain,
    check_shared,
    check_roles,
    check_threshold,
    check_transfer,
    check_transfer_addresses,
)
