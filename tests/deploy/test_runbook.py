"""The commands of the runbook name deployed objects."""

from __future__ import annotations

import re

import yaml

from tests.deploy.rendered import ROOT, component, named, overlay, templates

TEXT = (ROOT / "docs" / "runbook.md").read_text()
SYSTEMD = ROOT / "deploy" / "systemd"
COMMANDS = {
    tool: re.findall(rf"`({tool} [^`]+)`", TEXT)
    for tool in ("kubectl", "systemctl", "journalctl", "docker compose")
}


def arguments(tool: str, pattern: str) -> set[str]:
    return {found for command in COMMANDS[tool] for found in re.findall(pattern, command)}


def test_kubectl_commands_name_objects_of_the_overlays() -> None:
    objects = overlay("short-long")
    (space,) = arguments("kubectl", r"-n (\S+)")
    assert named(objects, "Namespace", space)
    # Commands are complete, to be typed as they are.
    whole = [command for command in COMMANDS["kubectl"] if len(command.split()) > 2]
    assert [command for command in whole if " -n " not in command and " -k " not in command] == []
    names = arguments("kubectl", r" ((?:deployment|statefulset)/\S+)")
    assert {each.split("/")[0] for each in names} == {"deployment", "statefulset"}
    kinds = {"deployment": "Deployment", "statefulset": "StatefulSet"}
    for kind, name in (each.split("/") for each in names):
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


def test_units_and_services_exist() -> None:
    units = arguments("systemctl", r"(vllm-sched-\S+)") | arguments("journalctl", r"--unit (\S+)")
    assert len(units) > 1
    for unit in units:
        assert (SYSTEMD / (re.sub("@.*", "@", unit) + ".service")).exists(), unit
    files = arguments("docker compose", r"--file (\S+)")
    assert len(files) == 1
    (services,) = (yaml.safe_load((ROOT / file).read_text())["services"] for file in files)
    names = arguments("docker compose", r"(?:restart|logs --since \S+) (\S+)$")
    assert names
    assert names <= services.keys()
