"""The workers and tenants of stored responses, within bounds."""

from __future__ import annotations

from proxy.core.request.response_owners import MAX_RESPONSES, ResponseOwners
from tests.proxy.core.making import read, refused, router_of, sized, spec, tenant

A, B = tenant("a"), tenant("b")


def test_new_tenants_get_room_in_a_full_store() -> None:
    stored = ResponseOwners()
    tenants = [tenant(str(number)) for number in range(8)]
    for count, owner in ((MAX_RESPONSES - 1, A), *((3, owner) for owner in tenants)):
        for number in range(count):
            stored.remember(f"resp_{number}", "w", owner)
    assert len(stored) == MAX_RESPONSES
    assert all(stored.find_worker("resp_2", owner) for owner in tenants)


def test_many_responses_of_one_tenant_evict_no_other_tenants() -> None:
    router = router_of(spec("w"))
    body = {"input": "go on", "previous_response_id": "resp_mine"}
    router.remember("resp_mine", "w", A)
    for number in range(MAX_RESPONSES):
        router.remember(f"resp_{number}", "w", B)
    assert sized(router, body, "/v1/responses", A).pinned == "w"
    assert refused(read(router, body, "/v1/responses", B)).status == 404
    assert len(list(router.stored_responses())) == MAX_RESPONSES
