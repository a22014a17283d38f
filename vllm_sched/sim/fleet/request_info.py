"""Simulated requests as the router's core sees them, without request bodies."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from proxy.core.model.types import RequestInfo
from proxy.core.request.parser import PRIORITIES
from proxy.core.request.session_key import session_key
from proxy.core.router import Router
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.engines.prompt_hashes import BYTES_PER_TOKEN, prefix_hashes

ROUTE: Final = "completions"


def salt_prefixes(router: Router, request: Request) -> Request:
    """Return the request with prefixes of its tenant's own, if the tenant's cache is salted."""
    tenant = router.tenants.get(request.tenant)
    if tenant is None or not tenant.spec.salted or not request.shared:
        return request
    shared = tuple((f"{tenant.name}/{name}", tokens) for name, tokens in request.shared)
    return replace(request, shared=shared)


def priority_of(router: Router, info: RequestInfo) -> int:
    return int(PRIORITIES.get(info.rank, b"0")) if router.settings.pass_priority else 0


def request_info_of(
    router: Router, model: str, request: Request, number: int, *, hashed: bool
) -> RequestInfo:
    """Return the request info with an exact prompt size, as if a worker had counted the tokens.

    The router estimates the output length, up to the client's limit. The tenant is set if the fleet
    has it.
    """
    prompt, output = request.prompt_tokens, request.output_tokens
    tenant = router.tenants.get(request.tenant)
    usual = router.sizer.learned(model, ROUTE, tenant).output
    size = prompt * BYTES_PER_TOKEN
    info = RequestInfo(
        f"sim-{number}", ROUTE, model, body_bytes=size, prompt_tokens=prompt, prompt_error=0,
        largest_prompt=prompt, output_tokens=output, expected_output=int(min(usual, output)),
    )  # fmt: skip
    info.stream = info.counted = True
    info.long = info.expected_tokens > router.settings.short_limit
    if router.settings.transfer and output <= 1:
        info.why_whole = "one_token"
    if tenant is not None:
        info.tenant, info.rank = tenant, tenant.spec.rank
    if hashed:
        info.prefix = prefix_hashes(number, request.shared, prompt)
        info.prefix_bytes = size
        info.session = session_key(request.tenant, model, request.session.encode())
    return info
