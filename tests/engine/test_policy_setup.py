"""Unsupported settings are refused in one line, before the model loads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.sample.sampler import Sampler

from tests.engine.schedulers import base_config, make_scheduler
from vllm_sched import LongPromptScheduler, PolicyScheduler, SyncPolicyScheduler
from vllm_sched.engine import behaviour_checks, plugin, policy_setup
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.kv_cache import KvGroup
from vllm_sched.workers.tiny_model import tiny_model


def config(policies: dict[str, Any] | None = None, **scheduler_options: Any) -> VllmConfig:
    made = copy.copy(base_config())
    made.model_config = copy.copy(made.model_config)
    made.parallel_config = copy.copy(made.parallel_config)
    made.scheduler_config = copy.copy(made.scheduler_config)
    made.scheduler_config.async_scheduling = False
    made.additional_config = {"vllm_sched": {"long_prompt": {}} if policies is None else policies}
    for name, value in scheduler_options.items():
        setattr(made.scheduler_config, name, value)
    return made


def with_drafts(made: VllmConfig) -> None:
    made.speculative_config = SimpleNamespace(num_speculative_tokens=3)


def with_stages(made: VllmConfig) -> None:
    made.parallel_config.pipeline_parallel_size = 2


@pytest.mark.parametrize(
    ("change", "named"),
    [(with_drafts, "speculative decoding"), (with_stages, "pipeline parallelism")],
)
def test_disabled_async_scheduling_error_names_the_sync_class(
    change: Callable[[VllmConfig], None], named: str
) -> None:
    made = config()
    change(made)
    message = rf"kind of {named} turned .* --scheduler-cls vllm_sched\.SyncPolicyScheduler$"
    with pytest.raises(UsageError, match=message):
        policy_setup.check_configuration(made, PolicyScheduler)
    policy_setup.check_configuration(made, SyncPolicyScheduler)
    policy_setup.check_configuration(made)  # vLLM's own scheduler
    made.scheduler_config.async_scheduling = True  # supported by vLLM's asynchronous scheduler
    policy_setup.check_configuration(made, PolicyScheduler)


def test_diffusion_model_is_refused() -> None:
    made = config()
    made.model_config = SimpleNamespace(is_diffusion=True, max_model_len=2048)
    for kind in (PolicyScheduler, SyncPolicyScheduler):
        with pytest.raises(UsageError, match=r"start without --scheduler-cls$"):
            policy_setup.check_configuration(made, kind)


@pytest.mark.parametrize("name", registry.POLICIES)
def test_policies_that_conflict_with_the_prefill_interval_are_refused(name: str) -> None:
    policy_setup.check_configuration(config({name: {}}), SyncPolicyScheduler)
    made = config({name: {}}, prefill_schedule_interval=4)
    message = rf"^policy {name} contradicts --prefill-schedule-interval 4: .*; leave one of them"
    refused = name in ("prefill_first", "deferred_prefill")
    with pytest.raises(UsageError, match=message) if refused else nullcontext():
        policy_setup.check_configuration(made, SyncPolicyScheduler)


@pytest.mark.parametrize("kind", [None, SyncPolicyScheduler])
@pytest.mark.parametrize("policies", [{}, {"lanes": {}}])
def test_settings_that_no_scheduler_reads_are_named_in_a_warning(
    kind: type[Scheduler] | None, policies: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="vllm.vllm_sched"):
        policy_setup.check_configuration(config(policies), kind)
    warned = "has no effect with vLLM's own scheduler; add --scheduler-cls" in caplog.text
    assert warned is (kind is None and bool(policies))


def test_contradiction_to_the_scheduler_class_names_another_class() -> None:
    made = config({"prefill_first": {}})
    policy_setup.check_configuration(made, PolicyScheduler)
    with pytest.raises(UsageError, match=r"prefill_first contradicts long_prompt, .* class adds: "):
        policy_setup.check_configuration(made, LongPromptScheduler)
    made = config({"prefill_first": {}, "long_prompt": {}})
    with pytest.raises(UsageError, match=r"leave one of them out"):
        policy_setup.check_configuration(made, LongPromptScheduler)


def test_nothing_is_refused_without_policies() -> None:
    made = config({}, prefill_schedule_interval=4)
    with_stages(made)
    policy_setup.check_configuration(made, PolicyScheduler)
    # A class may have policies of its own.
    with pytest.raises(UsageError, match=r"LongPromptScheduler can't follow"):
        policy_setup.check_configuration(made, LongPromptScheduler)


@pytest.mark.parametrize("kind", [PolicyScheduler, SyncPolicyScheduler])
def test_kv_cache_is_not_inspected_without_policies(
    kind: type[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_scheduler: Scheduler) -> None:
        raise TypeError("a kind of group that policies do not know")

    monkeypatch.setattr(policy_setup, "kv_cache_of", unknown)
    make_scheduler({}, scheduler_cls=kind)
    with pytest.raises(TypeError, match="a kind of group"):
        make_scheduler({"long_prompt": {}}, scheduler_cls=kind)


def test_scheduler_checks_its_configuration() -> None:
    with pytest.raises(UsageError, match="contradicts --prefill-schedule-interval"):
        make_scheduler({"prefill_first": {}}, prefill_schedule_interval=2)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Restores these methods after the test.
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    monkeypatch.setattr(Executor, "compile_or_warm_up_model", Executor.compile_or_warm_up_model)
    plugin.load()
    plugin.load()


def configure(policy: str = "long_prompt", **more: Any) -> None:
    """Create the configuration of `vllm serve` with these arguments."""
    options = {"max_model_len": 1024, **more}
    settings = {policy: options.pop("settings", {})}
    EngineArgs(
        model=str(tiny_model()), dtype="float32", additional_config={"vllm_sched": settings},
        **options,
    ).create_engine_config()  # fmt: skip


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# The context comes from overrides, not from the model's files.
ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
CONTEXT = {
    "max_model_len": None,
    "hf_overrides": {"max_position_embeddings": 1024, "rope_parameters": ROPE},
}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("always", "refused", "accepted", "error"),
    [
        (
            {"speculative_config": NGRAM},
            {"scheduler_cls": "vllm_sched.PolicyScheduler"},
            [{"scheduler_cls": "vllm_sched.SyncPolicyScheduler"}, {}],
            "turned asynchronous scheduling off",
        ),
        (
            CONTEXT,
            {"settings": {"long_prefill_token_threshold": 2049}},
            [{"settings": {"long_prefill_token_threshold": 2048}}],
            "max_model_len=2048",
        ),
        (
            {"enable_chunked_prefill": False},
            {"policy": "chunk_budget"},
            [{}],
            "chunk_budget .*--no-enable-chunked-prefill",
        ),
    ],
    ids=["drafts", "threshold beyond the context", "whole prompts"],
)
def test_settings_are_checked_before_the_model_loads(
    always: dict[str, Any], refused: dict[str, Any], accepted: list[dict[str, Any]], error: str
) -> None:
    with pytest.raises(UsageError, match=error):
        configure(**always, **refused)
    for other in accepted:
        configure(**always, **other)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("version", "scheduler_cls", "probed"),
    [
        ("0.32.0+cpu", "vllm_sched.SyncPolicyScheduler", False),
        ("0.32.7+cpu", "vllm_sched.SyncPolicyScheduler", True),
        ("0.32.7", None, False),
    ],
)
def test_untested_release_is_probed_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, version: str, scheduler_cls: str | None, probed: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    monkeypatch.setattr(behaviour_checks, "require_known_behaviour", lambda: calls.append(True))
    configure(scheduler_cls=scheduler_cls)
    assert calls == [True] * probed


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm_sched.PolicyScheduler", PolicyScheduler),
        (SyncPolicyScheduler, SyncPolicyScheduler),
        ("vllm.v1.core.sched.scheduler.Scheduler", None),
        (Scheduler, None),
        (None, None),
    ],
)
def test_own_class_returns_our_scheduler_class(kind: Any, expected: type | None) -> None:
    assert plugin.policy_scheduler_class(config(scheduler_cls=kind)) is expected


@pytest.mark.parametrize(
    ("value", "scheduler_cls", "runner", "compiles"),
    [
        (None, "vllm_sched.PolicyScheduler", "generate", True),
        (None, None, "generate", False),
        ("1", None, "generate", True),
        ("0", "vllm_sched.PolicyScheduler", "generate", False),
        ("1", "vllm_sched.PolicyScheduler", "pooling", False),
    ],
)
def test_engines_with_policies_compile_logprobs_at_start(
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
    scheduler_cls: str | None,
    runner: str,
    compiles: bool,
) -> None:
    monkeypatch.delenv(plugin.WARM_UP_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.WARM_UP_VARIABLE, value)
    made = config(scheduler_cls=scheduler_cls)
    made.model_config.runner_type = runner
    calls: list[Any] = []
    executor: Any = SimpleNamespace(vllm_config=made, collective_rpc=calls.append)
    plugin._with_logprobs(lambda _: None)(executor)
    assert calls == ([plugin.compile_logprobs] if compiles else [])


def test_logprobs_of_one_token_are_compiled_in_vllms_sampler_only() -> None:
    shapes: list[tuple[int, ...]] = []

    class OtherSampler:
        def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(logits.shape))
            return logits

        def gather_logprobs(self, _: torch.Tensor, count: int, token: torch.Tensor) -> None:
            shapes.append((count, *token.shape))

    class VllmSampler(OtherSampler, Sampler):
        __init__ = object.__init__

    for kind in (OtherSampler, VllmSampler):
        assert shapes == []
        plugin.compile_logprobs(
            SimpleNamespace(
                model_runner=SimpleNamespace(sampler=kind()),
                model_config=SimpleNamespace(get_vocab_size=lambda: 5),
                device="cpu",
            )
        )
    assert shapes == [(1, 5), (1, 1)]


def test_mamba_layers_that_keep_all_states_need_a_block_for_each() -> None:
    manager: Any = SimpleNamespace(
        block_size=16,
        kv_cache_spec=SimpleNamespace(mamba_cache_mode="all", num_speculative_blocks=2),
    )
    scheduler: Any = SimpleNamespace(max_model_len=100)
    assert policy_setup._kv_group(scheduler, manager) == KvGroup(16, 7 + 2, 2)


@pytest.mark.usefixtures("_registered")
def test_invalid_warm_up_value_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plugin.WARM_UP_VARIABLE, "yes")
    with pytest.raises(UsageError, match="VLLM_SCHED_WARM_UP='yes' must be 0 or 1; correct it"):
        configure()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [PolicyScheduler, SyncPolicyScheduler])
def test_warning_about_an_idle_device_is_for_a_synchronous_class_in_an_asynchronous_engine(
    caplog: pytest.LogCaptureFixture, kind: type, asynchronous: bool
) -> None:
    with caplog.at_level("WARNING", logger="vllm.vllm_sched"):
        make_scheduler({"long_prompt": {}}, scheduler_cls=kind, async_scheduling=asynchronous)
    warned = "leaves the device idle" in caplog.text
    assert warned is (asynchronous and kind is SyncPolicyScheduler)
