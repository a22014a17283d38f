"""The chart in deploy/helm gives the routers of the kustomizations."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import parse
from tests.deploy import test_compose
from tests.deploy.rendered import KUBERNETES, ROOT, Json, kinds, named, with_components
from tests.deploy.test_kubernetes import VERSIONS, validate
from tests.deploy.test_replicas import LINE
from tests.programs import fetched

CHART = ROOT / "deploy" / "helm" / "vllm-sched-router"
# Policies of the kustomizations select workers by their component alone.
ALL: Json = {
    "redis": {"enabled": True},
    "postgres": {"enabled": True},
    "podMonitor": {"enabled": True},
    "networkPolicy": {"workerLabels": {"app.kubernetes.io/name": None}},
}
HELMS_OWN = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "checksum/fleet"}


def helm(command: str, values: Json, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    arguments = [fetched("helm"), *command.split(), str(CHART), "--values", str(file)]
    return subprocess.run(arguments, capture_output=True, text=True)


def chart(values: Json, folder: Path) -> tuple[Json, ...]:
    done = helm("template --namespace vllm-sched router", values, folder)
    assert done.returncode == 0, done.stderr
    return tuple(filter(None, yaml.load_all(done.stdout, yaml.CSafeLoader)))


def plain(value: Any) -> Any:
    """Return a value without what only Helm sets, and its volumes in order."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: plain(each) for key, each in value.items() if key not in HELMS_OWN}
    for volumes in (kept[key] for key in ("volumes", "volumeMounts") if key in kept):
        volumes.sort(key=lambda each: each["name"])
    return {key: each for key, each in kept.items() if (key, each) != ("annotations", {})}


def by_name(objects: tuple[Json, ...], pattern: str, name: str) -> dict[tuple[str, str], Json]:
    """Return comparable objects; names that match the pattern are changed."""
    text = re.sub(pattern, name, yaml.dump_all(map(plain, objects), Dumper=yaml.CSafeDumper))
    found = {}
    for each in yaml.load_all(text, yaml.CSafeLoader):
        each["metadata"] = {"name": each["metadata"]["name"]}
        if each["kind"] == "ConfigMap":
            each["data"] = yaml.safe_load(LINE.sub("  ", each["data"]["fleet.yaml"]))
            each["data"]["router"].pop("journal", None)
        found[each["kind"], each["metadata"]["name"]] = each
    return found


def test_chart_gives_the_objects_of_the_kustomizations(tmp_path: Path) -> None:
    given = with_components("redis", "postgres", "pod-monitor")
    wanted = by_name(given, r"router-fleet-\w+", "router-fleet")
    for kind, name in list(wanted):
        of_workers = name.startswith("worker") and (kind, name) != ("NetworkPolicy", "worker")
        if of_workers or kind in ("Namespace", "PrometheusRule"):
            del wanted[kind, name]
    wanted["Service", "router"]["spec"]["type"] = "ClusterIP"  # the default
    found = by_name(chart(ALL, tmp_path), r"\brouter-(redis|postgres|worker)\b", r"\1")
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert found[name] == each


@pytest.mark.parametrize("values", [{}, ALL, {"autoscaling": {"enabled": False}}])
def test_objects_of_the_chart_are_valid(values: Json, tmp_path: Path) -> None:
    done = helm("lint --strict", values, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for each in chart(values, tmp_path):
        validate(each, *VERSIONS)


def test_alerts_are_for_routers_of_any_release(tmp_path: Path) -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    (jobs,) = set(re.findall(r'up\{job=~"(.*?)"\}', alerts))
    for release in ("router", "llm"):
        done = helm(f"template --namespace models {release}", ALL, tmp_path)
        (monitor,) = kinds(tuple(yaml.safe_load_all(done.stdout)), "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        job = f"models/{monitor['metadata']['name']}"  # the operator's default
        for rule in endpoint.get("relabelings", []):
            assert rule["targetLabel"] == "job"
            job = rule["replacement"]
        assert re.fullmatch(jobs, job), job


def test_selectors_match_the_pods_of_this_release_only(tmp_path: Path) -> None:
    for each in kinds(chart(ALL, tmp_path), "Deployment", "StatefulSet"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert selector["app.kubernetes.io/instance"] == "router"
        assert selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()


def test_servers_of_ones_own_are_named_in_the_fleet_file(tmp_path: Path) -> None:
    values = {
        "redis": {"url": "rediss://redis.example.com:6380", "existingSecret": "mine"},
        "fleet": {
            "router": {
                "allow_anonymous": True,
                "max_collected_bytes": 1 << 30,
                "shared": {"timeout_s": 0.2},
            },
            "tenants": None,
        },
        "keysSecret": "",
    }
    objects = chart(values, tmp_path)
    text = named(objects, "ConfigMap", "router-fleet")["data"]["fleet.yaml"]
    router = parse(text, "chart").router
    assert router.shared is not None
    assert (router.shared.url, router.shared.timeout_s) == ("rediss://redis.example.com:6380", 0.2)
    assert router.max_collected_bytes == 1 << 30
    spec = named(objects, "Deployment", "router")["spec"]["template"]["spec"]
    [_, mounted] = spec["volumes"]
    assert mounted["secret"]["secretName"] == "mine"
    [_, mounted] = spec["containers"][0]["volumeMounts"]
    assert str(router.shared.password_file) == f"{mounted['mountPath']}/password"
    assert not [each for each in objects if each["metadata"]["name"] == "router-redis"]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"redis": {"enabled": True, "url": "redis://a"}}, "redis: give enabled or url, not both"),
        ({"postgres": {"enabled": True, "existingSecret": ""}}, "needs a password"),
    ],
)
def test_contradicting_values_are_refused(values: Json, error: str, tmp_path: Path) -> None:
    done = helm("template router", values, tmp_path)
    assert done.returncode
    assert error in done.stderr


def test_certificates_and_a_changed_drain_reach_the_pod(tmp_path: Path) -> None:
    volume = {"name": "tls", "secret": {"secretName": "tls"}}
    values = {
        "fleet": {"router": {"drain_s": 30.5, "tls": {"cert_file": "/a", "key_file": "/b"}}},
        "extraVolumes": [volume],
        "extraVolumeMounts": [{"name": "tls", "mountPath": "/tls"}],
    }
    spec = named(chart(values, tmp_path), "Deployment", "router")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 61
    assert volume in spec["volumes"]
    [container] = spec["containers"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_chart_has_the_versions_and_images_of_the_rest() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    image = yaml.safe_load((CHART / "values.yaml").read_text())["image"]
    base = KUBERNETES / "base" / "router" / "kustomization.yaml"
    [wanted] = yaml.safe_load(base.read_text())["images"]
    assert (image["repository"], described["appVersion"]) == (wanted["newName"], wanted["newTag"])
    assert test_compose.services["router"]["image"].endswith(f":{described['appVersion']}")
    assert described["kubeVersion"] == f">={VERSIONS[0]}-0"
