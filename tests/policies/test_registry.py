"""Policy names and settings of the command line and of `additional_config`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from tests.engine import arrivals
from tests.fleet import conftest as fleet
from vllm_sched import policies
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts, Policy

# Of a policy's module, without its parts.
MAX_LINES = {
    "static_batching": 120, "prefill_first": 120, "rotation": 120, "lanes": 300, "long_prompt": 300,
    "deferred_prefill": 350, "chunk_budget": 250,
}  # fmt: skip
TESTS = Path(__file__).parents[1]
FACTS = EngineFacts(max_model_len=16_384, max_num_batched_tokens=512, max_num_seqs=16)


def test_every_policy_is_one_file_in_the_registry() -> None:
    folder = Path(policies.__path__[0])
    for path in folder.glob("*.py"):
        import_module(f"{policies.__name__}.{path.stem}")
    here = [
        kind for kind in Policy.__subclasses__() if kind.__module__.startswith(policies.__name__)
    ]
    assert {kind.name: kind for kind in here} == registry.POLICIES, (
        "add the policy to POLICIES in vllm_sched/policies/registry.py"
    )
    assert all((folder / f"{name}.py").exists() for name in registry.POLICIES)


@pytest.mark.parametrize("name", registry.POLICIES)
def test_every_policy_documents_idea_source_cost_and_failure(name: str) -> None:
    text = sys.modules[registry.POLICIES[name].__module__].__doc__ or ""
    parts = ("Idea:", "Source:", "Cost per step:", "How it fails:")
    assert [part for part in parts if part not in text] == [], "in the module's docstring"


@pytest.mark.parametrize("name", registry.POLICIES)
def test_every_policy_has_tests_and_runs_in_a_real_engine(name: str) -> None:
    assert list(TESTS.glob(f"*/test_{name}.py")), f"add tests/policies/test_{name}.py"
    assert any(name in (of or ()) for of in arrivals.SETS.values()), "add it to arrivals.SETS"
    assert any(name in of for of in fleet.SETS.values()), (
        "add it to SETS in tests/fleet/conftest.py"
    )


def test_names_and_settings_become_configuration() -> None:
    config = registry.parse_settings(
        ["long_prompt"],
        ["long_prompt.max_num_partial_prefills=2", "long_prompt.long_prefill_share=auto"],
    )
    assert config == {"long_prompt": {"max_num_partial_prefills": 2, "long_prefill_share": "auto"}}


@pytest.mark.parametrize(
    ("budget", "given", "threshold"),
    [(512, 0, 655), (8192, 0, 8192), (8192, 327, 327)],  # 4 % of 16,384, at least the budget
)
def test_build_resolves_the_threshold(budget: int, given: int, threshold: int) -> None:
    facts = replace(FACTS, max_num_batched_tokens=budget)
    (policy,) = registry.build({"long_prompt": {"long_prefill_token_threshold": given}}, facts)
    assert policy.effective_settings()["long_prefill_token_threshold"] == threshold


def test_resolved_settings_configure_the_same_policy() -> None:
    (policy,) = registry.build({"long_prompt": {"max_wait_s": 5.0}}, FACTS)
    (again,) = registry.build({"long_prompt": policy.effective_settings()}, FACTS)
    assert again.effective_settings() == policy.effective_settings()
    assert registry.former_setting_warnings({"long_prompt": policy.effective_settings()}) == []


def test_former_settings_are_accepted_with_a_warning() -> None:
    former = registry.find("long_prompt").settings_type.former
    given = {"max_num_partial_prefills": 2, "long_prefill_share": 0.5, "long_step_stretch": 6}
    assert given.keys() == former.keys()
    (policy,) = registry.build({"long_prompt": given}, FACTS)
    assert policy.effective_settings().items() >= given.items()
    warnings = registry.former_setting_warnings({"long_prompt": {"max_wait_s": 5.0, **given}})
    assert [warning.partition(":")[0] for warning in warnings] == [
        f"long_prompt.{name}" for name in given
    ]


@pytest.mark.parametrize(
    ("name", "given", "remedy"),
    [
        ("deferred_prefill", {"exclusive": True}, "add --policy prefill_first"),
        ("rotation", {"order": "shortest"}, "no effect; long_prompt serves short"),
        ("lanes", {"reserve_kv": 0.2}, "leave it out; batch then leaves a tenth"),
    ],
)
def test_warning_of_a_former_setting_names_a_remedy(
    name: str, given: dict[str, object], remedy: str
) -> None:
    assert registry.build({name: given}, FACTS)
    (warning,) = registry.former_setting_warnings({name: given})
    assert remedy in warning


@pytest.mark.parametrize("name", registry.POLICIES)
def test_a_policy_has_few_settings_and_describes_each(name: str) -> None:
    settings = registry.find(name).settings_type
    assert settings.former.keys() <= settings.model_fields.keys()
    assert len(settings.model_fields.keys() - settings.former.keys()) <= 4
    for key, field in settings.model_fields.items():
        assert field.description, key


@pytest.mark.parametrize("name", registry.POLICIES)
def test_a_policys_module_is_short(name: str) -> None:
    lines = Path(inspect.getfile(registry.find(name))).read_text().splitlines()
    assert len(lines) <= MAX_LINES[name]


def test_integers_are_accepted_for_float_settings() -> None:
    policies = {"lanes": {"reserve_kv": 0}, "long_prompt": {"long_prefill_share": 1}}
    assert len(registry.build(policies, FACTS)) == 2


def test_nothing_configured_builds_nothing() -> None:
    assert registry.build({}, FACTS) == []


@pytest.mark.parametrize(
    ("names", "sets", "words"),
    [
        (["long_promt"], [], ["'long_promt'", "valid: "]),
        (["long_prompt"], ["long_prompt.max=1"], ["long_prompt.max", "max_wait_s", "correct"]),
        (["long_prompt"], ["nosuch.max=1"], ["'nosuch'", "valid: "]),
        (["rotation"], ["rotation.chunk=true"], ["rotation.chunk=True", "tokens", "default 0"]),
        (["deferred_prefill"], ["deferred_prefill.departures=true"], ["departures=True", "auto"]),
        (["deferred_prefill"], ["deferred_prefill.departures=2.0"], ["departures=2.0", "integer"]),
        (["deferred_prefill"], ["deferred_prefill.departures=0"], ["=0", "equal to 1", "'auto'"]),
        (["rotation"], ['rotation.chunk="16"'], ["rotation.chunk='16'", "integer"]),
        (["prefill_first"], ["prefill_first.pause_decodes=1"], ["pause_decodes=1", "boolean"]),
        (["long_prompt"], ["long_prompt.long_prefill_share=true"], ["share=True", "number"]),
        ([], ["long_prompt.max_wait_s=1"], ["is off", "--policy long_prompt"]),
        (["long_prompt"], ["max_wait_s=1"], ["NAME.KEY=VALUE"]),
        (["long_prompt"], ["long_prompt.max_wait_s"], ["NAME.KEY=VALUE"]),
        (["long_prompt"], ["long_prompt.max_wait_s=-1"], ["max_wait_s=-1", "greater than 0", "60"]),
        (["long_prompt"], ["long_prompt.max_wait_s=soon"], ["max_wait_s='soon'", "number"]),
        (["long_prompt"], ["long_prompt.max_wait_s=nan"], ["max_wait_s=nan", "finite"]),
        (["long_prompt"], ["long_prompt.max_wait_s=NaN"], ["max_wait_s=nan", "finite"]),
        (["long_prompt"], ["long_prompt.max_num_partial_prefills=0"], ["=0", "equal to 1"]),
        (["long_prompt"], ["long_prompt.long_prefill_share=1.5"], ["1.5", "0 < share <= 1"]),
        (["long_prompt"], ["long_prompt.itl_ms=0"], ["itl_ms=0", "greater than 0", "100"]),
    ],
)
def test_invalid_input_is_refused_in_one_line_that_names_it(
    names: list[str], sets: list[str], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        registry.parse_settings(names, sets)
    message = str(caught.value)
    assert "\n" not in message
    assert "long_step_stretch" not in message  # a former setting
    for word in words:
        assert word in message


@pytest.mark.parametrize("given", [[], "long_prompt", 3, {"long_prompt": 3}, {"nosuch": {}}])
def test_invalid_additional_config_is_refused(given: object) -> None:
    with pytest.raises(UsageError):
        registry.build(given, FACTS)


def test_threshold_beyond_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="exceeds max_model_len=16384"):
        registry.build({"long_prompt": {"long_prefill_token_threshold": 20_000}}, FACTS)
