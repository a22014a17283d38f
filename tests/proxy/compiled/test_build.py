"""What is said when modules can't be compiled, and which compiled ones are used."""

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
IN_USE = "from proxy.compiled.locate import in_use; print(in_use())"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build in a folder of the test's own."""
    built = tmp_path / "built"
    for module in (locate, build):
        monkeypatch.setattr(module, "BUILT", built)
    monkeypatch.delenv(locate.SWITCH)
    return built


def stand_in(monkeypatch: pytest.MonkeyPatch, *results: int) -> list[list[str]]:
    """Have each step end so, without doing it."""
    steps: list[list[str]] = []
    left = list(results)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        steps.append(command)
        folder = Path(command[-1] if len(steps) == 1 else command[3])
        (folder / "temp").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, left.pop(0), "one\ntwo: the reason\n")

    monkeypatch.setattr(subprocess, "run", run)
    return steps


def test_what_is_there_of_these_sources_is_used(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate.found() is None
    folder = elsewhere / locate.name()
    folder.mkdir(parents=True)
    assert locate.found() == folder
    monkeypatch.setenv(locate.SWITCH, "0")
    assert locate.found() is None


def test_what_was_made_of_other_sources_is_not(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "proxy"
    (package / "core").mkdir(parents=True)
    (package / "core" / "one.py").write_text("ONE = 1\n")
    monkeypatch.setattr(locate, "PACKAGE", package)
    (elsewhere / locate.name()).mkdir(parents=True)
    assert locate.found() is not None
    for change in ("ONE = 2\n", "ONE = 1\n# and\n"):
        (package / "core" / "one.py").write_text(change)
        assert locate.found() is None
    (package / "core" / "one.py").rename(package / "core" / "two.py")
    assert locate.found() is None


@pytest.mark.plain("says that plain ones run")
def test_a_router_says_which_modules_run_and_why(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate.kind() == "plain (not compiled yet: see `vllm-sched compile --help`)"
    (elsewhere / "another Python-0").mkdir(parents=True)
    assert "compiled for another Python or platform" in locate.kind()
    (elsewhere / f"{locate.PLATFORM}-0").mkdir()
    assert "the sources have changed since they were compiled" in locate.kind()
    monkeypatch.setenv(locate.SWITCH, "0")
    assert locate.kind() == "plain (VLLM_SCHED_COMPILED is 0)"
    monkeypatch.setattr("proxy.__path__", [str(elsewhere)])
    assert locate.kind() == "compiled"


def test_it_is_made_once_and_what_was_before_goes(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / f"{locate.PLATFORM}-of an older version").mkdir(parents=True)
    (elsewhere / "of another Python").mkdir()
    steps = stand_in(monkeypatch, 0, 0)
    for _ in range(2):
        assert main(["compile"]) == 0
        assert str(elsewhere / locate.name()) in capsys.readouterr().out
    there = {each.name for each in elsewhere.iterdir()}
    assert there == {locate.name(), "of another Python"}
    assert len(steps) == 2, "compiled, and loaded to see that it can be"
    assert main(["compile", "--remove"]) == 0
    assert main(["compile", "--remove"]) == 0
    assert not elsewhere.exists()


@pytest.mark.parametrize("results", [(1,), (0, -11)])
def test_what_failed_is_told_and_leaves_nothing(
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    results: tuple[int, ...],
) -> None:
    stand_in(monkeypatch, *results)
    assert main(["compile"]) == 2
    said = capsys.readouterr().err
    assert f"exit status {results[-1]}" in said
    assert "two: the reason" in said
    assert list(elsewhere.iterdir()) == []


@pytest.mark.compiled
def test_an_installed_package_is_compiled_whatever_lies_beside_it(tmp_path: Path) -> None:
    """As in a folder of installed packages, where mypy would take others for sources of ours."""
    try:
        build.require()
    except CompileError as error:
        pytest.skip(str(error))
    site, made = tmp_path / "site", tmp_path / "made"
    for name in (
        "__init__.py",
        "errors.py",
        "compiled",
        "core/__init__.py",
        "core/request/__init__.py",
        "core/request/json_limits.py",
    ):
        source, place = locate.PACKAGE / name, site / "proxy" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    (site / "proxy" / "core" / "one.py").write_text(ONE)
    shutil.copy(typing_extensions.__file__, site)
    made.mkdir()
    env = os.environ | {locate.SWITCH: "0", "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "proxy.compiled.build", str(made)]
    done = subprocess.run(command, cwd=made, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {path.name.partition(".")[0] for path in made.glob("proxy/core/**/*.so")}
    assert compiled == {"one", "json_limits"}
    assert (made / "proxy" / "core" / "__init__.py").is_file()
    # Slices that end before they start are empty, as in Python: mypyc's own raise SystemError.
    command = [sys.executable, "-c", CUT, str(made)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = stand_in(monkeypatch)
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
    assert not elsewhere.exists()


def test_a_place_that_is_not_ours_is_told(elsewhere: Path) -> None:
    elsewhere.write_text("a file\n")  # as good as one that can't be written to, for root too
    with pytest.raises(CompileError, match="run it as the user that installed vllm-sched"):
        build.build()
    assert locate.found() is None


def test_without_compiled_ones_the_sources_run() -> None:
    told = os.environ | {locate.SWITCH: "0"}
    done = subprocess.run(
        [sys.executable, "-c", IN_USE], env=told, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
