"""Turns of sessions whose KV caches were offloaded, served by the real engine.

The connector is vLLM's OffloadingConnector. Only its copies differ: from memory to memory.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed import kv_transfer
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.engine.one_engine import add, exchange_scheduler, prompt_of
from tests.engine.served import StepClock

SESSIONS, PROMPT, NEXT = 3, 1500, 40  # tokens
FRESH = "fresh"
TIERS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": "tests.engine.offloaded",
        "cpu_bytes_to_use": 1 << 27,
    },
}
SETS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "long_prompt": {"long_prompt": {"long_prefill_token_threshold": 81}},
    "every": {"lanes": {}, "long_prompt": {}, "rotation": {}, "chunk_budget": {"itl_ms": 5.0}},
}


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once."""

    def __init__(self, blocks: list[torch.Tensor], chunks: int) -> None:
        self._blocks = blocks
        self._tier = [each.new_empty((chunks, *each.shape[1:])) for each in blocks]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, tier in zip(self._blocks, self._tier, strict=True):
            tier[dst_spec.block_ids] = blocks[src_spec.block_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, tier in zip(self._blocks, self._tier, strict=True):
            blocks[dst_spec.block_ids] = tier[src_spec.block_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once."""


class CopyingSpec(CPUOffloadingSpec):
    """Offloads without an accelerator."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker([each.tensor for each in kv_caches.tensors], self.num_chunks)


def serve_offloaded(engine: LLMEngine) -> dict[str, Any]:
    """Serve the sessions without offloading, and with it under each set of policies."""
    alone = {"not offloaded": play_turns(engine, None)}
    core = engine.engine_core.engine_core
    config = engine.vllm_config
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context
    kv_cache_config = core.scheduler.kv_cache_config
    config.kv_transfer_config = KVTransferConfig(**TIERS)
    init_none_hash(sha256)
    core.request_block_hasher = get_request_block_hasher(core.scheduler.block_size, sha256)
    kv_transfer.ensure_kv_transfer_initialized(config, kv_cache_config)
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    kv_transfer.get_kv_transfer_group().register_kv_caches(
        {name: layers[name].kv_cache for name in names}
    )
    try:
        return alone | {name: play_turns(engine, policies) for name, policies in SETS.items()}
    finally:
        kv_transfer.ensure_kv_transfer_shutdown()
        config.kv_transfer_config = core.request_block_hasher = None


def play_turns(engine: LLMEngine, policies: dict[str, Any] | None) -> dict[str, Any]:
    """Serve two turns of each session, with a fresh prompt between.

    Returns the outputs in the order of their ends, and each request's tokens from a cache.
    """
    clock = StepClock()
    exchange_scheduler(engine, policies, clock)
    rng = random.Random(2)
    outputs: dict[str, list[int]] = {}
    cached: dict[str, int] = {}

    def run() -> None:
        while engine.has_unfinished_requests():
            for done in engine.step():
                if done.finished:
                    outputs[done.request_id] = list(done.outputs[0].token_ids)
                    cached[done.request_id] = done.num_cached_tokens or 0

    sessions = [prompt_of(PROMPT, rng) for _ in range(SESSIONS)]
    for number, prompt in enumerate(sessions):
        add(engine, f"first {number}", prompt, 4, None, clock.now)
        run()
    add(engine, FRESH, prompt_of(PROMPT, rng), 4, None, clock.now)
    engine.step()
    for number, prompt in enumerate(sessions):
        add(engine, f"turn {number}", [*prompt, *prompt_of(NEXT, rng)], 4, None, clock.now)
    run()
    return {"outputs": outputs, "cached": cached}
