"""Which worker stores whose response: bounded in all, and nobody's part is another's."""

from __future__ import annotations

import json

from proxy.core.model.types import RequestInfo
from proxy.core.request.response_owners import MAX_RESPONSES, ResponseOwners
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.proxy.core.making import refused, route, router_of, spec

A, B, C = (Tenant(TenantSpec(name)) for name in "abc")


def many(stored: ResponseOwners, count: int, whose: Tenant | None, name: str = "resp") -> None:
    for number in range(count):
        stored.remember(f"{name}_{number}", "w", whose)


def test_more_tenants_than_there_is_room() -> None:
    stored = ResponseOwners()
    tenants = [Tenant(TenantSpec(str(number))) for number in range(8)]
    many(stored, MAX_RESPONSES - 1, A)
    for tenant in tenants:
        many(stored, 3, tenant)
    assert len(stored) == MAX_RESPONSES
    assert all(stored.holder("resp_2", tenant) for tenant in tenants)


def test_a_crowd_of_others_responses_changes_nothing_for_a_tenant() -> None:
    router = router_of(spec("w"))
    body = json.dumps({"input": "go on", "previous_response_id": "resp_mine"}).encode()
    router.remember("resp_mine", "w", A)
    for number in range(MAX_RESPONSES):
        router.remember(f"resp_{number}", "w", B)
    path = route("/v1/responses")
    mine = router.read(path, body, b"application/json", "id", A)
    assert isinstance(mine, RequestInfo)
    assert mine.pinned == "w"
    assert refused(router.read(path, body, b"application/json", "id", B)).status == 404
    assert len(list(router.remembered())) == MAX_RESPONSES
