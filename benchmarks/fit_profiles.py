"""Fit the built-in profiles to kernel times that were measured on GPUs.

    python -m benchmarks.fit_profiles                      # all files of vllm_sched/cost/data
    python -m benchmarks.fit_profiles --systems h100 --out out
    python -m benchmarks.fit_profiles --check              # is a new fit equal to the files?
    python -m benchmarks.fit_profiles --baseline           # the errors of the linear form instead

Makes an environment in out/fit-profiles, installs aiconfigurator-core in it (600 MB), samples some
600 steps of each worker and fits the curve: two minutes. No GPU is needed. A worker that the source
cannot be right about is left out, and listed under `missing` with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from vllm_sched.bench.calibrate import aiconfigurator as source  # noqa: E402
from vllm_sched.cost import profile_fit  # noqa: E402
from vllm_sched.cost.curved_step_time import CurvedStepTime  # noqa: E402
from vllm_sched.cost.profiles import Profile, ProfileKey, checksum, to_json  # noqa: E402

HOME = ROOT / "out" / "fit-profiles"
DATA = ROOT / "vllm_sched" / "cost" / "data"
REQUIREMENT = "aiconfigurator-core==0.12.0"
SYSTEMS = ("a100", "h100", "h200", "b200")
NOTE = (
    "Seconds of vLLM's kernels, measured one by one and added up for a step; the KV cache is bf16. "
    "What a mixed step costs beside its kernels is unknown and taken as 0."
)
# In fp8 a step reads half the weights. Kernels that are slower than in bf16 are remarked on; much
# slower ones were measured with their launches, which CUDA graphs hide.
REMARKED_RATIO, MAX_RATIO = 1.1, 3.0
ERROR_LINES = 30  # of the environment's command


def environment() -> Path:
    """Return the interpreter of an environment with the source; make it if needed."""
    python = HOME / "env" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME / "env")], check=True)
    probe = subprocess.run([str(python), "-c", "import aiconfigurator_core"], capture_output=True)
    if probe.returncode:
        print(f"installing {REQUIREMENT} in {HOME / 'env'}", flush=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", REQUIREMENT], check=True)
    return python


def rounded(value: Any) -> Any:
    """Keep five digits of every float."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(member) for name, member in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def table_row(name: str, errors: dict[Any, profile_fit.FitError]) -> str:
    """Return a line with the errors of a fit."""
    shown = [f"{kind} {e.median:5.1%} ({e.worst:4.0%})" for kind, e in errors.items()]
    off = profile_fit.misses(errors)
    return f"{name:36}{'  '.join(shown)}{'  MISSES ' + ', '.join(off) if off else ''}"


def keys_of(system: str) -> Iterator[ProfileKey]:
    for model, dtype, tp in product(source.MODELS, source.DTYPES, source.SIZES):
        yield ProfileKey(model, system, dtype, tp)


def fit_system(system: str, date: str) -> dict[str, Any]:
    """Fit every model, dtype and number of GPUs of a system."""
    profiles: dict[ProfileKey, Profile] = {}
    missing: list[dict[str, Any]] = []

    def leave_out(key: ProfileKey, why: str) -> None:
        missing.append({**key._asdict(), "why": why})
        print(f"{key.name:36}left out: {why}", flush=True)

    for key in keys_of(system):
        try:
            profiles[key] = source.profile_of(key)
        except source.UnsupportedProfileError as error:
            leave_out(key, str(error).split(";")[0])
            continue
        print(table_row(key.name, dict(profiles[key].errors)), flush=True)
    for key in [key for key in profiles if key.dtype == source.FP8]:
        full = profiles.get(key._replace(dtype=source.BF16))
        if full is None:
            continue
        ratio = max(
            profiles[key].time.seconds(s) / full.time.seconds(s) for s in source.USUAL_DECODES
        )
        slower = f"its decode steps take up to {ratio:.1f} times as long as in bf16"
        if ratio > MAX_RATIO:
            del profiles[key]
            leave_out(key, f"implausible: {slower}")
        elif ratio > REMARKED_RATIO:
            profiles[key] = replace(profiles[key], remark=f"in this source {slower}")
    content: dict[str, Any] = {
        "source": source.PACKAGE,
        "version": source.version(),
        "license": "Apache-2.0",
        "backend": source.backend(system),
        "system": system,
        "date": date,
        "note": NOTE,
        "profiles": [rounded(to_json(profile)) for profile in profiles.values()],
        "missing": missing,
    }
    return {"sha256": checksum(content), **content}


def baseline(systems: list[str]) -> None:
    """Print the errors of the linear form on the same steps."""
    profile_fit.KNOTS = (0, 1)  # type: ignore[assignment]  # a curve of one line
    for key in chain.from_iterable(map(keys_of, systems)):
        try:
            profile = source.profile_of(key)
        except source.UnsupportedProfileError:
            continue
        assert isinstance(profile.time, CurvedStepTime)
        print(table_row(key.name, dict(profile.errors)), flush=True)


def differing(system: str) -> list[str]:
    """Return what differs between a new fit and the file, whatever their dates."""
    stored = json.loads((DATA / f"{system}.json").read_text())
    new = fit_system(system, stored["date"])
    return [f"{system}.json: {name}" for name in stored if new[name] != stored[name]]


def write(content: dict[str, Any], path: Path) -> None:
    """Write one profile a line, so that a change of one is seen as such."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f' "{name}": [\n  {rows}\n ]' if value else f' "{name}": []')
        else:
            lines.append(f' "{name}": {json.dumps(value)}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Fit in the environment of the source."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--date", default=f"{datetime.now(UTC):%Y-%m-%d}", help=argparse.SUPPRESS)
    parser.add_argument("--baseline", action="store_true", help="errors of the linear form")
    parser.add_argument("--check", action="store_true", help="compare a new fit with the files")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        command = [str(environment()), "-m", "benchmarks.fit_profiles", "--inside", *sys.argv[1:]]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        # The source's warnings are shown only with an error.
        done = subprocess.run(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print("\n".join(done.stderr.splitlines()[-ERROR_LINES:]), file=sys.stderr)
        return done.returncode
    if args.baseline:
        baseline(args.systems)
        return 0
    if args.check:
        off = [line for system in args.systems for line in differing(system)]
        print("\n".join(off) or "a new fit is equal to the files")
        return int(bool(off))
    args.out.mkdir(parents=True, exist_ok=True)
    for system in args.systems:
        write(fit_system(system, args.date), args.out / f"{system}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
