"""The sessions of `agent-coding`: those that run at the start, and those that follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Final

from vllm_sched.bench.traffic.sessions.agent_coding import AgentCoding
from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn, plan_session

MAX_MODEL_LEN: Final = 1_048_576
DRAWN: Final = 8  # sessions from which each that runs at the start is drawn
Session = tuple[PlannedTurn, ...]


def sessions(at_once: int, count: int, seed: int) -> tuple[list[Session], Iterator[Session]]:
    """Return the sessions under way at the start, and those that begin later.

    As at any moment of a long run, a long session is more likely to be under way, and at any turn.
    """
    rng = random.Random(f"agents/{seed}")
    coming = (plan_session(request, MAX_MODEL_LEN) for request in AgentCoding().requests(rng))
    drawn = list(islice(coming, DRAWN * at_once))
    under_way = []
    for _ in range(at_once):
        session = rng.choices(drawn, [len(turns) for turns in drawn])[0]
        drawn.remove(session)
        under_way.append(session[rng.randrange(len(session)) :])
    return under_way, islice(coming, count)
