"""The workers and tenants of stored responses, within bounds."""

from __future__ import annotations

import json

from proxy.core.model.types import RequestInfo
from proxy.core.request.response_owners import MAX_RESPONSES, ResponseOwners
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.proxy.core.making import refused, route, router_of, spec

A, B, C = (Tenant(TenantSpec(name)) for name in "abc")


def remember_many(
    stored: ResponseOwners, count: int, tenant: Tenant | None, name: str = "resp"
) -> None:
    for number in range(count):
        stored.remember(f"{name}_{number}", "w", tenant)


def test_new_tenants_get_room_in_a_full_store() -> None:
    stored = ResponseOwners()
    tenants = [Tenant(TenantSpec(str(number))) for number in range(8)]
    remember_many(stored, MAX_RESPONSES - 1, A)
    for tenant in tenants:
        remember_many(stored, 3, tenant)
    assert len(stored) == MAX_RESPONSES
    assert all(stored.find_worker("resp_2", tenant) for tenant in tenants)


def test_many_responses_of_one_tenant_evict_no_other_tenants() -> None:
    router = router_of(spec("w"))
    body = json.dumps({"input": "go on", "previous_response_id": "resp_mine"}).encode()
    router.remember("resp_mine", "w", A)
    for number in range(MAX_RESPONSES):
        router.remember(f"resp_{number}", "w", B)
    path = route("/v1/responses")
    info = router.read(path, body, b"application/json", "id", A)
    assert isinstance(info, RequestInfo)
    assert info.pinned == "w"
    assert refused(router.read(path, body, b"application/json", "id", B)).status == 404
    assert len(list(router.stored_responses())) == MAX_RESPONSES
