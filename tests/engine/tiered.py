"""Real schedulers with KV tiers, and a worker that transfers without copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import (
    INVALID_JOB_ID,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from tests.engine.schedulers import SIMULATED
from tests.policies.making import Bench

DOCUMENT = 600  # tokens, of which the tier keeps whole blocks
KEPT = DOCUMENT // 16 * 16
NUM_BLOCKS = 120
SIZE = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26}}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **SIZE}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", **SIZE}
HANDS_OVER = {
    "kv_connector": "SimulatedConnector",
    "kv_connector_module_path": SIMULATED,
    "kv_role": "kv_both",
}


def several(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*parts]},
    }


class Tiered(Bench):
    """A bench whose tier keeps documents that have left its GPU cache."""

    def __init__(
        self,
        connector: Mapping[str, Any],
        policies: Mapping[str, Any],
        **engine: Any,
    ) -> None:
        super().__init__(
            policies, connector=connector, prefix_caching=True, num_blocks=NUM_BLOCKS, **engine
        )
        self.scheduler.wall_clock = lambda: self.now
        self.loads = True  # loads end in the step after their start
        self._loading: list[str] = []
        self._jobs: list[int] = []
        self.documents = [[*range(10 * n, 10 * n + DOCUMENT)] for n in range(1, 5)]
        # The last prompt fills the GPU cache.
        for number, prompt in enumerate((*self.documents, NUM_BLOCKS * 16 - 32)):
            self.add(f"document {number}", prompt, output=1)
            self.drain()

    def turn(self, name: str, document: int | None, more: int, **options: Any) -> Any:
        """Add a request with a document, or with none, and `more` other tokens."""
        first = [] if document is None else self.documents[document]
        prompt = [*first, *[5 + len(name)] * more]
        return self.add(name, prompt, arrival=self.now, **options)

    def finish(self) -> None:
        """Process a step's result and its transfers."""
        output, result = self.in_flight[0]
        metadata = output.kv_connector_metadata
        has_parts = isinstance(metadata, MultiKVConnectorMetadata)
        parts = metadata.metadata if has_parts else (metadata,)
        replies = [self._transfer(part) for part in parts]
        self._loading, received = ([], self._loading) if self.loads else (self._loading, [])
        result.kv_connector_output = KVConnectorOutput(
            finished_recving=set(received),
            kv_connector_worker_meta=(
                MultiKVConnectorWorkerMetadata(tuple(replies)) if has_parts else replies[0]
            ),
        )
        super().finish()

    def _transfer(self, metadata: Any) -> Any:
        if isinstance(metadata, OffloadingConnectorMetadata):
            done = OffloadingWorkerMetadata()
            self._loading += [job.req_id for job in metadata.load_jobs.values()]
            self._jobs += metadata.load_jobs
            if self.loads:
                loaded, self._jobs = self._jobs, []
                for job in loaded:
                    done.mark_completed(job)
            for job in metadata.store_jobs:
                done.mark_completed(job)
            return done
        if isinstance(metadata, SimpleCPUOffloadMetadata):
            for names in metadata.load_event_to_reqs.values():
                self._loading += names
            stored = metadata.store_event
            return SimpleCPUOffloadWorkerMetadata({} if stored == INVALID_JOB_ID else {stored: 1})
        return None

    def lane(self, request: Any) -> str:
        """Return the lane of a waiting request by the first policy."""
        return str(self.scheduler._planner.admission.lane_key_of(request)[0])

    def loading(self) -> list[str]:
        return [request.request_id for request in self.scheduler.kv_holding_waiting]
