"""A vLLM that we do not know is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_sched.engine import seams
from vllm_sched.errors import UnsupportedVllmError


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.30.2", False),
        ("0.31.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc1", True),
        ("0.34.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_the_range(version: str, tested: bool) -> None:
    assert seams.is_tested(version) is tested


def test_an_untested_version_is_refused_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seams, "installed_version", lambda: "0.29.0")
    monkeypatch.delenv(seams.OVERRIDE, raising=False)
    with pytest.raises(UnsupportedVllmError) as caught:
        seams.require_tested_vllm()
    assert str(caught.value) == (
        "vLLM 0.29.0 is outside the tested range 0.31 to 0.33; "
        "install one inside it, or set VLLM_SCHED_ALLOW_UNTESTED=1 to try anyway"
    )
    monkeypatch.setenv(seams.OVERRIDE, "1")
    with pytest.warns(UserWarning, match=r"0\.29\.0 is outside"):
        seams.require_tested_vllm()


def test_a_missing_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_reserve_prefill_lookahead")
    with pytest.raises(UnsupportedVllmError, match=r"lacks Scheduler\._reserve_prefill_lookahead,"):
        seams.require_tested_vllm()


def test_a_renamed_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "update_from_output", lambda _, output: output)
    assert seams.missing_methods(Scheduler) == ["Scheduler.update_from_output(scheduler_output)"]


def test_a_missing_field_of_requests_is_named() -> None:
    class Bare:
        def __init__(self) -> None:
            self.is_prefill_chunk = False

    assert seams.missing_fields(Bare) == ["Request.next_decode_eligible_step"]


def test_a_missing_attribute_is_named() -> None:
    assert "Scheduler.waiting" in seams.missing_attributes(object())


def test_without_vllm_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import vllm_sched\n"
        "try: vllm_sched.PolicyScheduler\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert "pip install 'vllm-sched[vllm]'" in done.stdout
