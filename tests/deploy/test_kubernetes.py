"""The manifests: valid by the API's schemas, and consistent with each other and the router."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from proxy.config import FleetConfig, parse
from proxy.core.model.role import Role
from proxy.metrics import page
from proxy.metrics.exposition import Family
from proxy.wire.client import local_endpoints
from tests.deploy import custom
from tests.deploy.rendered import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    Json,
    allowed,
    component,
    containers,
    found_by,
    kinds,
    matches,
    named,
    overlay,
    ports,
    templates,
    with_components,
)
from tests.prometheus.tools import ALERTS, check_case, groups

# The oldest supported version, and the newest with schemas.
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
STRICT = "kubernetes-json-schema/v{}-local-strict"
PINNED = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*")

each_overlay = pytest.mark.parametrize("name", OVERLAYS)


@functools.cache
def fleet(name: str) -> FleetConfig:
    (configured,) = (
        each
        for each in kinds(overlay(name), "ConfigMap")
        if each["metadata"]["name"].startswith("router-fleet-")
    )
    return parse(configured["data"]["fleet.yaml"], name)


def router(name: str) -> tuple[Json, Json]:
    template = named(overlay(name), "Deployment", "router")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    return template, container


def workers(name: str) -> Iterator[tuple[str, Json, Json]]:
    for what, container, pod in containers(overlay(name)):
        if not what.startswith("Deployment/"):
            yield what, container, pod


def flag(container: Json, name: str) -> str | None:
    return next(
        (arg.split("=", 1)[1] for arg in container["args"] if arg.startswith(f"--{name}=")), None
    )


def sleeps(container: Json) -> int:
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return int(seconds)


@functools.cache
def definitions(version: str) -> Registry:
    """Return the types of a version; `kubernetes_validate` reads megabytes for each object."""
    contents = schema_contents(f"{STRICT.format(version)}/_definitions.json", version)
    return (Resource.from_contents(contents) @ Registry()).crawl()


@functools.cache
def validator(kind: str, api_version: str, version: str) -> Draft202012Validator:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{STRICT.format(version)}/{kind.lower()}-{group}.json", version)
    return Draft202012Validator(schema, registry=definitions(version))


def validate(resource: Json, *versions: str) -> None:
    own = custom.contained_objects(resource) if resource["kind"] in custom.KINDS else (resource,)
    for one in own:
        for version in versions:
            validator(one["kind"], one["apiVersion"], version).validate(one)


@each_overlay
def test_objects_are_valid_in_one_namespace_and_not_cluster_wide(name: str) -> None:
    for each in overlay(name):
        validate(each, *VERSIONS)
        metadata = each["metadata"]
        at = metadata["name" if each["kind"] == "Namespace" else "namespace"]
        assert at == "vllm-sched", metadata["name"]
        assert not each["kind"].startswith("Cluster")
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"container": 1}}
    with pytest.raises(ValidationError):
        validate(wrong, VERSIONS[0])


@pytest.mark.parametrize("name", COMPONENTS)
def test_objects_with_a_component_are_valid(name: str) -> None:
    for each in with_components(name):
        if each not in overlay(COMPONENTS[name]):
            validate(each, *VERSIONS)


# Maps with free keys.
FREE = {"labels", "annotations", "matchLabels"}


def maps(value: object, name: str = "") -> Iterator[Json]:
    """Yield all maps of fields in an object, except those in pods."""
    if isinstance(value, list):
        for each in value:
            yield from maps(each)
    elif isinstance(value, dict) and name not in FREE and "containers" not in value:
        yield value
        for key, each in value.items():
            yield from maps(each, key)


def custom_resource(kind: str) -> Json:
    name = {"ScaledObject": "keda-short-long", "LeaderWorkerSet": ""}.get(kind, "pod-monitor")
    objects = with_components(name) if name else overlay("multi-node")
    return copy.deepcopy(kinds(objects, kind)[0])


@pytest.mark.parametrize("kind", custom.KINDS)
def test_unknown_field_of_a_custom_resource_is_refused(kind: str) -> None:
    resource = custom_resource(kind)
    validate(resource, VERSIONS[-1])
    for one in list(maps(resource)):
        one["surplus"] = 1
        with pytest.raises(ValidationError, match="surplus"):
            validate(resource, VERSIONS[-1])
        del one["surplus"]


@pytest.mark.parametrize(
    ("kind", "given", "wrong"),
    [
        ("ScaledObject", "pollingInterval: 15", "pollingInterval: often"),
        ("ScaledObject", "threshold: '100000'", "threshold: 100000"),
        ("ScaledObject", "behavior: currentReplicasIfHigher", "behavior: asBefore"),
        ("ScaledObject", "ignoreNullValues: 'false'", "ignoreNullValues: false"),
        ("ScaledObject", "periodSeconds: 60", "periodSeconds: 60s"),
        ("PodMonitor", "interval: 10s", "interval: '10'"),
        ("PrometheusRule", "alert: PoolDown", "alert: PoolDown\n      record: 'a:b:c'"),
        ("PrometheusRule", "for: 2m", "for: two minutes"),
        ("LeaderWorkerSet", "restartPolicy: RecreateGroupOnPodRestart", "restartPolicy: Always"),
        ("LeaderWorkerSet", "containerPort: 8000", "containerPort: http"),
    ],
)
def test_invalid_value_of_a_custom_resource_is_refused(kind: str, given: str, wrong: str) -> None:
    text = yaml.safe_dump(custom_resource(kind))
    assert given in text
    with pytest.raises(ValidationError):
        validate(yaml.safe_load(text.replace(given, wrong, 1)), VERSIONS[-1])


@each_overlay
def test_selectors_match_pods_and_ports_exist(name: str) -> None:
    objects = overlay(name)
    for each in kinds(objects, "Deployment", "StatefulSet"):
        assert matches(each["spec"]["selector"]["matchLabels"], each["spec"]["template"])
    for each in kinds(objects, "PodDisruptionBudget"):
        assert found_by(each["spec"]["selector"]["matchLabels"], objects), each["metadata"]["name"]
    for each in kinds(objects, "Service"):
        chosen = found_by(each["spec"]["selector"], objects)
        assert len(chosen) == 1, f"{each['metadata']['name']} finds {len(chosen)} kinds of pods"
        for port in each["spec"]["ports"]:
            assert port["targetPort"] in ports(chosen[0])
    for each in kinds(objects, "LeaderWorkerSet"):  # it creates a Service of its name
        assert each["metadata"]["name"] not in {
            service["metadata"]["name"] for service in kinds(objects, "Service")
        }
    for each in kinds(objects, "StatefulSet"):
        service = named(objects, "Service", each["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert matches(service["spec"]["selector"], each["spec"]["template"])
    for each in kinds(objects, "HorizontalPodAutoscaler"):
        target = each["spec"]["scaleTargetRef"]
        scaled = named(objects, target["kind"], target["name"])
        assert "replicas" not in scaled["spec"], "an apply would undo the autoscaler's work"
    budgets = kinds(objects, "PodDisruptionBudget")
    for what, template in templates(objects):
        own = [b for b in budgets if matches(b["spec"]["selector"]["matchLabels"], template)]
        assert len(own) == 1, f"{what}: eviction fails with {len(own)} budgets for a pod"
        for spread in template["spec"].get("topologySpreadConstraints", ()):
            assert matches(spread["labelSelector"]["matchLabels"], template)


@each_overlay
def test_discovery_selectors_name_existing_services(name: str) -> None:
    discovery = fleet(name).discovery
    assert discovery is not None
    looked_for = set()
    for pool in discovery.pools:
        key, _, service_name = str(pool.selector).partition("=")
        assert key == "kubernetes.io/service-name"
        service = named(overlay(name), "Service", service_name)
        assert pool.port in {port["name"] for port in service["spec"]["ports"]}
        looked_for.add(service_name)
    headless = [s for s in kinds(overlay(name), "Service") if s["spec"].get("clusterIP") == "None"]
    assert {each["metadata"]["name"] for each in headless} == looked_for


@each_overlay
def test_fleet_file_matches_the_workers(name: str) -> None:
    config = fleet(name)
    assert config.discovery is not None
    for pool in config.discovery.pools:
        service = named(overlay(name), "Service", str(pool.selector).partition("=")[2])
        (template,) = found_by(service["spec"]["selector"], overlay(name))
        (container,) = template["spec"]["containers"]
        served = flag(container, "served-model-name") or container["args"][1]
        assert served == (pool.model or config.model)
        length = int(flag(container, "max-model-len") or 0)
        if pool.role == "short":
            assert 2 * config.routing.short_limit <= length
        if pool.role in ("prefill", "decode"):
            assert config.transfer is not None
            assert config.transfer.connector == "nixl"
            assert "NixlConnector" in str(flag(container, "kv-transfer-config"))


@each_overlay
def test_router_listens_on_the_declared_ports(name: str) -> None:
    template, container = router(name)
    config = fleet(name)
    assert config.router.host == "0.0.0.0"  # noqa: S104 - compared
    assert ports(template) == {"http": config.router.port}
    # The admin API controls the fleet, so only port forwarding reaches it.
    assert config.router.admin.host == "127.0.0.1"
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "fleet")
    (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "fleet")
    assert container["args"] == ["router", f"{mount['mountPath']}/fleet.yaml"]
    assert named(overlay(name), "ConfigMap", volume["configMap"]["name"])["data"].keys() == {
        "fleet.yaml"
    }


@each_overlay
def test_tenant_keys_come_from_a_secret(name: str) -> None:
    template, container = router(name)
    config = fleet(name)
    assert not config.router.allow_anonymous
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "keys")
    (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "keys")
    # The Secret is required, so no router starts without keys.
    assert volume["secret"].keys() == {"secretName", "defaultMode"}
    assert mount["readOnly"]
    text = (KUBERNETES / "components" / "keys" / "kustomization.yaml").read_text()
    assert f"create secret generic {volume['secret']['secretName']} " in text
    for tenant in config.tenants:
        assert str(tenant.keys_file) == f"{mount['mountPath']}/{tenant.name}"
        assert f"--from-literal={tenant.name}=" in text
    # The router's user may read the keys.
    assert template["spec"]["securityContext"]["fsGroup"]
    assert volume["secret"]["defaultMode"] & 0o040


@each_overlay
def test_probes_use_existing_endpoints(name: str) -> None:
    for what, template in templates(overlay(name)):
        (container,) = template["spec"]["containers"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if what.endswith("/workerTemplate"):
                assert kind not in container, "it serves no HTTP"
                continue
            probe = container[kind]["httpGet"]
            assert probe["port"] in ports(template)
            assert probe["path"] in (
                local_endpoints.PATHS if component(template) == "router" else {"/health"}
            )
    # A router without workers is alive but not ready, or a loading fleet would restart it.
    _, container = router(name)
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@each_overlay
def test_termination_grace_period_exceeds_the_drain_time(name: str) -> None:
    template, container = router(name)
    takes = sleeps(container) + fleet(name).router.drain_s
    assert takes < template["spec"]["terminationGracePeriodSeconds"]
    # A draining router refuses Prometheus' connections, which must not raise an alert.
    minutes = int(ALERTS["RouterDown"]["for"].removesuffix("m"))
    assert template["spec"]["terminationGracePeriodSeconds"] <= minutes * 60
    for what, container, pod in workers(name):
        if not what.endswith("/workerTemplate"):
            takes = sleeps(container) + int(flag(container, "shutdown-timeout") or 0)
            assert takes > 60, what
            assert takes < pod["terminationGracePeriodSeconds"], what


@each_overlay
def test_pods_have_resources_pinned_images_and_minimal_privileges(name: str) -> None:
    for what, container, pod in containers(overlay(name)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= requests.keys(), what
        assert "memory" in limits, what
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu"), what
        assert PINNED.fullmatch(container["image"]), container["image"]
        assert pod["securityContext"]["runAsNonRoot"] is True, what
        assert pod["securityContext"]["runAsUser"] >= 1000, what
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, what
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, what
        assert own["capabilities"] == {"drop": ["ALL"]}, what
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), what
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume], what
        assert pod.get("automountServiceAccountToken") is (
            None if what.startswith("Deployment/") else False
        ), what
    assert router(name)[1]["securityContext"]["readOnlyRootFilesystem"] is True


@each_overlay
def test_router_role_only_lists_and_watches_endpointslices(name: str) -> None:
    (role,) = kinds(overlay(name), "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    (binding,) = kinds(overlay(name), "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    account = named(overlay(name), "ServiceAccount", subject["name"])
    assert router(name)[0]["spec"]["serviceAccountName"] == account["metadata"]["name"]


@each_overlay
def test_network_policies_allow_only_required_traffic(name: str) -> None:
    objects = overlay(name)
    policies = kinds(objects, "NetworkPolicy")
    front = router(name)[0]
    stranger = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": []}}
    for policy in policies:
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert allowed(policies, "in", front, stranger, 8000)
    assert not allowed(policies, "in", front, stranger, 8001)
    others = [t for _, t in templates(objects) if component(t) == "worker"]
    for worker in others:
        assert allowed(policies, "out", front, worker, 8000)
        assert allowed(policies, "in", worker, front, 8000)
        assert not allowed(policies, "in", worker, stranger, 8000)
        assert not allowed(policies, "in", worker, front, 22)
        for other in others:
            together = name in ("prefill-decode", "multi-node")
            assert allowed(policies, "in", worker, other, 5600) is together
            assert allowed(policies, "out", worker, other, 5600) is together


# The router's metric families about workers.
FAMILIES = {each.name: each for each in vars(page).values() if isinstance(each, Family)}


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name.startswith("keda")])
def test_scaling_queries_use_existing_metrics(name: str) -> None:
    objects = with_components(name)
    scaled = kinds(objects, "ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == {
        each["metadata"]["name"] for each in kinds(objects, "StatefulSet")
    }
    for each in scaled:
        spec = each["spec"]
        named(objects, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        assert (
            1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        )
        for trigger in spec["triggers"]:
            query = trigger["metadata"]["query"]
            (metric,) = re.findall(r"proxy_\w+", query)
            labels = dict(re.findall(r'(\w+)="([^"]*)"', query))
            assert labels.pop("namespace") == "vllm-sched"  # the Prometheus operator's own label
            assert labels.keys() <= set(FAMILIES[metric].labels)
            role = Role(labels["role"])
            assert spec["scaleTargetRef"]["name"] == f"worker-{role.value}"
            assert float(trigger["metadata"]["threshold"]) > 0


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name.startswith("keda")])
def test_scaling_threshold_is_below_max_requests(name: str) -> None:
    # Requests in the router's queue are charged to no worker, so a threshold at or above
    # max_requests would never be exceeded.
    thresholds: dict[str, float] = {}
    for each in kinds(with_components(name), "ScaledObject"):
        for trigger in each["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            if "proxy_worker_inflight_requests" in query:
                (role,) = re.findall(r'role="(\w+)"', query)
                thresholds[role] = float(trigger["metadata"]["threshold"])
    discovery = fleet(COMPONENTS[name]).discovery
    assert discovery is not None
    for pool in discovery.pools:
        if pool.max_requests is not None:
            assert thresholds[pool.role] < pool.max_requests, pool.name


def test_full_decode_pool_is_scaled_up(tmp_path: Path) -> None:
    name = "keda-prefill-decode"
    queries = [
        trigger["metadata"]
        for each in kinds(with_components(name), "ScaledObject")
        for trigger in each["spec"]["triggers"]
        if "proxy_worker_seats_taken_ratio" in trigger["metadata"]["query"]
    ]
    [query] = queries
    pool, routers = 3, 2  # each router exports all workers
    series = 'proxy_worker_seats_taken_ratio{{namespace="vllm-sched",role="decode",{}}}'
    each_full = [
        {"series": series.format(f'pod="r{router}",worker="d{worker}"'), "values": "1x2"}
        for router in range(routers)
        for worker in range(pool)
    ]
    validate = {
        "expr": query["query"],
        "eval_time": "1m",
        "exp_samples": [{"labels": "{}", "value": pool}],
    }
    check_case(tmp_path, {"input_series": each_full, "promql_expr_test": [validate]})
    # The autoscaler tolerates a tenth above the threshold.
    assert pool / float(query["threshold"]) > 1.1 * pool


def test_prometheusrule_matches_the_rule_files() -> None:
    (rule,) = kinds(with_components("pod-monitor"), "PrometheusRule")
    assert rule["metadata"]["namespace"] == "vllm-sched"
    assert rule["spec"]["groups"] == groups("rules.yml") + groups("alerts.yml")


def test_pod_monitors_match_pods_and_ports() -> None:
    objects = with_components("pod-monitor")
    seen = []
    for each in kinds(objects, "PodMonitor"):
        chosen = found_by(each["spec"]["selector"]["matchLabels"], objects)
        assert chosen
        for template in chosen:
            seen.append(component(template))
            for endpoint in each["spec"]["podMetricsEndpoints"]:
                assert endpoint["port"] in ports(template)
                assert endpoint["path"] in local_endpoints.PATHS
    assert sorted(seen) == ["router", "worker", "worker"]


def test_every_overlay_and_component_is_tested() -> None:
    assert OVERLAYS == ["multi-node", "prefill-decode", "short-long"]
    found = {path.name for path in (KUBERNETES / "components").iterdir()}
    assert found == {*COMPONENTS, "keys"}  # part of every overlay
