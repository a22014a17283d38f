"""The X-Request-Id in an engine's id."""

from __future__ import annotations

import pytest

from proxy.journal.request_ids import request_ids

UUID = "0b1c9a52-7d6e-4f43-9a0b-d0d3a1b2c3d4"


@pytest.mark.parametrize(
    ("engine_id", "first"),
    [
        (f"chatcmpl-{UUID}-1a2b3c4d", UUID),
        (f"0_chatcmpl-{UUID}-1a2b3c4d", UUID),
        (f"12_cmpl-{UUID}-3-1a2b3c4d", UUID),
        ("cmpl-job-7-0-1a2b3c4d", "job-7"),
        ("chatcmpl-job-7-1a2b3c4d", "job-7"),
        ("generate-tokens-x-1a2b3c4d", "x"),
        ("transcribe-x-1a2b3c4d", "x"),
        ("resp_5_0-1a2b3c4d", "resp_5_0"),
        ("chatcmpl-x", "x"),  # without random digits
        ("cmpl-x-0", "x"),
        ("chatcmpl-a\nb-1a2b3c4d", "a\nb"),
        ("", None),
    ],
)
def test_likeliest_id(engine_id: str, first: str | None) -> None:
    assert next(iter(request_ids(engine_id)), None) == first


@pytest.mark.parametrize(
    ("engine_id", "possible"),
    [
        ("chatcmpl-x_2-1a2b3c4d", "x"),  # several conversations in one request
        ("transcribe-x-2-1a2b3c4d", "x"),
        ("chatcmpl-job-deadbeef", "job-deadbeef"),
        ("resp_5_0-1a2b3c4d", "resp_5"),
    ],
)
def test_other_possible_ids(engine_id: str, possible: str) -> None:
    assert possible in request_ids(engine_id)
