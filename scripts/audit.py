"""Ask an advisory service about all that is installed, and fail by what the router is made of.

    python scripts/audit.py                 found: 1; nobody could be asked: 3
    python scripts/audit.py --if-reachable  the same, but that nobody could be asked is said, and 0

`pip-audit` asks, for which it needs a network that reaches its service. What it finds in the rest,
which are engines and tools, is told: there it is those who pin them that can do something about it.
An advisory that was judged, and does not concern us, goes into `ACCEPTED` with the reason.
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

FOUND, NOT_ASKED = 1, 3
PATIENCE_S = 240.0
# By the advisory's id or one of its aliases, and why it is none of ours.
ACCEPTED: dict[str, str] = {}
PIP_AUDIT = (str(Path(sys.executable).with_name("uv")), "tool", "run", "pip-audit")


def ask(command: Sequence[str]) -> tuple[list[dict[str, Any]] | None, str]:
    """Return what was said of each package; None and why, if nobody could be asked."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        asked = (*command, "--format", "json", "--output", str(told), "--progress-spinner", "off")
        try:
            done = subprocess.run(
                [*asked, "--path", sysconfig.get_path("purelib")],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer within {PATIENCE_S:g} s"
        except OSError as error:
            return None, str(error)
        try:  # its status is the same for what it found and for what it could not ask
            return json.loads(told.read_text())["dependencies"], ""
        except (OSError, ValueError, KeyError, TypeError):
            return None, (done.stderr.strip() or "it said nothing").splitlines()[-1]


def advisories(told: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Name packages and what is known of them, but for what was accepted."""
    for each in told:
        for known in each.get("vulns", ()):
            if ACCEPTED.keys().isdisjoint({known["id"], *known.get("aliases", ())}):
                mended = ", ".join(known.get("fix_versions") or ()) or "nowhere yet"
                said = f"{each['name']} {each['version']}: {known['id']}, mended in {mended}"
                yield sbom.normal(each["name"]), said


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and say what came of it."""
    options = argparse.ArgumentParser(prog="scripts/audit.py", description=__doc__)
    options.add_argument("--if-reachable", action="store_true")
    options.add_argument("--by", help="a command that takes pip-audit's options")
    given = options.parse_args(argv)
    ours = sbom.closure(sbom.ROOT, ())[0].keys() - {sbom.ROOT}
    told, why = ask(shlex.split(given.by) if given.by else PIP_AUDIT)
    answered = {sbom.normal(each["name"]) for each in told or () if "vulns" in each} & ours
    if not answered:
        why = why or "its service knows none of the router's packages"
        sys.stdout.write(f"audit: NOT DONE, nothing is known of any package: {why}\n")
        return 0 if given.if_reachable else NOT_ASKED
    concerning = 0
    for name, said in advisories(told or ()):
        concerning += name in ours
        sys.stdout.write(f"audit: {'the router' if name in ours else 'beside it'}: {said}\n")
    sys.stdout.write(
        f"audit: {concerning or 'no'} advisories on the {len(answered)} packages asked about, of "
        f"{len(ours)} that the router is made of\n"
    )
    return FOUND if concerning else 0


if __name__ == "__main__":
    raise SystemExit(main())
