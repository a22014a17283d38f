"""`docs/metrics.md`: every metric of the router and the engine half, from its declaration."""

from __future__ import annotations

from collections.abc import Iterable

from grafana import declared
from proxy.metrics.exposition import Family

FILE = "docs/metrics.md"
HEAD = """\
# Metrics

`python -m grafana.build` writes this page from the declarations in the router and the engine half;
a test checks that it is current. For their use see the dashboards (`grafana`) and the alerts
([runbook](runbook.md)); [observing](observing.md#phases) explains the phases of a stream.

A histogram has `_bucket` (with `le`), `_sum` and `_count`. Labels are bounded: models that no
worker serves, and tenants and workers above a limit, are `other`. Requests without a worker have
`none`.

## The router

`/metrics` on the client port. With several router processes, any of them returns the sum of all.
`process_*` metrics of memory, CPU time and open files are exported as well.

"""
ENGINE = """
## The engine half

A worker's own `/metrics` has these next to vLLM's metrics if it was started with
`vllm-sched serve`. Each policy exports its own metrics, some only after it has learned them.

"""


def written() -> str:
    engine = declared.engine_families()
    return HEAD + table(declared.router_families()) + ENGINE + table(engine)


def table(families: Iterable[Family]) -> str:
    rows = "".join(
        f"| `{each.sample_name}` | {each.kind} | {labels(each)} | {each.help} |\n"
        for each in families
    )
    return f"| metric | | labels | |\n|---|---|---|---|\n{rows}"


def labels(family: Family) -> str:
    return ", ".join(f"`{each}`" for each in family.labels)
