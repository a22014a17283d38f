"""The images and the compose files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendered import ROOT
from vllm_sched.cli.fleet.fleet import read

COMPOSE = ROOT / "deploy" / "compose"
DOCKER = ROOT / "deploy" / "docker"
Json = dict[str, Any]
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")
# Folders that are mounted whole.
MOUNTED = ("deploy/prometheus", "grafana/provisioning", "grafana/dashboards")

monitoring: Json = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())
document: Json = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
services: dict[str, Json] = document["services"]
fleet = read(COMPOSE / "fleet.yaml")


def has_compose() -> bool:
    """Return whether `docker compose` is installed; it validates files without a daemon."""
    if not shutil.which("docker"):
        return False
    return not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def workers() -> dict[str, Json]:
    return {
        name: each for name, each in services.items() if each.get("command", [""])[0] == "serve"
    }


def dockerfile(name: str) -> list[tuple[str, str]]:
    text = (DOCKER / name).read_text()
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [
        (line.split(maxsplit=1)[0], line.split(maxsplit=1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def check_service(service: Json, image: re.Pattern[str], volumes: Json) -> None:
    """Check that a service is pinned, checked, restarted and confined, and that mounts exist."""
    assert image.fullmatch(service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert service["networks"] == ["fleet"]
    assert service["cap_drop"] == ["ALL"]
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        if not source.startswith("."):
            assert source in volumes
            continue
        path = (COMPOSE / source).resolve()
        known = path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) in MOUNTED
        assert path.exists() or known, volume
        assert volume.endswith(":ro"), volume


@pytest.mark.parametrize("name", services)
def test_service_is_pinned_checked_and_restarted_and_its_mounts_exist(name: str) -> None:
    check_service(services[name], PINNED, document["volumes"])


def test_published_ports_are_unique_and_local() -> None:
    published = [
        port.replace("${API_ADDRESS:-127.0.0.1}", "127.0.0.1").split(":")
        for each in services.values()
        for port in each.get("ports", ())
    ]
    assert len({port[1] for port in published}) == len(published)
    assert {port[0] for port in published} == {"127.0.0.1"}
    assert fleet.router.allow_anonymous
    inside = {int(port.rpartition(":")[2]) for port in services["router"]["ports"]}
    assert inside == {fleet.router.port, fleet.router.admin.port}
    assert fleet.router.admin.key_env in services["router"]["environment"]


@pytest.mark.parametrize("text", ["README.md", "deploy/README.md", "deploy/compose/compose.yaml"])
def test_documented_command_creates_the_env_file(text: str, tmp_path: Path) -> None:
    wanted = set(re.findall(r"\$\{(\w+):\?", (COMPOSE / "compose.yaml").read_text()))
    lines = (ROOT / text).read_text().replace("\n#", "\n")
    (made,) = re.findall(r"^ *(\(umask .*?\.env\))\n", lines, re.DOTALL | re.MULTILINE)
    kept = tmp_path / "deploy" / "compose" / ".env"
    kept.parent.mkdir(parents=True)
    command = ["bash", "-ec", f"openssl() {{ printf '%s\\n' key; }}; {made}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert sorted(kept.read_text().split()) == sorted(f"{name}=key" for name in wanted)
    assert kept.stat().st_mode & 0o077 == 0
    assert str(kept.relative_to(tmp_path)) in (ROOT / ".gitignore").read_text().split()


def test_fleet_file_matches_the_services_and_each_worker_has_its_own_gpu() -> None:
    assert {worker.url for worker in fleet.workers} == {f"http://{name}:8000" for name in workers()}
    (base,) = [v for kind, v in dockerfile("worker.Dockerfile") if kind == "FROM" and "vllm/" in v]
    version = base.partition(":v")[2]
    taken = []
    for service in workers().values():
        assert service["image"].endswith(f"-vllm{version}")
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        taken += device["device_ids"]
    assert len(set(taken)) == len(taken) == len(fleet.workers)
    for worker in fleet.workers:
        model, *flags = workers()[worker.name]["command"][1:]
        assert model == fleet.model_of(worker)
        (length,) = [int(f.partition("=")[2]) for f in flags if f.startswith("--max-model-len=")]
        assert worker.role == ("short" if length < 100_000 else "long")
        if worker.role == "short":
            assert 2 * fleet.routing.short_limit <= length


def test_stop_grace_period_exceeds_the_drain_time() -> None:
    assert seconds(services["router"]["stop_grace_period"]) > fleet.router.drain_s
    for worker in workers().values():
        (timeout,) = [
            int(flag.partition("=")[2])
            for flag in worker["command"]
            if flag.startswith("--shutdown-timeout=")
        ]
        assert seconds(worker["stop_grace_period"]) > timeout


@pytest.mark.skipif(not has_compose(), reason="docker has no compose plugin here")
@pytest.mark.parametrize("added", [[], ["replicas.yaml"]])
def test_docker_compose_accepts_the_files(added: list[str]) -> None:
    files = [f"--file={COMPOSE / name}" for name in ("compose.yaml", *added)]
    command = ["docker", "compose", *files, "config", "--quiet"]
    environment = {**os.environ, "GRAFANA_PASSWORD": "x", "ADMIN_KEY": "x"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_prometheus_targets_are_all_services() -> None:
    targets = [
        target
        for path in sorted((COMPOSE / "targets").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text())
        for target in group["targets"]
    ]
    assert sorted(targets) == sorted(["router:8000", *(f"{name}:8000" for name in workers())])


def test_monitoring_file_matches_the_compose_file() -> None:
    assert set(monitoring["services"]) == {"prometheus", "grafana"}
    for name, alone in monitoring["services"].items():
        whole = services[name]
        for key in ("image", "restart", "cap_drop", "security_opt", "healthcheck"):
            assert alone[key] == whole[key], (name, key)
        mounts = [v.replace("./targets-here:", "./targets:") for v in alone["volumes"]]
        assert mounts == whole["volumes"]
        assert alone["network_mode"] == "host"
        assert "ports" not in alone
    prometheus, grafana = monitoring["services"]["prometheus"], monitoring["services"]["grafana"]
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["command"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert grafana["extra_hosts"] == ["prometheus:127.0.0.1"]


def test_monitoring_targets_are_the_demos_ports() -> None:
    demo = read(ROOT / "deploy" / "fleets" / "cpu-demo.yaml")
    targets = {
        group["labels"]["job"]: group["targets"]
        for path in (COMPOSE / "targets-here").glob("*.yaml")
        for group in yaml.safe_load(path.read_text())
    }
    workers = [worker.url.removeprefix("http://") for worker in demo.workers if worker.url]
    assert targets == {"router": [f"127.0.0.1:{demo.router.port}"], "vllm": workers}
    globs = [
        each.removeprefix("/targets/")
        for job in yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())[
            "scrape_configs"
        ]
        for config in job["file_sd_configs"]
        for each in config["files"]
    ]
    found = {path.name for glob in globs for path in (COMPOSE / "targets-here").glob(glob)}
    assert found == {path.name for path in (COMPOSE / "targets-here").iterdir()}


@pytest.mark.parametrize("name", ["router.Dockerfile", "worker.Dockerfile"])
def test_image_has_pinned_bases_and_an_unprivileged_user(name: str) -> None:
    steps = dockerfile(name)
    stages = {value.split(" AS ")[1] for kind, value in steps if kind == "FROM" and " AS " in value}
    for kind, value in steps:
        if kind == "FROM":
            assert PINNED.fullmatch(value.split(" AS ")[0])
        if kind == "COPY" and value.startswith("--from="):
            assert value.split()[0].removeprefix("--from=") in stages
        elif kind == "COPY":
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
    user = [value for kind, value in steps if kind == "USER"][-1]
    assert int(user.split(":")[0]) >= 1000
    assert ("ENTRYPOINT", '["vllm-sched"]') in steps


def test_router_image_contains_no_vllm() -> None:
    assert not [value for kind, value in dockerfile("router.Dockerfile") if "vllm/" in value]
    [installed] = [v for _, v in dockerfile("router.Dockerfile") if "/opt/venv/bin/pip" in v]
    # Fleet files with these blocks are refused where their extra is not installed.
    pip = "/opt/venv/bin/pip install --no-cache-dir --no-compile '.[otel,redis,postgres]'"
    assert installed == f'VLLM_SCHED_COMPILED="$COMPILED" {pip}'


@pytest.mark.parametrize("compiled", ["1", "0"])
def test_router_image_is_compiled_in_the_build_stage(tmp_path: Path, compiled: str) -> None:
    """The build steps run with fake programs that record their calls."""
    log, opt = tmp_path / "log", tmp_path / "opt"
    for program in ("bin/python", "bin/apt-get", "opt/venv/bin/pip", "opt/venv/bin/vllm-sched"):
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $* $VLLM_SCHED_COMPILED" >> {log}\n')
        path.chmod(0o755)
    steps = dockerfile("router.Dockerfile")
    assert ("ARG", "COMPILED=1") in steps
    last = max(at for at, (kind, _) in enumerate(steps) if kind == "FROM")
    assert [v for kind, v in steps[last:] if kind == "COPY"] == ["--from=build /opt/venv /opt/venv"]
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "COMPILED": compiled}
    for kind, value in steps[:last]:
        if kind == "RUN":
            subprocess.run(["sh", "-c", value.replace("/opt/", f"{opt}/")], env=env, check=True)
    calls = log.read_text().splitlines()
    assert any(line.startswith("pip install") and line.endswith(f" {compiled}") for line in calls)
    if compiled == "1":
        assert calls[-1].startswith("vllm-sched compile")  # fails if pip did not compile
        assert any(line.startswith("apt-get install") and "gcc" in line for line in calls)
    else:
        assert len(calls) == 2  # the environment and its installation


def test_dockerignore_allows_all_copied_paths() -> None:
    assert (ROOT / "pyproject.toml").read_text().count("vllm>=0.31,<0.34") == 1
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    let_through = {line[1:] for line in lines if line.startswith("!")}
    for path in DOCKER.glob("*.Dockerfile"):
        for kind, value in dockerfile(path.name):
            if kind == "COPY" and "--from" not in value:
                assert set(value.split()[:-1]) <= let_through


def test_compose_dockerfiles_and_manifests_use_the_same_images() -> None:
    for service in services.values():
        if build := service.get("build"):
            assert (COMPOSE / build["context"]).resolve() == ROOT
            text = (ROOT / build["dockerfile"]).read_text()
            assert f"--tag {service['image']} ." in text
            name, _, tag = service["image"].partition(":")
            kind = name.removeprefix("vllm-sched/")
            base = ROOT / "deploy" / "kubernetes" / "base" / kind / "kustomization.yaml"
            (image,) = yaml.safe_load(base.read_text())["images"]
            assert (image["name"], image["newTag"]) == (name, tag)
