"""Without chunked prefill, policies hold prompts but do not cut them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.schedulers import answer, make_request, make_scheduler
from vllm_sched import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry

# vLLM requires a budget for the longest prompt.
CONTEXT, BUDGET, LONG = 400, 512, 100
SETTINGS: dict[str, dict[str, Any]] = {
    "long_prompt": {"long_prefill_token_threshold": LONG},
    "deferred_prefill": {"departures": 3},
}
CUTS = "chunk_budget"
# Steps while one request decodes; a static batch must end first.
MOST_STEPS = {("static_batching",): 800}
TOGETHER = ("lanes", "long_prompt", "deferred_prefill", "rotation")


@pytest.mark.parametrize("kind", [SyncPolicyScheduler, PolicyScheduler])
@pytest.mark.parametrize("names", [*((name,) for name in registry.POLICIES), TOGETHER])
def test_all_requests_are_served_and_no_prompt_is_cut(names: tuple[str, ...], kind: type) -> None:
    if CUTS in names:
        with pytest.raises(UsageError, match=r"chunk_budget .* reads them whole"):
            make(names, kind)
        return
    scheduler = make(names, kind)
    # A request decodes all the time, because policies hold prompts beside decodes.
    scheduler.add_request(make_request(8, output=390, name="decodes", hashed=False))
    rng = random.Random(6)
    coming, steps, served = 40, 0, set()
    while coming or len(scheduler.requests) > 1:
        if coming and steps % 2 == 0:
            coming -= 1
            tokens = rng.choice([5, 20, 60, 150, 300])
            scheduler.add_request(make_request(tokens, output=rng.randint(1, 5), hashed=False))
        output = scheduler.schedule()
        for name, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            assert tokens == 1 or tokens == request.num_prompt_tokens
            served.add(name)
        scheduler.update_from_output(output, answer(scheduler, output))
        steps += 1
        assert steps < MOST_STEPS.get(names, 380), "a request waits until the decode ends"
    assert len(served) == 41


def make(names: tuple[str, ...], kind: type) -> Any:
    """Return a scheduler without chunked prefill."""
    return make_scheduler(
        {name: SETTINGS.get(name, {}) for name in names},
        scheduler_cls=kind,
        budget=BUDGET,
        max_model_len=CONTEXT,
        max_num_seqs=16,
        chunked_prefill=False,
    )
