"""Run the engine's tests and vLLM's scheduler suites on each tested vLLM, and print a table.

    python -m tests.upstream.versions           # all of vllm_compat.TESTED_RELEASES
    python -m tests.upstream.versions 0.33.0

Every version gets an environment in out/versions: vLLM's Python files from its source release, and
everything else (torch, vLLM's dependencies, the test tools) from the environment that runs this.
A source release has no compiled kernels, so no engine starts there: the tests that need one are
skipped, and counted as skipped. Schedulers and everything around them are Python files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.upstream.source import SourceError, unpack
from vllm_sched.engine.vllm_compat import TESTED_RELEASES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "out" / "versions"
SUITES = ("tests/policies", "tests/engine", "tests/upstream")
OUTCOMES = ("passed", "failed", "skipped")
TIME_LIMIT_S = 3600.0

Counts = dict[str, Counter[str]]  # outcomes, by suite


def environment(version: str, folder: Path = FOLDER) -> Path:
    """Return the Python of this version's environment, created if necessary."""
    home = folder / version
    python = home / "bin" / "python"
    ready = home / ".ready"
    if ready.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # Paths in a .pth file come after the environment's own packages.
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in [ROOT, *shared]))
    unpack(version, ("vllm", "PKG-INFO"), site)
    _name_cpu_build(version, site)
    ready.touch()
    return python


def _name_cpu_build(version: str, site: Path) -> None:
    """Write the metadata of a CPU build, on which vLLM's platform depends."""
    local = f"{version}+cpu"
    (site / "vllm" / "_version.py").write_text(
        f"__version__ = version = {local!r}\n"
        f"__version_tuple__ = version_tuple = {(*map(int, version.split('.')), 'cpu')!r}\n"
    )
    metadata = site / f"vllm-{local}.dist-info"
    metadata.mkdir()
    text = (site / "PKG-INFO").read_text()
    (metadata / "METADATA").write_text(
        text.replace(f"\nVersion: {version}\n", f"\nVersion: {local}\n", 1)
    )
    (site / "PKG-INFO").unlink()


def run(version: str, suites: Sequence[str] = SUITES, folder: Path = FOLDER) -> Counts:
    """Run the suites on this version; pytest's output is in a log beside the environment."""
    python = environment(version, folder)
    report, log = folder / f"{version}.xml", folder / f"{version}.log"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with log.open("w") as output:
        subprocess.run(
            [*command, f"--junit-xml={report}", *suites],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT_S,
        )
    if not report.exists():
        raise SourceError(f"pytest did not finish on vLLM {version}: see {log}")
    return counts_of(report)


def counts_of(report: Path) -> Counts:
    """Count a JUnit report's outcomes by suite; an error counts as a failure."""
    counts: Counts = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - written by pytest here
        suite = "/".join(case.attrib["classname"].split(".")[:2])
        found = {part.tag for part in case}
        failed = found & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in found else "passed"
        counts.setdefault(suite, Counter())[outcome] += 1
    return counts


def table(results: Mapping[str, Counts]) -> str:
    """Return one line per version and suite."""
    lines = [f"{'vLLM':8} {'suite':16}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)]
    lines += [
        f"{version:8} {suite:16}" + "".join(f"{counts[outcome]:9}" for outcome in OUTCOMES)
        for version, suites in results.items()
        for suite, counts in suites.items()
    ]
    return "\n".join(lines)


def passes(counts: Counts, suites: Iterable[str] = SUITES) -> bool:
    """Return whether every suite ran and none of its tests failed."""
    return all(counts.get(s, Counter())["passed"] for s in suites) and not any(
        count["failed"] for count in counts.values()
    )


def main(arguments: Sequence[str]) -> int:
    """Run all versions, or the named ones, and return the exit code."""
    results = {}
    for version in arguments or TESTED_RELEASES:
        sys.stderr.write(f"vLLM {version}: running; its log is {FOLDER}/{version}.log\n")
        try:
            results[version] = run(version)
        except (SourceError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"vLLM {version}: {error}\n")
            return 1
    sys.stdout.write(f"{table(results)}\n")
    return 0 if all(map(passes, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
