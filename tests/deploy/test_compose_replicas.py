"""deploy/compose/replicas.yaml: two routers behind HAProxy, added to compose.yaml."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig, parse
from tests.deploy import test_compose
from tests.deploy.rendered import ROOT, named, with_components
from tests.deploy.test_compose import COMPOSE, check_service, seconds
from tests.haproxy import CONFIG

Json = dict[str, Any]


class Loader(yaml.SafeLoader):
    """Reads lists that replace those of the other file."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))

TEXT = (COMPOSE / "replicas.yaml").read_text()
document: Json = yaml.load(TEXT, Loader)  # noqa: S506 - a SafeLoader
services: dict[str, Json] = document["services"]
given: Json = yaml.safe_load((COMPOSE / "replicas" / "fleet.yaml").read_text())
ROUTERS = ["router", "router-2"]
ADDED = sorted(set(services) - set(test_compose.services) - {"router-2"})


def fleet() -> FleetConfig:
    return parse((COMPOSE / "replicas" / "fleet.yaml").read_text(), "replicas/fleet.yaml")


def haproxy(setting: str) -> str:
    """Return the rest of the only line of HAProxy's configuration that begins with `setting`."""
    [value] = re.findall(rf"^ +{setting} (.*)$", CONFIG.read_text(), re.MULTILINE)
    return str(value)


@pytest.mark.parametrize("name", ADDED)
def test_added_services_are_restricted_pinned_and_checked(name: str) -> None:
    service = services[name]
    assert ADDED == ["haproxy", "postgres", "redis"]
    check_service(service, re.compile(r"[\w/]+:\d+\.\d+[\w.-]*"), document["volumes"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True


def test_second_router_differs_in_its_admin_port_only() -> None:
    one, two = (dict(services[name]) for name in ROUTERS)
    assert two.pop("extends") == {"file": "compose.yaml", "service": "router"}
    assert one.pop("ports") == [f"127.0.0.1:8001:{fleet().router.admin.port}"]
    assert two.pop("ports") == [f"127.0.0.1:8002:{fleet().router.admin.port}"]
    assert one == two


def test_haproxy_has_the_api_port_and_all_routers() -> None:
    [api, _] = test_compose.services["router"]["ports"]
    assert services["haproxy"]["ports"] == [api]
    servers = re.findall(r"^ +server ([\w-]+) ([\w-]+):(\d+)$", CONFIG.read_text(), re.MULTILINE)
    assert servers == [(name, name, str(fleet().router.port)) for name in ROUTERS]


def test_haproxys_time_limits_are_longer_than_the_routers() -> None:
    router = fleet().router
    longest = router.queue.max_wait_s + 2 * router.timeouts.first_byte_s
    for side in ("client", "server"):
        assert seconds(haproxy(f"timeout {side}")) > longest
    assert seconds(haproxy("timeout http-keep-alive")) < router.timeouts.client_idle_s
    stop = seconds(haproxy("hard-stop-after"))
    assert router.drain_s < stop < seconds(services["haproxy"]["stop_grace_period"])
    every, fall = re.findall(r"inter (\d+)s fall (\d+)", CONFIG.read_text())[0]
    assert int(every) * int(fall) < router.drain_notice_s
    assert services["haproxy"]["depends_on"] == ROUTERS


def test_fleet_file_is_that_of_one_router_and_the_servers() -> None:
    alone = yaml.safe_load((COMPOSE / "fleet.yaml").read_text())
    router = dict(given["router"])
    assert router.pop("shared") == {
        "url": "redis://redis:6379",
        "password_file": "/run/secrets/redis",
        "replicas": len(ROUTERS),
    }
    assert router.pop("batches") == {
        "database": "postgresql://router@postgres/router",
        "database_password_file": "/run/secrets/postgres",
    }
    del router["drain_notice_s"]
    assert given | {"router": router} == alone
    environment = services["postgres"]["environment"]
    assert (environment["POSTGRES_USER"], environment["POSTGRES_DB"]) == ("router", "router")
    for name in ROUTERS:
        assert services[name]["secrets"] == list(document["secrets"])
        assert services[name]["depends_on"].keys() == document["secrets"].keys()


def test_redis_starts_as_in_kubernetes() -> None:
    pod = named(with_components("redis"), "Deployment", "redis")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    *shell, script = services["redis"]["entrypoint"]
    script = script.replace("$$", "$").replace("/run/secrets/redis", "/etc/redis/password")
    assert [*shell, script] == container["command"]
    assert services["redis"]["image"] == container["image"]
    database = named(with_components("postgres"), "StatefulSet", "postgres")["spec"]["template"]
    assert services["postgres"]["image"] == database["spec"]["containers"][0]["image"]


def test_documented_commands_create_the_secrets(tmp_path: Path) -> None:
    made, loop = re.findall(r"^#     (mkdir .*|for .*)$", TEXT, re.MULTILINE)
    (tmp_path / "deploy" / "compose").mkdir(parents=True)
    command = f"openssl() {{ echo key; }}; {made}\n{loop}"
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    for secret in document["secrets"].values():
        path = tmp_path / "deploy" / "compose" / secret["file"]
        assert path.read_text() == "key\n"
        assert path.parent.stat().st_mode & 0o077 == 0
        # The containers' users read it.
        assert path.stat().st_mode & 0o044 == 0o044
    assert "deploy/compose/secrets" in (ROOT / ".gitignore").read_text().split()


def test_prometheus_targets_are_all_routers_and_workers() -> None:
    [mount] = services["prometheus"]["volumes"]
    assert mount.endswith(":/targets:ro")
    found = {
        path.name: yaml.safe_load(path.read_text())
        for path in (COMPOSE / mount.partition(":")[0]).iterdir()
    }
    alone = {
        path.name: yaml.safe_load(path.read_text()) for path in (COMPOSE / "targets").iterdir()
    }
    assert found.pop("router.yaml") == [
        {"targets": [f"{name}:8000" for name in ROUTERS], "labels": {"job": "router"}}
    ]
    del alone["router.yaml"]
    assert found == alone
