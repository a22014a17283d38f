"""A KV connector that moves nothing, for prefill and decode workers in virtual time.

As with NIXL, requests hold blocks until the simulation reports their KV as received or sent.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import Request, RequestStatus

REMOTE_PREFILL, REMOTE_DECODE = "do_remote_prefill", "do_remote_decode"


class SimulatedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Tokens to fetch, by request, since the caller's last read.
        self.new_fetches: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get(REMOTE_PREFILL):
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self,
        request: Request,
        blocks: Any,  # noqa: ARG002
        num_external_tokens: int,
    ) -> None:
        """Start the request's only fetch; after a preemption the prompt is recomputed."""
        params = request.kv_transfer_params or {}
        if params.get(REMOTE_PREFILL):
            params[REMOTE_PREFILL] = False
            self.new_fetches[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    def request_finished(
        self,
        request: Request,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to keep the blocks: those of a completed prefill."""
        params = request.kv_transfer_params or {}
        completed = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        return bool(params.get(REMOTE_DECODE)) and completed, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # Abstract methods of the worker's side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
