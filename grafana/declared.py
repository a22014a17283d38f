"""Which metrics there are: what the router and the engine half declare, and vLLM's, from a list.

Told by the code that makes them, so that a board can't ask for one that was renamed.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from proxy.control import batch_counts, phases, scrape, tenant_counts, unseen
from proxy.control.exposition import Family
from vllm_sched.policies.registry import POLICIES
from vllm_sched.policies.types import EngineFacts

ROOT = Path(__file__).parents[1]
VLLMS = Path(__file__).parent / "vllm-metrics.txt"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Prometheus's own, of every target.
PROMETHEUS = frozenset({"up"})


def names(name: str, kind: str) -> set[str]:
    """Return what the series of a metric are called."""
    return {name + ending for ending in ENDINGS[kind]}


def routers() -> set[str]:
    """Return the router's, its process's included."""
    modules = scrape, tenant_counts, batch_counts, unseen, phases
    families = [f for m in modules for f in vars(m).values() if isinstance(f, Family)]
    found = {name for each in families for name in names(each.name, each.kind)}
    for each in scrape.process.collect():
        found |= names(each.name, each.type)
    return found


def engine_metrics() -> ModuleType:
    """Load the engine half's metrics alone: as a part of its package they would import vLLM."""
    name = "grafana_engine_metrics"
    if (loaded := sys.modules.get(name)) is None:
        spec = spec_from_file_location(name, ROOT / "vllm_sched" / "engine" / "metrics.py")
        if spec is None or spec.loader is None:
            raise ImportError("vllm_sched/engine/metrics.py can't be loaded; is the tree whole?")
        loaded = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


def engines() -> set[str]:
    """Return those of the engine half: its own, and the numbers that policies tell."""
    metrics = engine_metrics()
    kinds = dict.fromkeys([*metrics.GAUGES, *metrics.FACTS], "gauge")
    kinds |= dict.fromkeys(metrics.COUNTERS, "counter")
    kinds |= dict.fromkeys(("step_seconds", "hold_seconds"), "histogram")
    for policy in POLICIES.values():
        made = policy(EngineFacts(2000, 64, 16), policy.settings_type())
        kinds |= dict.fromkeys(made.gauges(), "gauge") | dict.fromkeys(made.counters(), "counter")
    return {found for name, kind in kinds.items() for found in names(metrics.PREFIX + name, kind)}


def vllms() -> set[str]:
    """Return vLLM's, as far as we use them."""
    rows = [line.split() for line in VLLMS.read_text(encoding="utf-8").splitlines()]
    return {found for row in rows if row and row[0] != "#" for found in names(*row)}


def recorded() -> set[str]:
    """Return what Prometheus itself records."""
    text = RULES.read_text(encoding="utf-8")
    return set(re.findall(r"^\s*- record: (\S+)$", text, re.MULTILINE))


def all_of_them() -> set[str]:
    """Return every name that an expression may ask for."""
    return routers() | engines() | vllms() | recorded() | PROMETHEUS
