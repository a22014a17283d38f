"""The manifests: right by the API's schemas, and right with each other and with the router."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pydantic
import pytest
import yaml

from grafana import rules
from proxy.config import FleetConfig
from proxy.core.model.role import Role
from proxy.metrics import scrape
from proxy.metrics.exposition import Family
from proxy.wire.client import endpoints
from tests.deploy import custom
from tests.deploy.rendered import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    Json,
    component,
    containers,
    found_by,
    kinds,
    matches,
    named,
    overlay,
    ports,
    rendered,
    templates,
)
from tests.prometheus.tools import ALERTS, PROMETHEUS, groups, promtool
from vllm_sched.cli.fleet.fleet import read
from vllm_sched.cli.serve import vllm_command

# The oldest that is still looked after by anybody, and the newest that there are schemas for.
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
PINNED = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*")

each_overlay = pytest.mark.parametrize("name", OVERLAYS)


@functools.cache
def with_component(name: str) -> tuple[Json, ...]:
    """Render an overlay with a component switched on."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        # The folder has to be within reach by a relative path.
        up = "../" * len(folder.parts)
        where = f"{up}{KUBERNETES.relative_to('/')}".removeprefix("../")
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kustomize.config.k8s.io/v1beta1",
                    "kind": "Kustomization",
                    "namespace": "vllm-sched",
                    "resources": [f"{where}/overlays/{COMPONENTS[name]}"],
                    "components": [f"{where}/components/{name}"],
                }
            )
        )
        return rendered(folder)


def fleet(name: str, tmp_path: Path) -> FleetConfig:
    """Read the fleet file of an overlay as the router would."""
    (configured,) = (
        each
        for each in kinds(overlay(name), "ConfigMap")
        if each["metadata"]["name"].startswith("router-fleet-")
    )
    path = tmp_path / "fleet.yaml"
    path.write_text(configured["data"]["fleet.yaml"])
    return read(path)


def router(name: str) -> tuple[Json, Json]:
    """Return the router's pod template and its container."""
    template = named(overlay(name), "Deployment", "router")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    return template, container


def workers(name: str) -> Iterator[tuple[str, Json, Json]]:
    """Go through the workers' containers."""
    for what, container, pod in containers(overlay(name)):
        if not what.startswith("Deployment/"):
            yield what, container, pod


def flag(container: Json, name: str) -> str | None:
    """Return a flag's value."""
    return next(
        (arg.split("=", 1)[1] for arg in container["args"] if arg.startswith(f"--{name}=")), None
    )


def sleeps(container: Json) -> int:
    """Return how long preStop takes."""
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return int(seconds)


def taken(each: Json, *versions: str) -> None:
    """See that the API would take an object, of Kubernetes' own or not."""
    own = custom.within(each) if each["kind"] in custom.KINDS else (each,)
    for one in own:
        for version in versions:
            kubernetes_validate.validate(one, version, strict=True)


@each_overlay
def test_the_api_would_take_them(name: str) -> None:
    for each in overlay(name):
        taken(each, *VERSIONS)


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_api_would_take_what_components_add_and_change(name: str) -> None:
    for each in with_component(name):
        taken(each, *VERSIONS)


def test_the_schemas_do_refuse() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


# Maps of names that are anybody's to choose.
FREE = {"labels", "annotations", "matchLabels"}
REFUSED = (pydantic.ValidationError, kubernetes_validate.ValidationError)


def maps(value: object, name: str = "") -> Iterator[Json]:
    """Go through all maps of fields in an object, but for those within pods."""
    if isinstance(value, list):
        for each in value:
            yield from maps(each)
    elif isinstance(value, dict) and name not in FREE and "containers" not in value:
        yield value
        for key, each in value.items():
            yield from maps(each, key)


@pytest.mark.parametrize("kind", custom.KINDS)
def test_a_field_of_a_custom_resource_that_there_is_not_is_refused(kind: str) -> None:
    name = {"ScaledObject": "keda-short-long", "LeaderWorkerSet": ""}.get(kind, "pod-monitor")
    objects = with_component(name) if name else overlay("multi-node")
    each = copy.deepcopy(kinds(objects, kind)[0])
    taken(each, VERSIONS[-1])
    for one in list(maps(each)):
        one["surplus"] = 1
        with pytest.raises(REFUSED, match="surplus"):
            taken(each, VERSIONS[-1])
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
def test_a_value_that_a_custom_resource_may_not_have_is_refused(
    kind: str, given: str, wrong: str
) -> None:
    name = {"ScaledObject": "keda-short-long", "LeaderWorkerSet": ""}.get(kind, "pod-monitor")
    objects = with_component(name) if name else overlay("multi-node")
    text = yaml.safe_dump(kinds(objects, kind)[0])
    assert given in text
    with pytest.raises(REFUSED):
        taken(yaml.safe_load(text.replace(given, wrong, 1)), VERSIONS[-1])


