"""Write the dependencies of a distribution as a CycloneDX 1.6 document.

    python scripts/sbom.py > sbom.json                    the router's dependencies
    python scripts/sbom.py --extra cpu --extra otel       with extras
    python scripts/sbom.py --all                          all installed packages

The script reads the installed packages' metadata and needs no network: the same environment gives
the same document, byte for byte. `scripts/audit.py` looks up advisories.
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
MAX_LICENCE_CHARS = 100  # some packages have the licence's whole text


def normal(name: str) -> str:
    """Return a name in PyPI's normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(found: Distribution, extras: Iterable[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the requirements of a distribution on this platform, with their extras."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    for line in found.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate(each) for each in environments):
            yield normal(wanted.name), frozenset(wanted.extras)


def closure(
    root: str, extras: Iterable[str]
) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Return the installed dependencies of a distribution, and the edges between them."""
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
    """Return the licence from a distribution's metadata."""
    metadata = found.metadata
    for text in (metadata.get("License-Expression"), metadata.get("License")):
        if text and len(text) < MAX_LICENCE_CHARS and "\n" not in text:
            return text
    classes = (text.split(" :: ")[-1] for text in metadata.get_all("Classifier") or ()
               if text.startswith("License :: "))  # fmt: skip
    return " AND ".join(sorted({*classes} - {"OSI Approved"})) or "unknown"


def component(name: str, found: Distribution) -> dict[str, Any]:
    """Return the component of one distribution."""
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
    """Return the document of a distribution and its dependencies."""
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
    """Print the document."""
    options = argparse.ArgumentParser(prog="scripts/sbom.py", description=__doc__)
    options.add_argument("--extra", action="append", default=[])
    options.add_argument("--all", action="store_true")
    given = options.parse_args()
    json.dump(document(ROOT, given.extra, everything=given.all), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
