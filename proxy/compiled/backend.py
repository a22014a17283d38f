"""The build backend: setuptools, plus compiled modules in the wheel.

A wheel has compiled modules if there is a C compiler with Python's headers, unless
VLLM_SCHED_COMPILED is 0. If compiling fails, the wheel is plain. An editable installation is plain.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tomllib
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from proxy.compiled import build, locate
from proxy.compiled.locate import BUILT, PACKAGE, SWITCH, CompileError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str] | None] | None
MYPYC = "mypy~=2.4.1"  # the version that the tests of compiled modules run with
FILE_MODE = 0o644 << 16  # of each file in the wheel


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return the build requirements of a wheel: mypyc and all dependencies if it can be compiled.

    The build imports all compiled modules, and they import the dependencies.
    """
    needed: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    if os.environ.get(SWITCH) == "0" or locate.found() is not None:
        return needed
    try:
        build.require_compiler()
    except CompileError:
        return needed  # `build_wheel` prints the reason
    project = tomllib.loads(PACKAGE.with_name("pyproject.toml").read_text())["project"]
    return [*needed, MYPYC, *project["dependencies"]]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    compiled = _compiled()
    # setuptools would pack modules that an earlier build left there.
    shutil.rmtree(Path("build", "lib"), ignore_errors=True)
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    if compiled is None:
        return name
    tag = platform_tag()
    wheel = Path(wheel_directory, name)
    platform_wheel = wheel.with_name(name.replace("py3-none-any", tag))
    add(wheel, compiled, platform_wheel, tag)
    wheel.unlink()
    return platform_wheel.name


def _compiled() -> Path | None:
    if os.environ.get(SWITCH) == "0":
        _print(f"the wheel has plain modules: {SWITCH} is 0")
        return None
    folder = locate.found()
    if folder is None:
        _print(f"compiling the router's modules takes some minutes; {SWITCH}=0 skips it")
        try:
            folder = build.build()
        except (CompileError, OSError) as error:
            _print(f"the wheel has plain modules, because compiling failed: {error}")
            return None
    _print(f"the wheel has compiled modules: {folder.name}")
    return folder


def add(wheel: Path, compiled: Path, platform_wheel: Path, tag: str) -> None:
    """Write a copy of a plain wheel, with compiled modules and a platform tag."""
    with ZipFile(wheel) as plain, ZipFile(platform_wheel, "w", ZIP_DEFLATED) as new:
        files = {info.filename: plain.read(info) for info in plain.infolist()}
        for path in sorted(compiled.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                inner = path.relative_to(compiled).as_posix()
                files[f"{BUILT.name}/{compiled.name}/{inner}"] = path.read_bytes()
        [about] = [name for name in files if name.endswith(".dist-info/WHEEL")]
        files[about] = (
            files[about]
            .replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            .replace(b"Tag: py3-none-any", b"Tag: " + tag.encode())
        )
        record = about.replace("WHEEL", "RECORD")
        files.pop(record)
        lines = [f"{name},sha256={_hash(text)},{len(text)}" for name, text in files.items()]
        files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
        for name, text in files.items():
            entry = ZipInfo(name)
            entry.external_attr = FILE_MODE
            new.writestr(entry, text, ZIP_DEFLATED)


def platform_tag() -> str:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    abi = python + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"{python}-{abi}-{platform}"


def _hash(text: bytes) -> str:
    return urlsafe_b64encode(sha256(text).digest()).rstrip(b"=").decode()


def _print(message: str) -> None:
    print(f"vllm-sched: {message}", file=sys.stderr, flush=True)  # noqa: T201
