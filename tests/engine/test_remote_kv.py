"""The state machine with KV from and for other workers, as where prefill and decode are split.

Transfers end after any number of steps, also after an abort. Loads fail as NIXL reports it, by
blocks, or by requests.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import BLOCK, SIMULATED, make_request
from tests.engine.test_state_machine import BUDGET, SHARED, Machine, policy_sets, run
from tests.policies.making import Bench
from tests.upstream.source import installed_release
from vllm_sched import PolicyScheduler

HANDS_OVER = {"kv_connector": "SimulatedConnector", "kv_connector_module_path": SIMULATED}
MAX_BLOCKS = 60  # of the longest prompt
GOOD, BLOCKS, REQUEST = "good", "blocks", "request"  # how a load ends
# States in which a request that has its KV begins. vLLM 0.31 keeps it waiting with new requests.
STARTS_DECODE_LEGS = {PauseState.UNPAUSED}
if installed_release() >= (0, 32):
    STARTS_DECODE_LEGS.add(PauseState.PAUSED_NEW)


class RemoteKv(Machine):
    """Any policies, with requests whose KV comes from prefill workers or goes to decode workers."""

    @initialize(
        policies=policy_sets(),
        blocks=st.sampled_from([140, 300, 2000]),
        slots=st.sampled_from([3, 16]),
        priority=st.booleans(),
        on_failure=st.sampled_from(["recompute", "fail"]),
    )
    def start(  # type: ignore[override]
        self,
        policies: dict[str, dict[str, Any]],
        blocks: int,
        slots: int,
        priority: bool,
        on_failure: str,
    ) -> None:
        self.connector = {**HANDS_OVER, "kv_load_failure_policy": on_failure}
        self.receiving: dict[str, int] = {}  # the first block that is loaded
        self.sending: dict[str, Any] = {}  # requests that finished and keep their blocks
        self.left_steps = 0  # consecutive, with a decode leg that could begin
        self.ends: dict[str, str] = {}  # how loads end with the next result
        super().start(policies, blocks, slots, priority)
        self.may_pause = self.pauses_decodes
        # vLLM's own order has prefills of failed loads before decodes.
        self.sorts_running = any(policy.sorts_running for policy in self.scheduler._policies)

    @rule(
        tokens=st.one_of(st.integers(1, 90), st.sampled_from([81, 200, 700])),
        output=st.integers(1, 12),
        shared=st.booleans(),
        priority=st.integers(-1, 2),
        sends=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=3),
    )
    def add_remote(
        self, tokens: int, output: int, shared: bool, priority: int, sends: list[bool]
    ) -> None:
        """Add requests for their decode legs, or for their prefill legs."""
        for is_prefill in sends:
            prompt = [*SHARED, *[7] * tokens] if shared else tokens
            request = make_request(prompt, output=1 if is_prefill else output, priority=priority)
            leg = "do_remote_decode" if is_prefill else "do_remote_prefill"
            request.kv_transfer_params = {leg: True}
            self.submit(request)

    @precondition(lambda self: getattr(self, "receiving", None))
    @rule(data=st.data(), ends=st.lists(st.sampled_from([GOOD, BLOCKS, REQUEST]), min_size=1))
    def receive(self, data: st.DataObject, ends: list[str]) -> None:
        """Let loads end with the next result."""
        for end in ends:
            self.ends[data.draw(st.sampled_from([*self.receiving]))] = end

    @precondition(lambda self: getattr(self, "sending", None))
    @rule()
    def send(self) -> None:
        self.ends |= dict.fromkeys(self.sending, GOOD)

    @rule()
    def preempt_all(self) -> None:
        """Reset the prefix cache, which vLLM cannot do during transfers."""
        while self.in_flight:
            self._finish_one()
        if not (self.receiving or self.sending or self.scheduler.kv_holding_waiting):
            super().preempt_all()

    def _schedule(self) -> None:
        # With a connector, vLLM waits for blocks that steps in flight still use.
        free_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.serves_decodes = self.sorts_running and free_blocks > len(self.scheduler.running)
        self.pauses_decodes = self.may_pause or not self.serves_decodes
        # A leg with a failed load holds no KV: policies may hold it like any prefill.
        failed = self.scheduler.failed_recving_kv_req_ids
        received = self.scheduler.finished_recving_kv_req_ids - failed - self.turned_away
        ready = [r for r in self.scheduler.kv_holding_waiting if r.request_id in received]
        super()._schedule()
        self._check_ready(ready)
        fetches, requests = self.scheduler.connector.new_fetches, self.scheduler.requests
        for name, tokens in fetches.items():
            self.receiving[name] = (requests[name].num_computed_tokens - tokens) // BLOCK
        fetches.clear()

    def _check_ready(self, ready: list[Any]) -> None:
        """Check that a decode leg begins, if KV has come and there are slots and room."""
        scheduler, output = self.scheduler, self.in_flight[-1][0]
        none_began = all(r in scheduler.kv_holding_waiting for r in ready)
        free = (
            scheduler.pause_state in STARTS_DECODE_LEGS
            and len(scheduler.running) < scheduler.max_num_active_reqs
            and not output.preempted_req_ids
            and output.total_num_scheduled_tokens < BUDGET
            and scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > MAX_BLOCKS
        )
        self.left_steps = self.left_steps + 1 if ready and none_began and free else 0
        assert self.left_steps < 2, "a decode leg waits with its KV"

    def _finish_one(self) -> None:
        self.in_flight[0][1].kv_connector_output = self._transfers()
        super()._finish_one()
        for name, request in self.scheduler.requests.items():
            if request.is_finished() and name not in self.receiving:
                self.sending[name] = request

    def _transfers(self) -> KVConnectorOutput:
        ends, self.ends = self.ends, {}
        result = KVConnectorOutput(finished_recving=set(), finished_sending=set())
        for name, end in ends.items():
            if self.sending.pop(name, None) is not None:
                result.finished_sending.add(name)
                continue
            request, first = self.scheduler.requests[name], self.receiving.pop(name)
            result.finished_recving.add(name)
            if end is REQUEST:
                result.failed_recving.add(name)
            elif end is BLOCKS and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
                result.invalid_block_ids |= {*blocks[(first + len(blocks)) // 2 :]}
        return result

    def _check_pauses(self, decodes: list[Any], output: Any, begun: float) -> None:
        if self.serves_decodes:
            super()._check_pauses(decodes, output, begun)
        else:
            self.left_out_since.clear()

    def _check_progress(self, tokens: Any) -> None:
        """Skip steps in which transfers hold the blocks."""
        if not (self.receiving or self.sending):
            super()._check_progress(tokens)

    def _has_work(self) -> bool:
        return bool(self.alive or self.receiving or self.sending)

    def teardown(self) -> None:
        """Let all transfers end, first with failures."""
        if hasattr(self, "scheduler"):
            self.ends |= dict.fromkeys(self.receiving, BLOCKS)
            schedule = self._schedule

            def schedule_and_transfer() -> None:
                schedule()
                self.ends = dict.fromkeys([*self.receiving, *self.sending], GOOD) | self.ends

            self._schedule = schedule_and_transfer  # type: ignore[method-assign]
        super().teardown()


@pytest.mark.parametrize("min_chunk", [1, 32])
@pytest.mark.parametrize("legs", [1, 3])
def test_decode_legs_begin_beside_a_prefill_in_small_chunks(min_chunk: int, legs: int) -> None:
    """The target is missed by decodes alone, so a step has the least chunk."""
    policies = {"chunk_budget": {"itl_ms": 1.0, "min_chunk": min_chunk}}
    bench = Bench(policies, ahead=False, connector=HANDS_OVER, num_blocks=2000)
    bench.decode("decodes", output=500)
    for _ in range(30):
        bench.step(0.02)
    names = [f"leg{number}" for number in range(legs)]
    for name in names:
        bench.add(name, 50, output=100).kv_transfer_params = {"do_remote_prefill": True}
    bench.add("long", 900)
    bench.step(0.02)
    bench.receive(*names)
    *_, last = (bench.step(0.02) for _ in range(2 * legs + 1))
    assert {*names, "long"} <= last.keys()


class AsyncRemoteKv(RemoteKv):
    """The same with two steps in flight."""

    kind = PolicyScheduler
    depth = 2


@pytest.mark.parametrize("machine", [RemoteKv, AsyncRemoteKv])
def test_invariants_hold_with_transfers(machine: type[RuleBasedStateMachine]) -> None:
    run(machine)
