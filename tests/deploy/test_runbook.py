"""What the runbook has one type names what is deployed."""

from __future__ import annotations

import re

import yaml

from tests.deploy.rendered import ROOT, component, named, overlay, templates

TEXT = (ROOT / "docs" / "runbook.md").read_text()
SYSTEMD = ROOT / "deploy" / "systemd"
TYPED = {
    tool: re.findall(rf"`({tool} [^`]+)`", TEXT)
    for tool in ("kubectl", "systemctl", "journalctl", "docker compose")
}


def arguments(tool: str, pattern: str) -> set[str]:
    """Find what the commands of one tool name."""
    return {found for said in TYPED[tool] for found in re.findall(pattern, said)}


def test_kubectl_is_asked_for_what_the_overlays_have() -> None:
    objects = overlay("short-long")
    (space,) = arguments("kubectl", r"-n (\S+)")
    assert named(objects, "Namespace", space)
    # Somebody who was woken types it as it stands.
    whole = [said for said in TYPED["kubectl"] if len(said.split()) > 2]
    assert [said for said in whole if " -n " not in said and " -k " not in said] == []
    some = arguments("kubectl", r" ((?:deployment|statefulset)/\S+)")
    assert {each.split("/")[0] for each in some} == {"deployment", "statefulset"}
    kinds = {"deployment": "Deployment", "statefulset": "StatefulSet"}
    for kind, name in (each.split("/") for each in some):
        assert named(objects, kinds[kind], name)
    for pod in arguments("kubectl", r"delete pod (\S+)"):
        name, _, number = pod.rpartition("-")
        assert named(objects, "StatefulSet", name)
        assert number.isdigit()
    (label,) = arguments("kubectl", r"--selector (\S+)")
    key, _, value = label.partition("=")
    found = [each for _, each in templates(objects) if each["metadata"]["labels"][key] == value]
    assert [component(each) for each in found] == ["router"]
    for folder in arguments("kubectl", r"apply -k (\S+)"):
        assert (ROOT / folder / "kustomization.yaml").exists()


def test_units_and_services_are_there() -> None:
    units = arguments("systemctl", r"(vllm-sched-\S+)") | arguments("journalctl", r"--unit (\S+)")
    assert len(units) > 1
    for unit in units:
        assert (SYSTEMD / (re.sub("@.*", "@", unit) + ".service")).exists(), unit
    files = arguments("docker compose", r"--file (\S+)")
    assert len(files) == 1
    (services,) = (yaml.safe_load((ROOT / file).read_text())["services"] for file in files)
    asked = arguments("docker compose", r"(?:restart|logs --since \S+) (\S+)$")
    assert asked
    assert asked <= services.keys()
