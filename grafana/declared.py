"""All known metrics: declared by the router and the engine half, or listed for vLLM.

The names come from the code, so that a dashboard cannot use a renamed metric.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal

import proxy.metrics
from proxy.metrics import page
from proxy.metrics.exposition import Family
from vllm_sched.policies.registry import POLICIES
from vllm_sched.policies.types import EngineFacts

ROOT = Path(__file__).parents[1]
VLLMS = Path(__file__).parent / "vllm-metrics.txt"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
Kind = Literal["counter", "gauge", "histogram"]
# Prometheus adds these to every target.
PROMETHEUS = frozenset({"up"})


def names(name: str, kind: str) -> set[str]:
    return {name + ending for ending in ENDINGS[kind]}


def router_families() -> list[Family]:
    """Return the metrics that the modules of `proxy.metrics` declare, those of `page` first."""
    names = (module.name for module in iter_modules(proxy.metrics.__path__, "proxy.metrics."))
    modules = [page, *(import_module(name) for name in names if name != page.__name__)]
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, Family)]


def routers() -> set[str]:
    """Return the names of the router's series, including its process's."""
    found = {name for each in router_families() for name in names(each.name, each.kind)}
    for each in page.process.collect():
        found |= names(each.name, each.type)
    return found


def engine_metrics() -> ModuleType:
    """Load the engine half's metrics module alone; its package would import vLLM."""
    name = "grafana_engine_metrics"
    if (loaded := sys.modules.get(name)) is None:
        spec = spec_from_file_location(name, ROOT / "vllm_sched" / "engine" / "metrics.py")
        if spec is None or spec.loader is None:
            raise ImportError("vllm_sched/engine/metrics.py cannot be loaded; check the tree")
        loaded = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


def engine_families() -> list[Family]:
    """Return the engine half's metrics, including the policies' numbers."""
    metrics = engine_metrics()
    made = [
        policy(EngineFacts(2000, 64, 16), policy.settings_type()) for policy in POLICIES.values()
    ]
    counted = {name for each in made for name in each.counters()}
    told = dict.fromkeys(name for each in made for name in (*each.gauges(), *each.counters()))
    rows: list[tuple[str, Kind, str, tuple[str, ...]]] = [
        *((name, "gauge", *each) for name, each in (metrics.FACTS | metrics.GAUGES).items()),
        *((name, "counter", *each) for name, each in metrics.COUNTERS.items()),
        *((name, "histogram", text, (by,)) for name, (text, by, _) in metrics.HISTOGRAMS.items()),
        # Policies report some metrics only after they have learned them.
        *(
            (name, "counter" if name in counted else "gauge", text, ("policy",))
            for name, text in (dict.fromkeys(told, "") | metrics.POLICY_METRICS).items()
        ),
    ]
    return [
        Family(metrics.PREFIX + name, kind, text, (*metrics.ENGINE_LABELS, *labels))
        for name, kind, text, labels in rows
    ]


def engines() -> set[str]:
    return {name for each in engine_families() for name in names(each.name, each.kind)}


def vllms() -> set[str]:
    """Return the names of the vLLM series that are used here."""
    rows = [line.split() for line in VLLMS.read_text(encoding="utf-8").splitlines()]
    return {found for row in rows if row and row[0] != "#" for found in names(*row)}


def recorded() -> set[str]:
    text = RULES.read_text(encoding="utf-8")
    return set(re.findall(r"^\s*- record: (\S+)$", text, re.MULTILINE))


def all_of_them() -> set[str]:
    """Return every name that an expression may use."""
    return routers() | engines() | vllms() | recorded() | PROMETHEUS
