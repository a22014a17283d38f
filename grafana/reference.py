"""`docs/metrics.md`: every metric of the router and of the engine half, from what declares them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from grafana import declared
from proxy.metrics.exposition import Family

FILE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """\
# Metrics

Written by `python -m grafana.build` from what the router and the engine half declare; a test keeps
it so. Boards (`grafana`) and alerts ([runbook](runbook.md)) say what they make of them; where a
stream's time goes is in [observing](observing.md#phases).

A histogram has `_bucket` (with `le`), `_sum` and `_count`. Labels are bounded: models that nobody
serves, and tenants and workers where they are too many, are `other`; who got no worker has `none`.

## The router

On the clients' port, `/metrics`; of several processes any of them tells for all. Beside these there
are `process_*`, of memory, processor and open files.

"""
ENGINE = """
## The engine half

On a worker's own `/metrics`, beside vLLM's, where one of our schedulers runs and its numbers reach
the server: `vllm-sched serve` sees to that. A policy tells those that it has, some once it has
learnt them.

"""


def written() -> str:
    """Return what the page should be."""
    engine = declared.engine_families()
    return HEAD + table(declared.router_families()) + ENGINE + table(engine)


def table(families: Iterable[Family]) -> str:
    """Write a table."""
    rows = "".join(
        f"| `{name(each)}` | {each.kind} | {labels(each)} | {each.help} |\n" for each in families
    )
    return f"| metric | | labels | |\n|---|---|---|---|\n{rows}"


def name(family: Family) -> str:
    """Name a metric as one asks for it."""
    return family.name + ("_total" if family.kind == "counter" else "")


def labels(family: Family) -> str:
    """Name a metric's labels."""
    return ", ".join(f"`{each}`" for each in family.labels)


def differing(path: Path = FILE) -> list[str]:
    """Say whether the page is not what it should be."""
    if path.exists() and path.read_text(encoding="utf-8") == written():
        return []
    return [f"docs/{path.name} is out of date; run python -m grafana.build"]
