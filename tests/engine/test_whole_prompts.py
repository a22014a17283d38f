"""Without chunked prefill, policies hold prompts but do not cut them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.policies.making import Bench
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry

# vLLM requires a budget for the longest prompt.
OPTIONS = {"budget": 512, "max_model_len": 400, "chunked_prefill": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "long_prompt": {"long_prefill_token_threshold": 100},
    "deferred_prefill": {"departures": 3},
}
CUTS = "chunk_budget"
# Steps while one request decodes; a static batch must end first.
MOST_STEPS = {("static_batching",): 800}
TOGETHER = ("lanes", "long_prompt", "deferred_prefill", "rotation")
SERVED = [*((name,) for name in registry.POLICIES if name != CUTS), TOGETHER]


def test_policy_that_cuts_prompts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"chunk_budget .* reads them whole"):
        Bench({CUTS: {}}, **OPTIONS)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("names", SERVED, ids="+".join)
def test_all_requests_are_served_and_no_prompt_is_cut(names: tuple[str, ...], ahead: bool) -> None:
    bench = Bench({name: SETTINGS.get(name, {}) for name in names}, ahead=ahead, **OPTIONS)
    # A request decodes all the time, because policies hold prompts beside decodes.
    bench.add("decodes", 8, output=390, hashed=False)
    rng = random.Random(6)
    prompts, steps, served = {"decodes": 8}, 0, set()
    while len(prompts) < 41 or len(bench.scheduler.requests) > 1:
        if len(prompts) < 41 and steps % 2 == 0:
            name = str(len(prompts))
            prompts[name] = rng.choice([5, 20, 60, 150, 300])
            bench.add(name, prompts[name], output=rng.randint(1, 5), hashed=False)
        tokens = bench.step()
        assert all(count in (1, prompts[name]) for name, count in tokens.items())
        served |= tokens.keys()
        steps += 1
        assert steps < MOST_STEPS.get(names, 380), "a request waits until the decode ends"
    assert served == prompts.keys()
