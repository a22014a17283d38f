"""The phase panels of the boards, computed from known numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from grafana.boards import fleet
from tests.prometheus.server import VARIABLES
from tests.prometheus.tools import check_case

# Per minute: four streams, two of them handed over. Seconds of each phase.
QUEUED_S = {"queue": 0.5, "decode": 6.0}
WHOLE_S = {"prefill": 2.0}
HANDED_OVER_S = {"prefill_leg": 3.0, "transfer": 1.0}
WANTED = {"queue": 0.5, "prefill": 1.0, "prefill_leg": 1.5, "transfer": 0.5}
DECODE = {"decode": 6.0}


def series(pool: str, requests: int, phases: dict[str, float]) -> list[dict[str, str]]:
    """Return the input series of a pool's phases, growing each minute."""
    labels = f'job="router",instance="r0",pool="{pool}",model="m",class="short"'
    return [
        {
            "series": f'proxy_phase_seconds_{kind}{{{labels},phase="{phase}"}}',
            "values": f"0+{growth:g}x10",
        }
        for phase, seconds in phases.items()
        for kind, growth in (("sum", seconds * requests), ("count", requests))
    ]


@pytest.mark.parametrize(
    ("title", "wanted"),
    [("Time to first token, by phase", WANTED), ("Request time, by phase", WANTED | DECODE)],
)
def test_phases_sum_to_the_mean_request(
    title: str, wanted: dict[str, float], tmp_path: Path
) -> None:
    [expr] = [expr for name, expr in fleet.BOARD.expressions() if name == title]
    for name, value in (VARIABLES | {"$__rate_interval": "5m"}).items():
        expr = expr.replace(name, value)
    samples = [{"labels": f'{{phase="{name}"}}', "value": value} for name, value in wanted.items()]
    case = {
        "input_series": [
            *series("short", 2, QUEUED_S | WHOLE_S),
            *series("decode", 2, QUEUED_S | HANDED_OVER_S),
        ],
        "promql_expr_test": [{"expr": expr, "eval_time": "10m", "exp_samples": samples}],
    }
    check_case(tmp_path, case)
