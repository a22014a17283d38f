"""The components with which replicas share their state, and read the workers' journals."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import redis
import yaml

from proxy.config import parse
from proxy.discovery.endpoints import JOURNAL_PORT
from tests.deploy.rendered import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    Json,
    allowed,
    component,
    found_by,
    kinds,
    named,
    ports,
    templates,
    with_components,
)
from tests.programs import fetched
from vllm_sched.cli.serve import vllm_command

SERVERS = {"redis": "Deployment", "postgres": "StatefulSet"}
LINE = re.compile(r"^  # (?=(?:shared|batches|journal): )", re.MULTILINE)

each_server = pytest.mark.parametrize("name", SERVERS)
objects = with_components(*SERVERS)


def pod(name: str) -> Json:
    """Return a server's pod template, or the router's."""
    template: Json = named(objects, SERVERS.get(name, "Deployment"), name)["spec"]["template"]
    return template


@each_server
def test_server_has_minimal_privileges_and_probes(name: str) -> None:
    spec = pod(name)["spec"]
    [container] = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert container["resources"]["limits"].keys() == {"memory"}
    assert re.fullmatch(r"[\w/]+:\d+\.\d+[\w.-]*", container["image"])
    assert named(objects, SERVERS[name], name)["spec"]["replicas"] == 1


def test_two_redis_servers_never_run_at_once() -> None:
    assert named(objects, "Deployment", "redis")["spec"]["strategy"] == {"type": "Recreate"}


@each_server
def test_only_routers_reach_the_server(name: str) -> None:
    policies = kinds(objects, "NetworkPolicy")
    [port] = ports(pod(name)).values()
    for _, peer in templates(objects):
        is_router = component(peer) == "router"
        assert allowed(policies, "in", pod(name), peer, port) is is_router
        assert not allowed(policies, "out", pod(name), peer, 8000)
        if peer != pod(name):
            assert allowed(policies, "out", peer, pod(name), port) is is_router
    stranger = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": []}}
    assert not allowed(policies, "in", pod(name), stranger, port)


@each_server
def test_router_and_server_read_the_documented_secret(name: str) -> None:
    text = (KUBERNETES / "components" / name / "kustomization.yaml").read_text()
    assert f"create secret generic {name} --from-literal=password=" in text
    for template in (pod(name), pod("router")):
        secrets = [v["secret"] for v in template["spec"]["volumes"] if "secret" in v]
        assert {"secretName": name, "defaultMode": 0o440} in secrets
        assert template["spec"]["securityContext"]["fsGroup"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_lines_of_the_fleet_file_name_the_servers(overlay: str) -> None:
    text = (KUBERNETES / "overlays" / overlay / "fleet.yaml").read_text()
    router = yaml.safe_load(LINE.sub("  ", text))["router"]
    shared, batches = router["shared"], router["batches"]
    [container] = pod("router")["spec"]["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert shared == {
        "url": "redis://redis:6379",
        "password_file": f"{mounts['redis']}/password",
        "replicas": named(objects, "HorizontalPodAutoscaler", "router")["spec"]["minReplicas"],
    }
    assert batches == {
        "database": "postgresql://router@postgres/router",
        "database_password_file": f"{mounts['postgres']}/password",
    }
    for name, port in (("redis", 6379), ("postgres", 5432)):
        service = named(objects, "Service", name)["spec"]
        assert [each["port"] for each in service["ports"]] == [port]
        assert found_by(service["selector"], objects) == [pod(name)]
        assert list(ports(pod(name)).items()) == [(service["ports"][0]["targetPort"], port)]
    env = {e["name"]: e["value"] for e in pod("postgres")["spec"]["containers"][0]["env"]}
    assert (env["POSTGRES_USER"], env["POSTGRES_DB"]) == ("router", "router")
    router = parse(LINE.sub("  ", text), overlay).router
    assert router.shared
    assert router.batches.database


def test_workers_publish_signed_journals_to_routers_only() -> None:
    with_journal = with_components("journal")
    text = (KUBERNETES / "overlays" / COMPONENTS["journal"] / "fleet.yaml").read_text()
    key_file = yaml.safe_load(LINE.sub("  ", text))["router"]["journal"]["key_file"]
    policies = kinds(with_journal, "NetworkPolicy")
    router = named(with_journal, "Deployment", "router")["spec"]["template"]
    for template in (template for _, template in templates(with_journal)):
        [container] = template["spec"]["containers"]
        [volume] = (v for v in template["spec"]["volumes"] if v["name"] == "journal")
        [mount] = (m for m in container["volumeMounts"] if m["name"] == "journal")
        assert volume["secret"] == {"secretName": "journal", "defaultMode": 0o440}
        assert f"{mount['mountPath']}/key" == key_file
        if template == router:
            continue
        port = ports(template)["journal"]
        sets = [each[6:] for each in container["args"] if each.startswith("--set=")]
        assert sets == [f"journal.endpoint=tcp://0.0.0.0:{port}", f"journal.key_file={key_file}"]
        command = vllm_command(container["args"][1], None, sets, [])
        assert f"tcp://0.0.0.0:{port}" in command[-1]
        assert allowed(policies, "in", template, router, port)
        assert allowed(policies, "out", router, template, port)
        assert not allowed(policies, "in", template, template, port)
    for name in ("worker-short", "worker-long"):
        service = named(with_journal, "Service", name)["spec"]
        assert [each["name"] for each in service["ports"]] == ["http", JOURNAL_PORT]
        assert service["ports"][1]["targetPort"] == "journal"
    shown = (KUBERNETES / "components" / "journal" / "kustomization.yaml").read_text()
    assert "create secret generic journal --from-literal=key=" in shown


def connected(sock: Path, password: str | None) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(sock), password=password, decode_responses=True)


def test_redis_server_starts_with_the_password_of_the_file(tmp_path: Path) -> None:
    """The container's command runs with a real server."""
    [container] = pod("redis")["spec"]["containers"]
    shell, flags, script = container["command"]
    (tmp_path / "password").write_text("s3cret")
    (tmp_path / "valkey-server").symlink_to(fetched("redis"))
    sock = tmp_path / "socket"
    script = script.replace("/etc/redis", str(tmp_path))
    script = script.replace("save ", f"port 0\nunixsocket {sock}\nsave ")
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = subprocess.Popen([shell, flags, script], env={"PATH": path}, cwd=tmp_path)
    try:
        give_up = time.monotonic() + 10
        while not sock.exists() and time.monotonic() < give_up:
            time.sleep(0.02)
        with connected(sock, None) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with connected(sock, "s3cret") as router:
            assert router.config_get("save", "maxmemory") == {"save": "", "maxmemory": "201326592"}
        assert b"s3cret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.terminate()  # the server, which has replaced the shell
        assert process.wait(10) == 0
