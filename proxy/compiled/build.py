"""Compiles the router's modules with mypyc and a C compiler, in a separate process.

    python -m proxy.compiled.build FOLDER

compiles into FOLDER. Users run `vllm-sched compile`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxy.compiled.locate import (
    BUILT,
    FOLDERS,
    PACKAGE,
    PLATFORM,
    SWITCH,
    CompileError,
    compiled_names,
    compiled_sources,
    name,
)

ERROR_LINES = 5  # of a failed step's output
# A separate process, because a broken module may end it without an exception.
LOAD_ALL = """
import sys
from importlib import import_module
from pathlib import Path
import proxy
from proxy.compiled.locate import use
use(Path(sys.argv[1]), proxy.__path__)
for name in sys.argv[2:]:
    assert not import_module(name).__file__.endswith(".py"), name
"""


def build() -> Path:
    """Compile the modules, check that all of them load, and return their folder."""
    folder = BUILT / name()
    if folder.is_dir():
        return folder
    require()
    try:
        BUILT.mkdir(exist_ok=True)
        BUILT.chmod(0o755)  # any user may run the router, so ignore the umask
        # Renamed when complete: a starting router sees all of it or nothing.
        staging = Path(tempfile.mkdtemp(prefix="making-", dir=BUILT))
    except OSError as error:
        raise CompileError(f"{error}; run it as the user that installed vllm-sched") from None
    try:
        _run([sys.executable, "-m", __spec__.name, str(staging)], staging)
        _run([sys.executable, "-c", LOAD_ALL, str(staging), *compiled_names()], staging)
        shutil.rmtree(staging / "temp")
        if BUILT / name() != folder:
            raise CompileError("sources changed during the build; compile again")
        staging.chmod(0o755)
        staging.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process built the same sources first
            raise CompileError(str(error)) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for other in BUILT.glob(f"{PLATFORM}-*"):  # of older sources
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def remove() -> None:
    try:
        if BUILT.is_dir():
            shutil.rmtree(BUILT)
    except OSError as error:
        raise CompileError(f"{error}; run it as the user that installed vllm-sched") from None


def require() -> None:
    """Raise `CompileError` if a build tool is missing."""
    if missing := [name for name in ("mypyc", "setuptools") if find_spec(name) is None]:
        raise CompileError(f"no {' and no '.join(missing)}; pip install 'mypy>=2' setuptools")
    require_compiler()


def require_compiler() -> None:
    """Raise `CompileError` without a C compiler or Python's headers."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    program = compiler.split()[0]
    if shutil.which(program) is None:
        raise CompileError(f"no C compiler ({program}); install gcc or clang, or set CC")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        raise CompileError(f"no {headers}; install Python's headers (python3-dev, python3-devel)")


def _run(command: list[str], folder: Path) -> None:
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {SWITCH: "0", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        umask=0o022,
    )
    if process.returncode:
        lines = process.stdout.splitlines()[-ERROR_LINES:]
        raise CompileError("\n".join([f"exit status {process.returncode}:", *lines]))


def _compile(folder: Path) -> None:
    from mypyc.build import mypycify
    from setuptools import setup

    temp = folder / "temp"
    # Copied: mypy takes everything next to an installed package for sources.
    alone = temp / "sources"
    shutil.copytree(PACKAGE, alone / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--config-file=", f"--cache-dir={temp / 'types'}", "--follow-imports=silent"]
    # The result must not depend on installed packages or their stubs.
    options += ["--no-site-packages", "--ignore-missing-imports"]
    os.chdir(alone)  # mypy derives module names from relative paths
    sources = [str(path.relative_to(PACKAGE.parent)) for path in compiled_sources()]
    modules: Any = mypycify(
        [*options, *sources],
        opt_level="1",
        debug_level="0",
        multi_file=True,
        target_dir=str(temp / "c"),
    )
    _correct_slices(temp / "c")
    arguments = ["--quiet", "build_ext", f"--build-lib={folder}", f"--build-temp={temp}"]
    setup(
        name="vllm-sched-compiled",
        packages=[],
        py_modules=[],
        ext_modules=modules,
        script_args=arguments,
    )
    _copy_uncompiled(folder)


def _copy_uncompiled(folder: Path) -> None:
    """Copy the files of compiled folders that stay as they are."""
    compiled = set(compiled_sources())
    for part in {folder.partition("/")[0] for folder in FOLDERS}:
        for path in (PACKAGE / part).rglob("*.*"):
            if path not in compiled and "__pycache__" not in path.parts:
                place = folder / path.relative_to(PACKAGE.parent)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)


def _correct_slices(folder: Path) -> None:
    """Replace mypyc's slicing of `bytes` by CPython's in the C sources.

    mypyc's raises `SystemError` for a slice that ends before it starts; in Python it is empty.
    """
    for path in folder.glob("__native_*.c"):
        text = path.read_text()
        path.write_text(text.replace("CPyBytes_GetSlice(", "CPyObject_GetSlice("))


if __name__ == "__main__":
    _compile(Path(sys.argv[1]))
