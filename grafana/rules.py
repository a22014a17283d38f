"""The recording rules and alerts in one object for the Prometheus operator."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / "deploy" / "prometheus"
FILE = ROOT / "deploy" / "kubernetes" / "components" / "pod-monitor" / "prometheus-rule.yaml"
HEAD = """\
# deploy/prometheus/rules.yml and alerts.yml, written here by `python -m grafana.build`.
"""


def written() -> str:
    """Return the content of the file."""
    groups = [
        group
        for name in ("rules.yml", "alerts.yml")
        for group in yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))["groups"]
    ]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "vllm-sched"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=200)


def differing(path: Path = FILE) -> list[str]:
    """Return a message if the file is out of date."""
    if path.exists() and path.read_text(encoding="utf-8") == written():
        return []
    return [f"{path.relative_to(ROOT)} is out of date; run python -m grafana.build"]
