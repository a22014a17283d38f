"""With every policy off our schedulers are upstream's: upstream's own tests can't tell.

vLLM's scheduler tests run with our classes wherever upstream's would be built. A case that is
skipped or never reports fails here like one that fails.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.upstream.run import OURS, UPSTREAM, Account, Classes, run_upstream

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

CORE = "tests/v1/core"
BLAST = f"{CORE}/test_priority_scheduler_random.py::test_priority_scheduling_blast"
CONNECTOR = "tests/v1/kv_connector/unit"

# The files (and cases, of a file that takes minutes), and the fewest cases there must be over the
# tested range of vLLM: a run that collects next to nothing proves nothing.
SUITE = {
    f"{CORE}/test_scheduler.py": 190,
    f"{CORE}/test_async_scheduler.py": 19,
    f"{CORE}/test_deferred_block_free.py": 14,
    f"{CORE}/test_prefix_replay.py": 6,
    f"{CORE}/test_priority_preemption_bug.py": 1,
    f"{BLAST}[preemption-None-False]": 1,
    f"{BLAST}[preemption-5-True]": 1,
    f"{CORE}/test_swa_inflight_window_free.py": 7,
    f"{CORE}/test_worker_slot_overflow.py": 3,
    f"{CONNECTOR}/offloading_connector/test_scheduler.py": 300,
    f"{CONNECTOR}/test_cache_pollution_prevention.py": 1,
    f"{CONNECTOR}/test_decode_bench_connector.py": 25,
    f"{CONNECTOR}/test_error_propagation.py": 2,
    f"{CONNECTOR}/test_invalid_blocks_correctness.py": 3,
    f"{CONNECTOR}/test_kv_load_failure_recovery.py": 14,
    f"{CONNECTOR}/test_remote_decode_lifecycle.py": 4,
    f"{CONNECTOR}/test_remote_prefill_lifecycle.py": 11,
    f"{CONNECTOR}/test_scheduler_kv_connector_override.py": 3,
    "tests/v1/ec_connector/unit/test_ec_transfer_params.py": 5,
    "tests/v1/spec_decode/test_dynamic_sd.py": 17,
    "tests/v1/streaming_input/test_scheduler_streaming.py": 9,
}
# Cases that may fail on a machine without a GPU: with this text, and with upstream's classes too.
EXCUSED = {
    f"{CORE}/test_scheduler.py"
    "::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": (
        "Async scheduling is not supported by the V1 model runner with pipeline parallelism"
    ),
}
# Some cases are about upstream's schedulers for diffusion models and build those by name.
ALSO_BUILT = {
    f"vllm.v1.core.sched.diffusion_scheduler:{name}"
    for name in ("DiffusionScheduler", "DiffusionAsyncScheduler")
}


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Account:
    """Run everything with our classes."""
    return run_upstream(list(SUITE), OURS, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def control(account: Account, tmp_path_factory: pytest.TempPathFactory) -> Account:
    """Run the cases that failed with ours again, with upstream's own classes."""
    failed = [case for what in SUITE for case in account.not_passed(what)]
    return run_upstream(failed, UPSTREAM, tmp_path_factory.mktemp("control"))


@pytest.mark.parametrize("what", SUITE)
def test_passes_whole(what: str, account: Account, request: pytest.FixtureRequest) -> None:
    assert len(account.cases_of(what)) >= SUITE[what], account.output[-4000:]
    if not_passed := account.not_passed(what):
        control = request.getfixturevalue("control")
        verdicts = [_verdict(case, account, control) for case in not_passed]
        assert not any(verdicts), "\n".join(filter(None, verdicts))


@pytest.mark.parametrize("what", SUITE)
def test_builds_our_schedulers(what: str, account: Account) -> None:
    built = set(account.built.get(what.partition("::")[0], ()))
    assert built & set(OURS)
    assert built <= {*OURS, *ALSO_BUILT}


def test_run_ends_well(account: Account) -> None:
    assert account.errors == []
    all_passed = not any(map(account.not_passed, SUITE))
    assert account.exit_code == (pytest.ExitCode.OK if all_passed else pytest.ExitCode.TESTS_FAILED)


def test_fault_is_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = f"{CORE}/test_async_scheduler.py"
    careless = Classes(UPSTREAM.sync, "stand_ins:Careless")
    account = run_upstream([file], careless, tmp_path_factory.mktemp("careless"))
    assert account.built[file].keys() == {careless.asynchronous}
    assert account.not_passed(file)
    assert account.exit_code != 0
    # And a run in which a stand-in never stood in is refused.
    assert account.errors == [f"never built: {careless.sync}"]


def _verdict(case: str, ours: Account, upstream: Account) -> str:
    reason = EXCUSED.get(case)
    if reason and ours.fails_for(case, reason) and upstream.fails_for(case, reason):
        return ""
    outcomes = [account.outcomes.get(case, "never reported") for account in (ours, upstream)]
    report = ours.reasons.get(case, "")
    return f"{case}: {outcomes[0]} (with upstream's own classes: {outcomes[1]})\n{report}"
