"""Look up security advisories for the installed packages; fail if the router's have any.

    python scripts/audit.py                 status 1: advisories found; 3: service not reachable
    python scripts/audit.py --if-reachable  status 0 if the service is not reachable

`pip-audit` does the look-up and needs a network. Advisories of other packages, such as engines and
tools, are only printed. `ACCEPTED` has advisories that do not affect the router, with the reason.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sbom

FOUND, UNREACHABLE = 1, 3
TIMEOUT_S = 240.0
# The reason by the advisory's id or alias.
ACCEPTED: dict[str, str] = {}
PIP_AUDIT = (str(Path(sys.executable).with_name("uv")), "tool", "run", "pip-audit")


def look_up(command: Sequence[str]) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the result of each package; None and the reason if the look-up failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        options = ("--format", "json", "--output", str(output), "--progress-spinner", "off")
        try:
            done = subprocess.run(
                [*command, *options, "--path", sysconfig.get_path("purelib")],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer within {TIMEOUT_S:g} s"
        except OSError as error:
            return None, str(error)
        try:  # a failed look-up has the same exit status as found advisories
            return json.loads(output.read_text())["dependencies"], ""
        except (OSError, ValueError, KeyError, TypeError):
            return None, (done.stderr.strip() or "it printed no error").splitlines()[-1]


def advisories(packages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each package name and advisory that is not in `ACCEPTED`."""
    for package in packages:
        for known in package.get("vulns", ()):
            if ACCEPTED.keys().isdisjoint({known["id"], *known.get("aliases", ())}):
                fixed = ", ".join(known.get("fix_versions") or ()) or "no version yet"
                line = f"{package['name']} {package['version']}: {known['id']}, fixed in {fixed}"
                yield sbom.normal(package["name"]), line


def main(argv: Sequence[str] | None = None) -> int:
    """Print the advisories and return the exit status."""
    options = argparse.ArgumentParser(prog="scripts/audit.py", description=__doc__)
    options.add_argument("--if-reachable", action="store_true")
    options.add_argument("--by", help="a command that takes pip-audit's options")
    given = options.parse_args(argv)
    required = sbom.closure(sbom.ROOT, ())[0].keys() - {sbom.ROOT}
    packages, why = look_up(shlex.split(given.by) if given.by else PIP_AUDIT)
    known = {sbom.normal(package["name"]) for package in packages or () if "vulns" in package}
    known &= required
    if not known:
        why = why or "the service knows none of the router's packages"
        sys.stdout.write(f"audit: NOT DONE, no package could be looked up: {why}\n")
        return 0 if given.if_reachable else UNREACHABLE
    count = 0
    for name, line in advisories(packages or ()):
        count += name in required
        sys.stdout.write(f"audit: {'router' if name in required else 'other'}: {line}\n")
    sys.stdout.write(
        f"audit: {count or 'no'} advisories for {len(known)} of the router's {len(required)} "
        "packages\n"
    )
    return FOUND if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
