"""Without policies, our schedulers pass vLLM's own scheduler tests.

The tests run with our classes in place of upstream's. A case that is skipped or never reports
counts as failed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.upstream.run import OURS, UPSTREAM, Account, Classes, Run, run_upstream

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

CORE = "tests/v1/core"
BLAST = f"{CORE}/test_priority_scheduler_random.py::test_priority_scheduling_blast"
CONNECTOR = "tests/v1/kv_connector/unit"

# The files (or cases of slow files), and their minimum number of cases in the tested range of vLLM.
SUITE = {
    f"{CORE}/test_scheduler.py": 190,
    f"{CORE}/test_async_scheduler.py": 19,
    f"{CORE}/test_deferred_block_free.py": 14,
    f"{CORE}/test_prefix_replay.py": 6,
    f"{CORE}/test_priority_preemption_bug.py": 1,
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
# Cases that may fail without a GPU: with this text, and with upstream's classes too.
EXCUSED = {
    f"{CORE}/test_scheduler.py"
    "::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": (
        "Async scheduling is not supported by the V1 model runner with pipeline parallelism"
    )
}
# Some cases build upstream's schedulers for diffusion models by name.
ALSO_BUILT = {
    f"vllm.v1.core.sched.diffusion_scheduler:{name}"
    for name in ("DiffusionScheduler", "DiffusionAsyncScheduler")
}


FAULTY_FILE = f"{CORE}/test_async_scheduler.py"
FAULTY = Classes(UPSTREAM.sync, "stand_ins:Careless")
JOURNALED = Classes("stand_ins:JournaledSync", "stand_ins:JournaledAsync")
# Everything that runs, preempts, streams and transfers.
JOURNALED_FILES = [
    f"{CORE}/test_scheduler.py",
    f"{CORE}/test_async_scheduler.py",
    f"{CORE}/test_deferred_block_free.py",
    f"{CONNECTOR}/test_remote_decode_lifecycle.py",
    f"{CONNECTOR}/test_remote_prefill_lifecycle.py",
    f"{CONNECTOR}/test_kv_load_failure_recovery.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
]


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> list[Account]:
    """Run everything with our classes, a part with the journal, one file with a faulty class."""
    runs = [Run(list(SUITE), OURS), Run([FAULTY_FILE], FAULTY), Run(JOURNALED_FILES, JOURNALED)]
    return run_upstream(runs, tmp_path_factory.mktemp("upstream"))


@pytest.fixture
def account(accounts: list[Account]) -> Account:
    return accounts[0]


# Few tests, so that one process of the test runner gets all of them.


def test_all_cases_pass_with_our_schedulers(account: Account, tmp_path: Path) -> None:
    for what, least in SUITE.items():
        assert len(account.cases_of(what)) >= least, (what, account.output[-4000:])
    if failed := [case for what in SUITE for case in account.not_passed(what)]:
        # Control run with upstream's own classes.
        (control,) = run_upstream([Run(failed, UPSTREAM)], tmp_path)
        verdicts = [_verdict(case, account, control) for case in failed]
        assert not any(verdicts), "\n".join(filter(None, verdicts))


def test_every_file_builds_our_schedulers(account: Account) -> None:
    for file in {what.partition("::")[0] for what in SUITE}:
        built = set(account.built.get(file, ()))
        assert built & set(OURS), file
        assert built <= {*OURS, *ALSO_BUILT}, file


def test_run_has_no_errors(account: Account) -> None:
    assert account.errors == []
    all_passed = not any(map(account.not_passed, SUITE))
    assert account.exit_code == (pytest.ExitCode.OK if all_passed else pytest.ExitCode.TESTS_FAILED)


def test_all_cases_pass_with_the_journal(accounts: list[Account]) -> None:
    account = accounts[2]
    for file in JOURNALED_FILES:
        assert len(account.cases_of(file)) >= SUITE[file]
        excused = [c for c in EXCUSED if account.fails_for(c, EXCUSED[c])]
        assert set(account.not_passed(file)) <= set(excused), account.reasons
        assert set(account.built[file]) <= {*JOURNALED, *ALSO_BUILT}


def test_faulty_scheduler_is_detected(accounts: list[Account]) -> None:
    account = accounts[1]
    assert account.built[FAULTY_FILE].keys() == {FAULTY.asynchronous}
    assert account.not_passed(FAULTY_FILE)
    assert account.exit_code != 0
    # A run that never builds a stand-in is refused.
    assert account.errors == [f"never built: {FAULTY.sync}"]


def _verdict(case: str, ours: Account, upstream: Account) -> str:
    reason = EXCUSED.get(case)
    if reason and ours.fails_for(case, reason) and upstream.fails_for(case, reason):
        return ""
    outcomes = [account.outcomes.get(case, "never reported") for account in (ours, upstream)]
    report = ours.reasons.get(case, "")
    return f"{case}: {outcomes[0]} (with upstream's own classes: {outcomes[1]})\n{report}"
