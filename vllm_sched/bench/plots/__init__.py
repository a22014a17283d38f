"""Pictures of runs and sweeps as SVG and PNG; they need the `plots` extra."""

from __future__ import annotations

from vllm_sched.bench.plots.gallery import draw_run, draw_sweep
from vllm_sched.bench.plots.style import check_available

__all__ = ["check_available", "draw_run", "draw_sweep"]
