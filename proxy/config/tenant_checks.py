"""What can be wrong with tenants, and with a router that asks nobody for a key."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.config.admin import is_loopback
from proxy.config.partial import Check, PartialConfig
from proxy.config.tenants import TenantConfig
from proxy.errors import Problem


def tenants(draft: PartialConfig) -> Iterator[Problem]:
    """Check that tenants can be told apart, and that each has keys."""
    names: dict[str, int] = {}
    hashes: dict[str, str] = {}
    for index, tenant in draft.tenants.items():
        path, block = f"tenants[{index}]", ("tenants", index)
        if draft.sure(block, "name") and (other := names.setdefault(tenant.name, index)) != index:
            why = f"{tenant.name!r}: tenants[{other}] is called that too; rename one of them"
            yield Problem(f"{path}.name", why)
        if not has_keys(tenant) and draft.sure(block, "key_hashes", "keys_file", "keys_env"):
            why = "has no key; give key_hashes, keys_file or keys_env (`vllm-sched key` makes one)"
            yield Problem(path, why)
        for place, each in enumerate(tenant.key_hashes):
            where = f"{path}.key_hashes[{place}]"
            if (other_place := hashes.setdefault(each, where)) != where:
                yield Problem(where, f"is {other_place} too; a key has one owner, drop one of them")
        if tenant.models is not None and not tenant.models:
            yield Problem(f"{path}.models", "is empty; name some, or leave it out for all")


def has_keys(tenant: TenantConfig) -> bool:
    """Whether it is said where its keys are."""
    return bool(tenant.key_hashes or tenant.keys_file or tenant.keys_env)


def strangers(draft: PartialConfig) -> Iterator[Problem]:
    """Check that nobody can use a fleet by accident who only reaches its router."""
    router = draft.router
    if router is None:
        return
    if draft.has_tenants:
        if router.allow_anonymous:
            why = "true: there are tenants, so everybody is asked for a key; drop one of the two"
            yield Problem("router.allow_anonymous", why)
        return
    if not draft.sure((), "tenants"):
        return
    if (
        draft.sure(("router",), "host", "allow_anonymous")
        and not is_loopback(router.host)
        and not router.allow_anonymous
    ):
        yield Problem(
            "router.host",
            f"{router.host!r}: whoever reaches it could use the fleet, for there are no tenants; "
            "give tenants with keys, or router.allow_anonymous: true, or host: 127.0.0.1",
        )
    for name, said in (
        ("isolate_caches", router.isolate_caches),
        ("client_fields", bool(router.client_fields)),
    ):
        if said:
            yield Problem(f"router.{name}", "there are no tenants to keep apart; leave it out")


def waits(draft: PartialConfig) -> Iterator[Problem]:
    """Check that a class comes of age before its requests are refused."""
    router = draft.router
    if router is None:
        return
    fairness, queue = router.fairness, router.queue
    comes = draft.has_tenants and draft.sure(("router", "queue"), "max_wait_s")
    if comes and fairness.standard_age_s >= queue.max_wait_s:
        yield Problem(
            "router.fairness.standard_age_s",
            f"{fairness.standard_age_s:g}: router.queue.max_wait_s, {queue.max_wait_s:g}, comes "
            "first, so it never would; give less",
        )
    sure = draft.sure(("router", "fairness"), "batch_wait_s")
    if sure and fairness.batch_age_s >= fairness.batch_wait_s:
        yield Problem(
            "router.fairness.batch_age_s",
            f"{fairness.batch_age_s:g}: batch_wait_s, {fairness.batch_wait_s:g}, comes first, so "
            "it never would; give less",
        )
    sure = draft.sure(("router",), "max_body_bytes")
    if sure and router.max_collected_bytes < router.max_body_bytes:
        yield Problem(
            "router.max_collected_bytes",
            f"{router.max_collected_bytes}: one body may have router.max_body_bytes, "
            f"{router.max_body_bytes}; give at least that",
        )


TENANT_CHECKS: tuple[Check, ...] = (tenants, strangers, waits)
