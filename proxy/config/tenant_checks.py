"""Checks of tenants, of their queue settings, and of a router without tenants."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.config.admin import is_loopback
from proxy.config.partial import Check, PartialConfig
from proxy.config.tenants import TenantConfig
from proxy.errors import Problem


def check_tenants(draft: PartialConfig) -> Iterator[Problem]:
    """Check that each tenant has keys of its own."""
    hashes: dict[str, str] = {}
    for index, tenant in enumerate(draft.config.tenants):
        path, block = f"tenants[{index}]", ("tenants", index)
        if not has_keys(tenant) and draft.has_valid(block, "key_hashes", "keys_file", "keys_env"):
            why = "has no key; give key_hashes, keys_file or keys_env (`vllm-sched key` makes one)"
            yield Problem(path, why)
        for position, key_hash in enumerate(tenant.key_hashes):
            where = f"{path}.key_hashes[{position}]"
            if (other := hashes.setdefault(key_hash, where)) != where:
                yield Problem(where, f"is the same key as {other}; remove one of them")
        if tenant.models is not None and not tenant.models:
            yield Problem(f"{path}.models", "is empty; list models, or leave it out to allow all")


def has_keys(tenant: TenantConfig) -> bool:
    return bool(tenant.key_hashes or tenant.keys_file or tenant.keys_env)


def check_anonymous(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a router without tenants is not open to the network by accident."""
    router = draft.config.router
    if draft.config.tenants:
        if router.allow_anonymous:
            why = "true: with tenants every request needs a key; remove this or the tenants"
            yield Problem("router.allow_anonymous", why)
        return
    if not draft.has_valid((), "tenants"):
        return
    if (
        draft.has_valid(("router",), "host", "allow_anonymous")
        and not is_loopback(router.host)
        and not router.allow_anonymous
    ):
        yield Problem(
            "router.host",
            f"{router.host!r}: without tenants, any client that reaches this address can use the "
            "fleet; give tenants with keys, or router.allow_anonymous: true, or host: 127.0.0.1",
        )
    for name, is_set in (
        ("isolate_caches", router.isolate_caches),
        ("client_fields", bool(router.client_fields)),
    ):
        if is_set:
            yield Problem(f"router.{name}", "has no effect without tenants; leave it out")


def check_waiting(draft: PartialConfig) -> Iterator[Problem]:
    """Check that limits on waiting and on bodies do not contradict each other."""
    router = draft.config.router
    fairness, queue = router.fairness, router.queue
    queued = draft.config.tenants and draft.has_valid(("router", "queue"), "max_wait_s")
    if queued and fairness.standard_age_s >= queue.max_wait_s:
        yield Problem(
            "router.fairness.standard_age_s",
            f"{fairness.standard_age_s:g}: requests are refused after router.queue.max_wait_s, "
            f"{queue.max_wait_s:g}, before they reach this age; give less",
        )
    is_valid = draft.has_valid(("router", "fairness"), "batch_wait_s")
    if is_valid and fairness.batch_age_s >= fairness.batch_wait_s:
        yield Problem(
            "router.fairness.batch_age_s",
            f"{fairness.batch_age_s:g}: batch requests are refused after batch_wait_s, "
            f"{fairness.batch_wait_s:g}, before they reach this age; give less",
        )
    is_valid = draft.has_valid(("router",), "max_body_bytes")
    if is_valid and router.max_collected_bytes < router.max_body_bytes:
        yield Problem(
            "router.max_collected_bytes",
            f"{router.max_collected_bytes}: less than router.max_body_bytes, "
            f"{router.max_body_bytes}; give at least that",
        )


TENANT_CHECKS: tuple[Check, ...] = (check_tenants, check_anonymous, check_waiting)
