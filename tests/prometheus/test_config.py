"""Scrape configurations for files and for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.deploy.rendered import component, found_by, kinds, overlay, ports, templates
from tests.prometheus.tools import PROMETHEUS, ROOT, promtool

COMPOSE = ROOT / "deploy" / "compose"
Json = dict[str, Any]


def read(name: str) -> Json:
    return dict(yaml.safe_load((PROMETHEUS / name).read_text()))


def check(tmp_path: Path, config: Json) -> None:
    for name in config["rule_files"]:
        (tmp_path / name).write_text((PROMETHEUS / name).read_text())
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


def test_promtool_accepts_the_config_with_files_of_compose(tmp_path: Path) -> None:
    config = read("prometheus.yml")
    for job in config["scrape_configs"]:
        for sd in job["file_sd_configs"]:
            sd["files"] = [f.replace("/targets", str(COMPOSE / "targets")) for f in sd["files"]]
            assert [list(Path(f).parent.glob(Path(f).name)) for f in sd["files"]] != [[]]
    check(tmp_path, config)


def test_target_files_of_compose_are_read_by_their_jobs() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yml")["scrape_configs"]}
    for path in (COMPOSE / "targets").glob("*.yaml"):
        for group in yaml.safe_load(path.read_text()):
            (config,) = jobs[group["labels"]["job"]]["file_sd_configs"]
            (pattern,) = config["files"]
            assert path.match(Path(pattern).name)


def test_promtool_accepts_the_kubernetes_config(tmp_path: Path) -> None:
    config = read("prometheus-kubernetes.yml")
    for job in config["scrape_configs"]:
        # Debian builds promtool without the Kubernetes client.
        (pods,) = job.pop("kubernetes_sd_configs")
        assert pods == {"role": "pod", "namespaces": {"names": ["vllm-sched"]}}
        job["static_configs"] = [{"targets": ["pod:8000"]}]
    check(tmp_path, config)


def test_kubernetes_jobs_keep_the_deployed_pods() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus-kubernetes.yml")["scrape_configs"]}
    kept = {}
    for name, job in jobs.items():
        (keep,) = (rule for rule in job["relabel_configs"] if rule.get("action") == "keep")
        assert keep["source_labels"] == [
            "__meta_kubernetes_pod_label_app_kubernetes_io_component",
            "__meta_kubernetes_pod_container_port_name",
        ]
        kept[name] = tuple(keep["regex"].split(";"))
    objects = overlay("short-long")
    assert kinds(objects, "Deployment")
    deployed = {(component(t), port) for _, t in templates(objects) for port in ports(t)}
    assert set(kept.values()) == deployed
    assert found_by({"app.kubernetes.io/component": kept["router"][0]}, objects)


def test_both_configs_have_the_same_jobs_and_intervals() -> None:
    files, pods = read("prometheus.yml"), read("prometheus-kubernetes.yml")
    assert files["global"] == pods["global"]
    assert files["rule_files"] == pods["rule_files"]
    assert [j["job_name"] for j in files["scrape_configs"]] == [
        j["job_name"] for j in pods["scrape_configs"]
    ]
