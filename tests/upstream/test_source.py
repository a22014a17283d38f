"""Fetching vLLM's source release."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.upstream import source

VERSION = "0.32.0"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_SCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "installed_version", lambda: VERSION)
    return tmp_path / "cache"


def write_archive(folder: Path, *names: str) -> Path:
    archive = folder / f"vllm-{VERSION}.tar.gz"
    with tarfile.open(archive, "w:gz") as release:
        for name in names:
            member = tarfile.TarInfo(f"vllm-{VERSION}/{name}")
            release.addfile(member, io.BytesIO())
    return archive


def test_only_tests_and_settings_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tests/v1/core/utils.py", "tests/__init__.py", "pyproject.toml", "vllm/__init__.py")
    monkeypatch.setattr(source, "_download", lambda _, folder: write_archive(folder, *names))
    tree = source.upstream_tests()
    assert {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()} == set(names[:3])
    assert list(cache.iterdir()) == [tree]

    monkeypatch.setattr(source, "_download", None)
    assert source.upstream_tests() == tree  # the second time it is cached


def test_failed_fetch_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_download", lambda _, folder: write_archive(folder, "setup.py"))
    with pytest.raises(source.SourceError, match="holds no tests"):
        source.upstream_tests()
    assert list(cache.iterdir()) == []


def test_missing_pip_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = source._is_installed
    monkeypatch.setattr(source, "_is_installed", lambda name: name != "pip" and installed(name))
    with pytest.raises(source.SourceError, match=r"takes .*\bpip\b"):
        source.upstream_tests()
    assert list(cache.iterdir()) == []