@each_overlay
def test_all_is_in_one_namespace_and_nothing_is_the_clusters(name: str) -> None:
    for each in overlay(name):
        if each["kind"] == "Namespace":
            assert each["metadata"]["name"] == "vllm-sched"
        else:
            assert each["metadata"]["namespace"] == "vllm-sched", each["metadata"]["name"]
        assert not each["kind"].startswith("Cluster")


@each_overlay
def test_selectors_find_their_pods_and_ports_are_there(name: str) -> None:
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
    for each in kinds(objects, "LeaderWorkerSet"):  # which makes a Service of its name
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
    for _, template in templates(objects):
        for spread in template["spec"].get("topologySpreadConstraints", ()):
            assert matches(spread["labelSelector"]["matchLabels"], template)


@each_overlay
def test_every_pool_has_a_budget_for_disruptions(name: str) -> None:
    budgets = kinds(overlay(name), "PodDisruptionBudget")
    for what, template in templates(overlay(name)):
        own = [b for b in budgets if matches(b["spec"]["selector"]["matchLabels"], template)]
        assert len(own) == 1, f"{what}: eviction fails with {len(own)} budgets for a pod"


@each_overlay
def test_discovery_looks_for_services_that_are_there(name: str, tmp_path: Path) -> None:
    discovery = fleet(name, tmp_path).discovery
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
def test_the_fleet_file_fits_the_workers(name: str, tmp_path: Path) -> None:
    config = fleet(name, tmp_path)
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
def test_the_router_listens_where_everybody_thinks(name: str, tmp_path: Path) -> None:
    template, container = router(name)
    config = fleet(name, tmp_path)
    assert config.router.host == "0.0.0.0"  # noqa: S104 - compared
    assert ports(template) == {"http": config.router.port}
    # Whoever reaches it rules the fleet: nobody but who may forward ports.
    assert config.router.admin.host == "127.0.0.1"
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "fleet")
    (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "fleet")
    assert container["args"] == ["router", f"{mount['mountPath']}/fleet.yaml"]
    assert named(overlay(name), "ConfigMap", volume["configMap"]["name"])["data"].keys() == {
        "fleet.yaml"
    }


@each_overlay
def test_whoever_asks_shows_a_key_of_a_secret(name: str, tmp_path: Path) -> None:
    template, container = router(name)
    config = fleet(name, tmp_path)
    assert not config.router.allow_anonymous
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "keys")
    (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "keys")
    # A pod waits for it: none starts that would let everybody in, or nobody.
    assert volume["secret"].keys() == {"secretName", "defaultMode"}
    assert mount["readOnly"]
    said = (KUBERNETES / "components" / "keys" / "kustomization.yaml").read_text()
    assert f"create secret generic {volume['secret']['secretName']} " in said
    for tenant in config.tenants:
        assert str(tenant.keys_file) == f"{mount['mountPath']}/{tenant.name}"
        assert f"--from-literal={tenant.name}=" in said
    # Whom it runs as may read them.
    assert template["spec"]["securityContext"]["fsGroup"]
    assert volume["secret"]["defaultMode"] & 0o040


