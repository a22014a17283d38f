"""The runner of several vLLM versions: environments, and the table of outcomes."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.upstream import versions
from vllm_sched.engine import vllm_compat

REPORT = """<testsuites><testsuite>
<testcase classname="tests.engine.test_a" name="one"/>
<testcase classname="tests.engine.test_a.TestB" name="two"><skipped/></testcase>
<testcase classname="tests.policies.test_c" name="three"><failure/></testcase>
<testcase classname="tests.policies.test_c" name="four"><error/></testcase>
</testsuite></testsuites>"""


def test_every_minor_version_of_the_range_has_a_tested_release() -> None:
    assert all(map(vllm_compat.is_tested, vllm_compat.TESTED_RELEASES))
    (major, first), (_, end) = vllm_compat.TESTED
    minors = {release.rpartition(".")[0] for release in vllm_compat.TESTED_RELEASES}
    assert minors == {f"{major}.{minor}" for minor in range(first, end)}


def test_environment_has_its_own_vllm_and_shares_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def unpack(version: str, kept: Collection[str], folder: Path) -> None:
        fetched.append((version, kept))
        (folder / "vllm").mkdir()
        (folder / "vllm" / "__init__.py").write_text("from ._version import __version__\n")
        (folder / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n\n")

    monkeypatch.setattr(versions, "unpack", unpack)
    python = versions.environment("0.33.0", tmp_path)
    code = (
        "import importlib.metadata as m, vllm, vllm_sched, pytest, torch.version\n"
        "print(vllm.__version__, m.version('vllm'), vllm.__file__, vllm_sched.__file__, sep='\\n')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, metadata, vllm, own = done.stdout.splitlines()
    assert version == metadata == "0.33.0+cpu"
    assert Path(vllm).is_relative_to(tmp_path)
    assert Path(own).is_relative_to(versions.ROOT)
    assert versions.environment("0.33.0", tmp_path) == python
    assert fetched == [("0.33.0", ("vllm", "PKG-INFO"))]


def test_outcomes_are_counted_by_suite(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    counts = versions.counts_of(report)
    assert counts == {"tests/engine": {"passed": 1, "skipped": 1}, "tests/policies": {"failed": 2}}
    assert not versions.passes(counts)
    assert versions.passes(dict.fromkeys(versions.SUITES, counts["tests/engine"]))
    assert not versions.passes({"tests/engine": counts["tests/engine"]}), "suites did not run"
    assert versions.table({"0.33.0": counts}).splitlines() == [
        "vLLM     suite              passed   failed  skipped",
        "0.33.0   tests/engine            1        0        1",
        "0.33.0   tests/policies          0        2        0",
    ]
