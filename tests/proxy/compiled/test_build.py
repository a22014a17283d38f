"""Errors of the compilation, and the choice of compiled modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import typing_extensions

from proxy.compiled import build, locate
from proxy.compiled.locate import CompileError
from vllm_sched.cli.main import main

ONE = """
from typing_extensions import TypeAlias
Count: TypeAlias = int
def cut(data: bytes, start: Count, end: Count) -> tuple[bytes, bytes, bytes]:
    return data[start:end], data[start:], data[:end]
"""
CUT = """
import sys
from pathlib import Path
import proxy
from proxy.compiled.locate import use
use(Path(sys.argv[1]), proxy.__path__)
from proxy.core.one import cut
assert cut.__class__.__name__ == "builtin_function_or_method"
for data in (b"", b"abc"):
    for start in range(-5, 6):
        for end in range(-5, 6):
            assert cut(data, start, end) == (data[start:end], data[start:], data[:end])
"""


@pytest.fixture
def build_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build in a folder of the test."""
    built = tmp_path / "built"
    for module in (locate, build):
        monkeypatch.setattr(module, "BUILT", built)
    monkeypatch.delenv(locate.SWITCH)
    return built


def fake_steps(monkeypatch: pytest.MonkeyPatch, *results: int) -> list[list[str]]:
    """Let each step end with these statuses without running it."""
    steps: list[list[str]] = []
    remaining = list(results)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        steps.append(command)
        folder = Path(command[-1] if len(steps) == 1 else command[3])
        (folder / "temp").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, remaining.pop(0), "one\ntwo: the reason\n")

    monkeypatch.setattr(subprocess, "run", run)
    return steps


def test_build_of_the_same_sources_is_used(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate.found() is None
    folder = build_folder / locate.name()
    folder.mkdir(parents=True)
    assert locate.found() == folder
    monkeypatch.setenv(locate.SWITCH, "0")
    assert locate.found() is None


def test_build_of_other_sources_is_not_used(
    build_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "proxy"
    (package / "core").mkdir(parents=True)
    (package / "core" / "one.py").write_text("ONE = 1\n")
    monkeypatch.setattr(locate, "PACKAGE", package)
    (build_folder / locate.name()).mkdir(parents=True)
    assert locate.found() is not None
    for change in ("ONE = 2\n", "ONE = 1\n# and\n"):
        (package / "core" / "one.py").write_text(change)
        assert locate.found() is None
    (package / "core" / "one.py").rename(package / "core" / "two.py")
    assert locate.found() is None


@pytest.mark.plain("reports plain modules")
def test_kind_names_the_modules_and_the_reason(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate.kind() == "plain (not compiled yet: see `vllm-sched compile --help`)"
    (build_folder / "another Python-0").mkdir(parents=True)
    assert "compiled for another Python or platform" in locate.kind()
    (build_folder / f"{locate.PLATFORM}-0").mkdir()
    assert "the sources have changed since they were compiled" in locate.kind()
    monkeypatch.setenv(locate.SWITCH, "0")
    assert locate.kind() == "plain (VLLM_SCHED_COMPILED is 0)"
    monkeypatch.setattr("proxy.__path__", [str(build_folder)])
    assert locate.kind() == "compiled"


def test_compile_runs_once_and_removes_old_builds(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (build_folder / f"{locate.PLATFORM}-of an older version").mkdir(parents=True)
    (build_folder / "of another Python").mkdir()
    steps = fake_steps(monkeypatch, 0, 0)
    for _ in range(2):
        assert main(["compile"]) == 0
        assert str(build_folder / locate.name()) in capsys.readouterr().out
    folders = {path.name for path in build_folder.iterdir()}
    assert folders == {locate.name(), "of another Python"}
    assert len(steps) == 2, "one step compiles, one loads"
    assert main(["compile", "--remove"]) == 0
    assert main(["compile", "--remove"]) == 0
    assert not build_folder.exists()


@pytest.mark.parametrize("results", [(1,), (0, -11)])
def test_failed_compile_is_reported_and_leaves_nothing(
    build_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    results: tuple[int, ...],
) -> None:
    fake_steps(monkeypatch, *results)
    assert main(["compile"]) == 2
    printed = capsys.readouterr().err
    assert f"exit status {results[-1]}" in printed
    assert "two: the reason" in printed
    assert list(build_folder.iterdir()) == []


@pytest.mark.compiled
def test_package_is_compiled_beside_other_packages(tmp_path: Path) -> None:
    """Among installed packages, mypy must not read others as sources."""
    try:
        build.require()
    except CompileError as error:
        pytest.skip(str(error))
    site, target = tmp_path / "site", tmp_path / "made"
    for name in (
        "__init__.py",
        "errors.py",
        "compiled",
        "core/__init__.py",
        "core/request/__init__.py",
        "core/request/json_limits.py",
    ):
        source, copy = locate.PACKAGE / name, site / "proxy" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    (site / "proxy" / "core" / "one.py").write_text(ONE)
    shutil.copy(typing_extensions.__file__, site)
    target.mkdir()
    env = os.environ | {locate.SWITCH: "0", "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "proxy.compiled.build", str(target)]
    done = subprocess.run(command, cwd=target, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {path.name.partition(".")[0] for path in target.glob("proxy/core/**/*.so")}
    assert compiled == {"one", "json_limits"}
    assert (target / "proxy" / "core" / "__init__.py").is_file()
    # Slices that end before they start are empty, as in Python; mypyc's own raise SystemError.
    command = [sys.executable, "-c", CUT, str(target)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_missing_tool_is_named(build_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = fake_steps(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_spec", lambda name: None if name == "mypyc" else name)
        with pytest.raises(CompileError, match="no mypyc; pip install 'mypy>=2' setuptools"):
            build.build()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(CompileError, match=r"no C compiler .*install gcc or clang"):
            build.build()
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
        with pytest.raises(CompileError, match=r"no /nowhere/Python\.h; install Python's headers"):
            build.build()
    assert steps == []
    assert not build_folder.exists()


def test_unwritable_folder_is_reported(build_folder: Path) -> None:
    build_folder.write_text("a file\n")  # unwritable for root too
    with pytest.raises(CompileError, match="run it as the user that installed vllm-sched"):
        build.build()
    assert locate.found() is None
