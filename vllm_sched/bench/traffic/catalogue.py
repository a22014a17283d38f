"""Find a traffic source by its name on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from vllm_sched.bench.traffic.fixed import LENGTHS, Fixed, LongBlocksShort
from vllm_sched.bench.traffic.mixture import Mixture
from vllm_sched.bench.traffic.sessions.agent_coding import AgentCoding
from vllm_sched.bench.traffic.sessions.trace import SessionTrace, has_sessions
from vllm_sched.bench.traffic.tables import TABLES
from vllm_sched.bench.traffic.traces import BLOCK_TOKENS, RequestTrace
from vllm_sched.bench.traffic.types import TrafficSource
from vllm_sched.errors import UsageError

NAMES: Final = (*TABLES, LongBlocksShort.name)
SESSION_NAMES: Final = (AgentCoding.name,)
FORMS: Final = (
    "a mixture as azure-conv:0.9,mooncake-conv:0.1, lengths as 3000x100, or a trace as FILE.jsonl"
)


def find(
    workload: str, *, block_tokens: int = BLOCK_TOKENS, sessions: bool = False
) -> TrafficSource:
    """Return the source of a name; raise for one of sessions unless `sessions` is set."""
    source = _find(workload, block_tokens)
    if source.has_sessions and not sessions:
        raise UsageError(f"{workload}: has sessions, which only bench and simulate play")
    return source


def _find(workload: str, block_tokens: int) -> TrafficSource:
    if _is_trace(workload) and ("," not in workload or os.path.exists(workload)):  # noqa: PTH110 - `Path.exists` raises if the name is long
        path = Path(workload)
        return (SessionTrace if has_sessions(path) else RequestTrace)(path, block_tokens)
    if "," in workload or ":" in workload:
        return Mixture(workload, [_part(workload, part) for part in workload.split(",")])
    return _single(workload)


def _is_trace(name: str) -> bool:
    return name.endswith(".jsonl") or "/" in name


def _part(workload: str, part: str) -> tuple[TrafficSource, float]:
    name, colon, share = part.strip().partition(":")
    if _is_trace(name):
        raise UsageError(
            f"{workload}: {name} is a trace, which can't be part of a mixture; play it alone, "
            "without a share"
        )
    try:
        return _single(name), float(share) if colon else 1.0
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{workload}: the share of {name} is {share!r}; give a number") from None


def _single(name: str) -> TrafficSource:
    if name in TABLES:
        return TABLES[name]
    if name == AgentCoding.name:
        return AgentCoding()
    if name == LongBlocksShort.name:
        return LongBlocksShort()
    if LENGTHS.fullmatch(name):
        return Fixed(name)
    raise UsageError(
        f"unknown workload {name!r}; use one of: {', '.join((*NAMES, *SESSION_NAMES))}; or {FORMS}"
    )
