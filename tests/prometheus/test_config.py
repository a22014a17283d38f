"""Who is scraped: from files, and in Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.deploy.rendered import component, found_by, kinds, overlay, ports, templates
from tests.prometheus.tools import PROMETHEUS, ROOT, promtool

COMPOSE = ROOT / "deploy" / "compose"
Json = dict[str, Any]


def read(name: str) -> Json:
    """Read a configuration."""
    return dict(yaml.safe_load((PROMETHEUS / name).read_text()))


def check(tmp_path: Path, config: Json) -> None:
    """Have a configuration judged, beside its rules."""
    for name in config["rule_files"]:
        (tmp_path / name).write_text((PROMETHEUS / name).read_text())
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


def test_promtool_takes_it_with_the_files_that_compose_mounts(tmp_path: Path) -> None:
    config = read("prometheus.yml")
    for job in config["scrape_configs"]:
        for each in job["file_sd_configs"]:
            each["files"] = [f.replace("/targets", str(COMPOSE / "targets")) for f in each["files"]]
            assert [list(Path(f).parent.glob(Path(f).name)) for f in each["files"]] != [[]]
    check(tmp_path, config)


def test_each_file_of_compose_is_read_by_the_job_that_it_names() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yml")["scrape_configs"]}
    for path in (COMPOSE / "targets").glob("*.yaml"):
        for group in yaml.safe_load(path.read_text()):
            (config,) = jobs[group["labels"]["job"]]["file_sd_configs"]
            (pattern,) = config["files"]
            assert path.match(Path(pattern).name)


def test_promtool_takes_the_one_for_kubernetes_but_for_what_debian_left_out(tmp_path: Path) -> None:
    config = read("prometheus-kubernetes.yml")
    for job in config["scrape_configs"]:
        # Debian builds it without the Kubernetes client.
        (pods,) = job.pop("kubernetes_sd_configs")
        assert pods == {"role": "pod", "namespaces": {"names": ["vllm-sched"]}}
        job["static_configs"] = [{"targets": ["pod:8000"]}]
    check(tmp_path, config)


def test_in_kubernetes_each_job_keeps_the_pods_that_there_are() -> None:
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
    there = {(component(t), port) for _, t in templates(objects) for port in ports(t)}
    assert set(kept.values()) == there
    assert found_by({"app.kubernetes.io/component": kept["router"][0]}, objects)


def test_both_scrape_the_same_jobs_equally_often() -> None:
    files, pods = read("prometheus.yml"), read("prometheus-kubernetes.yml")
    assert files["global"] == pods["global"]
    assert files["rule_files"] == pods["rule_files"]
    assert [j["job_name"] for j in files["scrape_configs"]] == [
        j["job_name"] for j in pods["scrape_configs"]
    ]
