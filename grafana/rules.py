"""The recording rules and alerts in one object for the Prometheus operator."""

from __future__ import annotations

import yaml

from grafana.declared import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
FILE = "deploy/kubernetes/components/pod-monitor/prometheus-rule.yaml"
HEAD = """\
# deploy/prometheus/rules.yml and alerts.yml, written here by `python -m grafana.build`.
"""


def written() -> str:
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
