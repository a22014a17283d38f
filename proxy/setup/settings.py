"""Convert the fleet file's blocks to settings of the core and the data path.

The core imports no pydantic, so each block becomes one frozen object here.
"""

from __future__ import annotations

from math import inf

from proxy.config import FleetConfig, TenantConfig, WorkerConfig
from proxy.config.admin import is_loopback
from proxy.config.tenants import AdmissionConfig
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.router import RouterSettings
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import RANKS, Rank, TenantSpec
from proxy.transfer.registry import connector
from proxy.wire.settings import WireSettings


def specs(config: FleetConfig) -> list[WorkerSpec]:
    return [worker_spec(worker, config) for worker in config.workers]


def worker_spec(worker: WorkerConfig, config: FleetConfig) -> WorkerSpec:
    return WorkerSpec(
        name=worker.name,
        url=worker.url or "",
        role=Role(worker.role),
        model=config.model_of(worker),
        max_model_len=worker.stated_max_model_len,
        max_requests=worker.max_requests,
        api_key=worker.api_key,
        tls=config.tls_of(worker),
        slots=worker.slots,
        journal=worker.journal,
    )


def tenant_spec(tenant: TenantConfig, config: FleetConfig) -> TenantSpec:
    return TenantSpec(
        name=tenant.name,
        rank=RANKS[tenant.class_],
        weight=tenant.weight,
        limits=Limits(**tenant.limits.model_dump()),
        models=None if tenant.models is None else frozenset(tenant.models),
        salted=config.router.isolate_caches or tenant.cache_salt,
        explain=tenant.explain,
        ttft_s=tenant.ttft_s,
        tpot_s=tenant.tpot_s,
    )


def router_settings(config: FleetConfig) -> RouterSettings:
    routing, router = config.routing, config.router
    above = routing.disaggregate_above
    return RouterSettings(
        **routing.model_dump(exclude={"disaggregate_above"}),
        max_attempts=router.retries.attempts,
        retry_budget=router.retries.budget,
        queue_requests=router.queue.max_requests,
        queue_bytes=router.queue.max_bytes,
        queue_wait_s=router.queue.max_wait_s,
        queue_tokens=router.queue.max_tokens,
        fairness=FairnessSettings(**router.fairness.model_dump()),
        admission=admission_settings(router.admission),
        transfer=config.transfer is not None,
        disaggregate_above=None if above == "auto" else above,
        allow_client_kv_transfer=router.allow_client_kv_transfer,
        client_priority="priority" in router.client_fields,
        client_arguments="vllm_xargs" in router.client_fields,
        pass_priority=router.pass_priority,
        transfer_within_s=connector(config.transfer).read_within_s if config.transfer else inf,
    )


def admission_settings(admission: AdmissionConfig) -> AdmissionSettings | None:
    ttft_s, tpot_s = (
        {
            rank: target_s
            for rank in Rank
            if (
                target_s := getattr(admission, f"{rank.name.lower()}_{name}")
                or getattr(admission, name)
            )
            is not None
        }
        for name in ("ttft_s", "tpot_s")
    )
    return AdmissionSettings(ttft_s, tpot_s) if ttft_s or tpot_s else None


def wire_settings(config: FleetConfig) -> WireSettings:
    router = config.router
    return WireSettings(
        refuses_pages=is_loopback(router.host) and not router.allow_anonymous,
        max_body_bytes=router.max_body_bytes,
        max_header_bytes=router.max_header_bytes,
        max_collected_bytes=router.max_collected_bytes,
        drain_notice_s=router.drain_notice_s,
        continuation=bool(router.continuation),
        continues_by_text=router.continuation == "text",
        pass_targets=router.pass_targets,
        client_deadlines=router.client_deadlines,
        **router.timeouts.model_dump(),
    )
