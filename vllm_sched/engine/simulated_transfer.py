"""A KV connector that moves nothing: prefill and decode workers in virtual time.

To the scheduler it is what NIXL's is. A request with `do_remote_prefill` asks for its whole prompt
from elsewhere, as far as it is not cached here, and waits with its blocks until the engine says
that they have come; one with `do_remote_decode` keeps its blocks when it is done, until the engine
says that they were fetched. When either has happened is the simulation's to say.
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
    """The scheduler's side; there is no other."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Begun since somebody looked: what is fetched, in tokens, by request.
        self.begun: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Say how much of a prompt is to come, and that it takes time."""
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
        """Begin to fetch, now that there is room; once, for what comes later is recomputed."""
        params = request.kv_transfer_params or {}
        if params.get(REMOTE_PREFILL):
            params[REMOTE_PREFILL] = False
            self.begun[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        """Tell the other side, which isn't there."""
        return KVConnectorMetadata()

    def request_finished(
        self,
        request: Request,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill that went well."""
        params = request.kv_transfer_params or {}
        well = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        return bool(params.get(REMOTE_DECODE)) and well, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for a cache of several groups."""
        return self.request_finished(request, block_ids[0])

    # The worker's side, which a connector must have.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not in virtual time."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not in virtual time."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Not in virtual time."""

    def wait_for_save(self) -> None:
        """Not in virtual time."""
