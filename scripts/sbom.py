"""Write what a distribution is made of, as a CycloneDX 1.6 document.

    python scripts/sbom.py > sbom.json                    what the router needs
    python scripts/sbom.py --extra cpu --extra otel       and with extras
    python scripts/sbom.py --all                          everything that is installed here

It reads the metadata of what is installed, and asks nobody: the same environment gives the same
document, byte for byte. Feed it, or the environment itself, to a scanner that knows advisories:
`pip-audit` does where its service can be reached, which a build without a network cannot.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import Any

from packaging.requirements import Requirement

ROOT = "vllm-sched"
SPEC = "1.6"
LONGEST_LICENCE = 100  # some put the whole text there


def normal(name: str) -> str:
    """Write a name as PyPI does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(found: Distribution, extras: Iterable[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Name what a distribution requires here, and with which extras."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    for line in found.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate(each) for each in environments):
            yield normal(wanted.name), frozenset(wanted.extras)


def closure(
    root: str, extras: Iterable[str]
) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Find all that a distribution needs, and who needs whom; what is missing is left out."""
    found: dict[str, Distribution] = {}
    edges: dict[str, set[str]] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    queue = [(normal(root), frozenset(extras))]
    while queue:
        name, wanted = queue.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for other, more in needs(found[name], wanted):
            edges.setdefault(name, set()).add(other)
            queue.append((other, more))
    return found, {name: {o for o in others if o in found} for name, others in edges.items()}


def licence(found: Distribution) -> str:
    """Say under which licence it says that it is."""
    said = found.metadata
    for text in (said.get("License-Expression"), said.get("License")):
        if text and len(text) < LONGEST_LICENCE and "\n" not in text:
            return text
    classes = (each.split(" :: ")[-1] for each in said.get_all("Classifier") or ()
               if each.startswith("License :: "))  # fmt: skip
    return " AND ".join(sorted({*classes} - {"OSI Approved"})) or "unknown"


def component(name: str, found: Distribution) -> dict[str, Any]:
    """Describe one."""
    purl = f"pkg:pypi/{name}@{found.version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": found.version,
        "purl": purl,
        "licenses": [{"license": {"name": licence(found)}}],
    }


def document(root: str, extras: Iterable[str], *, everything: bool = False) -> dict[str, Any]:
    """Describe a distribution with all that it needs."""
    parts, edges = closure(root, extras)
    if everything:
        parts |= {normal(each.metadata["Name"]): each for each in distributions()}
    described = {name: component(name, parts[name]) for name in sorted(parts)}
    top = described.pop(normal(root)) | {"type": "application"}
    refs = {name: each["bom-ref"] for name, each in described.items()} | {root: top["bom-ref"]}
    body = {
        "metadata": {"component": top},
        "components": list(described.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[o] for o in edges.get(name, ()))}
            for name in sorted(refs)
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **body,
    }


def main() -> int:
    """Print it."""
    options = argparse.ArgumentParser(prog="scripts/sbom.py", description=__doc__)
    options.add_argument("--extra", action="append", default=[])
    options.add_argument("--all", action="store_true")
    given = options.parse_args()
    json.dump(document(ROOT, given.extra, everything=given.all), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