@each_overlay
def test_probes_ask_for_what_is_served(name: str) -> None:
    for what, template in templates(overlay(name)):
        (container,) = template["spec"]["containers"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if what.endswith("/workerTemplate"):
                assert kind not in container, "it serves no HTTP"
                continue
            asked = container[kind]["httpGet"]
            assert asked["port"] in ports(template)
            assert asked["path"] in (
                endpoints.PATHS if component(template) == "router" else {"/health"}
            )
    # Alive without workers, ready only with some: or a fleet that loads would restart its routers.
    _, container = router(name)
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@each_overlay
def test_nobody_is_killed_while_it_drains(name: str, tmp_path: Path) -> None:
    template, container = router(name)
    takes = sleeps(container) + fleet(name, tmp_path).router.drain_s
    assert takes < template["spec"]["terminationGracePeriodSeconds"]
    # A router that drains takes no connections, Prometheus' neither: nobody is to get up for that.
    minutes = int(ALERTS["RouterDown"]["for"].removesuffix("m"))
    assert template["spec"]["terminationGracePeriodSeconds"] <= minutes * 60
    for what, container, pod in workers(name):
        if not what.endswith("/workerTemplate"):
            takes = sleeps(container) + int(flag(container, "shutdown-timeout") or 0)
            assert takes > 60, what
            assert takes < pod["terminationGracePeriodSeconds"], what


@each_overlay
def test_every_container_states_its_size_and_its_image(name: str) -> None:
    for what, container, _ in containers(overlay(name)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= requests.keys(), what
        assert "memory" in limits, what
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu"), what
        assert PINNED.fullmatch(container["image"]), container["image"]


@each_overlay
def test_pods_may_do_no_more_than_they_must(name: str) -> None:
    for what, container, pod in containers(overlay(name)):
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
def test_the_router_may_list_and_watch_endpointslices_and_nothing_else(name: str) -> None:
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


def allowed(policies: list[Json], way: str, at: Json, peer: Json, port: int) -> bool:
    """Whether the policies let two pods speak, as seen by the one `at`."""
    of_it = [p for p in policies if matches(p["spec"]["podSelector"]["matchLabels"], at)]
    side, other = ("ingress", "from") if way == "in" else ("egress", "to")
    server = at if way == "in" else peer
    for policy in of_it:
        for rule in policy["spec"].get(side, ()):
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


@each_overlay
def test_the_network_lets_through_what_must_and_no_more(name: str) -> None:
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


@each_overlay
def test_workers_are_started_with_flags_that_we_take(name: str) -> None:
    for _, container, _ in workers(name):
        serve, model, *given = container["args"]
        assert serve == "serve"
        policies = [each.split("=", 1)[1] for each in given if each.startswith("--policy=")] or None
        flags = [each for each in given if not each.startswith("--policy=")]
        assert "--scheduler-cls" in vllm_command(model, policies, [], flags)


def families() -> dict[str, Family]:
    """Return all families of the router's metrics that are about workers."""
    return {each.name: each for each in vars(scrape).values() if isinstance(each, Family)}


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name.startswith("keda")])
def test_scaling_asks_for_metrics_that_there_are(name: str) -> None:
    objects = with_component(name)
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
            assert labels.keys() <= set(families()[metric].labels)
            role = Role(labels["role"])
            assert spec["scaleTargetRef"]["name"] == f"worker-{role.value}"
            assert float(trigger["metadata"]["threshold"]) > 0


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name.startswith("keda")])
def test_a_pool_that_is_full_gets_more_workers(name: str, tmp_path: Path) -> None:
    # What waits in the router is charged to nobody: where a pool takes only so many, a threshold at
    # or above that would never be passed.
    thresholds: dict[str, float] = {}
    for each in kinds(with_component(name), "ScaledObject"):
        for trigger in each["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            if "proxy_worker_inflight_requests" in query:
                (role,) = re.findall(r'role="(\w+)"', query)
                thresholds[role] = float(trigger["metadata"]["threshold"])
    discovery = fleet(COMPONENTS[name], tmp_path).discovery
    assert discovery is not None
    for pool in discovery.pools:
        if pool.max_requests is not None:
            assert thresholds[pool.role] < pool.max_requests, pool.name


def test_a_decode_pool_without_a_seat_gets_more_workers(tmp_path: Path) -> None:
    name = "keda-prefill-decode"
    asked = [
        trigger["metadata"]
        for each in kinds(with_component(name), "ScaledObject")
        for trigger in each["spec"]["triggers"]
        if "proxy_worker_seats_taken_ratio" in trigger["metadata"]["query"]
    ]
    [told] = asked
    pool, routers = 3, 2  # each router sees who is on a worker
    series = 'proxy_worker_seats_taken_ratio{{namespace="vllm-sched",role="decode",{}}}'
    each_full = [
        {"series": series.format(f'pod="r{router}",worker="d{worker}"'), "values": "1x2"}
        for router in range(routers)
        for worker in range(pool)
    ]
    taken = {
        "expr": told["query"],
        "eval_time": "1m",
        "exp_samples": [{"labels": "{}", "value": pool}],
    }
    case = {"interval": "1m", "input_series": each_full, "promql_expr_test": [taken]}
    file = tmp_path / "cases.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    # KEDA has the autoscaler want so many that each has the threshold; a tenth more is let be.
    assert pool / float(told["threshold"]) > 1.1 * pool


def test_the_operator_has_the_rules_that_other_prometheuses_have() -> None:
    assert rules.differing() == []
    (rule,) = kinds(with_component("pod-monitor"), "PrometheusRule")
    assert rule["metadata"]["namespace"] == "vllm-sched"
    assert rule["spec"]["groups"] == groups("rules.yml") + groups("alerts.yml")


def test_rules_that_are_out_of_date_are_told() -> None:
    (line,) = rules.differing(PROMETHEUS / "rules.yml")
    assert "deploy/prometheus/rules.yml is out of date; run python -m grafana.build" in line


def test_monitors_find_pods_and_their_ports() -> None:
    objects = with_component("pod-monitor")
    seen = []
    for each in kinds(objects, "PodMonitor"):
        chosen = found_by(each["spec"]["selector"]["matchLabels"], objects)
        assert chosen
        for template in chosen:
            seen.append(component(template))
            for endpoint in each["spec"]["podMetricsEndpoints"]:
                assert endpoint["port"] in ports(template)
                assert endpoint["path"] in endpoints.PATHS
    assert sorted(seen) == ["router", "worker", "worker"]


def test_every_overlay_and_component_is_looked_at() -> None:
    assert OVERLAYS == ["multi-node", "prefill-decode", "short-long"]
    found = {path.name for path in (KUBERNETES / "components").iterdir()}
    assert found == {*COMPONENTS, "keys"}  # which is in every overlay
