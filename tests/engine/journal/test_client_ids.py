"""X-Request-Ids from the ids that vLLM's server gives its requests."""

from __future__ import annotations

import pytest

from vllm_sched.engine.journal.client_ids import client_ids


@pytest.mark.parametrize(
    "engine_id",
    [
        "chatcmpl-mine-0123abcd", "cmpl-mine-0-0123abcd", "embd-mine-2-0123abcd",
        "1_chatcmpl-mine-0123abcd", "0_cmpl-mine-3-0123abcd", "score-mine-0-0123abcd",
        "mine-0123abcd", "mine", "chatcmpl-mine",
    ],
)  # fmt: skip
def test_readings_contain_the_clients_id(engine_id: str) -> None:
    assert "mine" in client_ids(engine_id)


def test_an_id_that_ends_like_an_index_has_both_readings() -> None:
    assert {"job-7", "job"} <= client_ids("chatcmpl-job-7-0123abcd")
