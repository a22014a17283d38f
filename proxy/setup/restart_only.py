"""Settings of the fleet file that only a restart can change."""

from __future__ import annotations

from proxy.config import FleetConfig, TlsConfig, WorkerConfig
from proxy.config.admin import AdminConfig

RESTART_ONLY = (
    "host",
    "port",
    "tls",
    "admin",
    "processes",
    "shared",
    "tracing",
)  # settings of the `router` block
STORE = ("path", "database", "database_password_file")  # settings of `router.batches`
# Settings that `up` passes to the workers that it starts, besides the model name.
LAUNCHED = ("launch", "url", "role", "max_model_len", "api_key")


def as_started(config: FleetConfig, started: FleetConfig) -> FleetConfig:
    """Return a later fleet file with its restart-only settings as at the start.

    Whether a port uses TLS and whether the admin API needs a key are restart-only. The paths of
    certificates and keys are not: the files from the start may no longer exist.
    """
    router, before = config.router, started.router
    effective = {
        **{name: getattr(before, name) for name in RESTART_ONLY},
        "tls": _shown(router.tls, before.tls),
        "admin": _admin(router.admin, before.admin),
        "batches": router.batches.model_copy(
            update={name: getattr(before.batches, name) for name in STORE}
        ),
    }
    # Hand-overs in flight use the connector.
    return config.model_copy(
        update={"router": router.model_copy(update=effective), "transfer": started.transfer}
    )


def _changed_launch(
    config: FleetConfig, worker: WorkerConfig, started: FleetConfig, before: WorkerConfig | None
) -> list[str]:
    if before is None:
        return ["launch"] if worker.launch else []
    same = {"url"} if worker.url is None else set()  # `up` chose any port
    changed = [n for n in LAUNCHED if n not in same and getattr(worker, n) != getattr(before, n)]
    return changed + ["model"] * (config.model_of(worker) != started.model_of(before))


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


def restart_only_changes(config: FleetConfig, started: FleetConfig) -> list[str]:
    effective = as_started(config, started)
    changed = [
        f"router.{name}"
        for name in RESTART_ONLY
        if getattr(config.router, name) != getattr(effective.router, name)
    ]
    changed += [
        f"router.batches.{name}"
        for name in STORE
        if getattr(config.router.batches, name) != getattr(effective.router.batches, name)
    ]
    if config.transfer != effective.transfer:
        changed.append("transfer")
    launched = {worker.name: worker for worker in started.workers if worker.launch}
    changed += [
        f"workers[{index}].{setting}"
        for index, worker in enumerate(config.workers)
        for setting in _changed_launch(config, worker, started, launched.get(worker.name))
    ]
    names = {worker.name for worker in config.workers}
    removed = [name for name in launched if name not in names]
    return changed + [f"workers: {name} keeps running if `up` started it" for name in removed]
