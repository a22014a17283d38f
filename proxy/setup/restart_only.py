"""What of a fleet file only a start can change, and how much of a later one holds until then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.config import FleetConfig, TlsConfig, WorkerConfig
    from proxy.config.admin import AdminConfig

BOUND = ("host", "port", "tls", "admin", "processes", "tracing")  # of the block `router`
# Of a worker that `up` starts; and its model's name.
LAUNCHED = ("launch", "url", "role", "max_model_len", "api_key")


def as_started(config: FleetConfig, started: FleetConfig) -> FleetConfig:
    """Return a later fleet file, with what only a start can change as it was at the start.

    Whether a port speaks TLS, or the admin API wants a key, is such a thing. In which files
    certificates and keys are is not: those of the start may be there no longer.
    """
    router, before = config.router, started.router
    held = {
        **{name: getattr(before, name) for name in BOUND},
        "tls": _shown(router.tls, before.tls),
        "admin": _admin(router.admin, before.admin),
        "batches": router.batches.model_copy(update={"path": before.batches.path}),
    }
    # Legs are under way that the connector has begun: that one stays.
    return config.model_copy(
        update={"router": router.model_copy(update=held), "transfer": started.transfer}
    )


def _launched_otherwise(
    config: FleetConfig, worker: WorkerConfig, started: FleetConfig, before: WorkerConfig | None
) -> list[str]:
    """Name what of a worker `up` gave it when it began, and would give it otherwise now."""
    if before is None:
        return ["launch"] if worker.launch else []
    same = {"url"} if worker.url is None else set()  # any port
    told = [n for n in LAUNCHED if n not in same and getattr(worker, n) != getattr(before, n)]
    return told + ["model"] * (config.model_of(worker) != started.model_of(before))


def _admin(now: AdminConfig, before: AdminConfig) -> AdminConfig:
    key_of = now if now.has_key and before.has_key else before
    return before.model_copy(
        update={
            "key_file": key_of.key_file,
            "key_env": key_of.key_env,
            "tls": _shown(now.tls, before.tls),
        }
    )


def _shown(now: TlsConfig | None, before: TlsConfig | None) -> TlsConfig | None:
    if now is None or before is None:
        return before
    if (now.client_ca_file is None) != (before.client_ca_file is None):
        return now.model_copy(update={"client_ca_file": before.client_ca_file})
    return now


def takes_a_restart(config: FleetConfig, started: FleetConfig) -> list[str]:
    """Say what of a later fleet file will change only with the next start."""
    held = as_started(config, started)
    late = [
        f"router.{name}"
        for name in BOUND
        if getattr(config.router, name) != getattr(held.router, name)
    ]
    if config.router.batches.path != held.router.batches.path:
        late.append("router.batches.path")
    if config.transfer != held.transfer:
        late.append("transfer")
    launched = {worker.name: worker for worker in started.workers if worker.launch}
    late += [
        f"workers[{index}].{what}"
        for index, worker in enumerate(config.workers)
        for what in _launched_otherwise(config, worker, started, launched.get(worker.name))
    ]
    here = {worker.name for worker in config.workers}
    gone = [name for name in launched if name not in here]
    return late + [f"workers: {name}, if `up` started it, still runs" for name in gone]
