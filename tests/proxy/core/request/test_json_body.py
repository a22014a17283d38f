"""Large bodies, read in steps."""

from __future__ import annotations

import gc
from dataclasses import replace

import orjson
import pytest

from proxy.core.model.types import ReceivedRequest
from proxy.core.request.json_body import LargeBody, parsed
from proxy.core.request.json_limits import LARGE_BODY_BYTES, MAX_NODES
from tests.proxy.core.making import route, router_of, spec

TEXT = b"x" * LARGE_BODY_BYTES
QUOTES = rb"\"" * (MAX_NODES + 1)  # many enough for an exact count


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (b'{"model":"m","prompt":"%b"}' % TEXT, 2),
        (b'{"model":"m","prompt":"%b"}' % (2 * QUOTES), 4),
        (b'{"model":"m","prompt":[%b1]}' % (b'"",' * 2 * MAX_NODES), 3),
        (b'{"model":"m","temperature":NaN,"prompt":"%b"}' % TEXT, 2),
        (b'{"model":"m","prompt":"%b"' % TEXT, 2),
    ],
    ids=["text", "quotes", "too many strings", "NaN", "no JSON"],
)
def test_body_read_in_steps_gives_the_same_request(body: bytes, steps: int) -> None:
    router, path = router_of(spec("w", limit=10**9)), route("/v1/completions")
    large, taken = LargeBody(body), 1
    while large.advance():
        taken += 1
    assert taken == steps
    assert not large.advance()
    request = ReceivedRequest(path, body, b"application/json", "id")
    whole = router.read(request)
    assert repr(router.read(replace(request, large=large))) == repr(whole)


@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize("end", [b'"', b'", "seed": NaN}'])
def test_large_text_is_parsed_leniently_only_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("json.loads", lambda text: seen.append(len(text)))
    with pytest.raises(orjson.JSONDecodeError):
        parsed(b'{"prompt": "%b%b' % (TEXT, end))
    assert len(seen) == (b"NaN" in end)


@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_not_collected_while_parsing(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    seen = []

    def parse(text: bytes) -> object:
        seen.append(gc.isenabled())
        return parsed(text)

    monkeypatch.setattr("proxy.core.request.json_body.parsed", parse)
    if not collects:
        gc.disable()
    try:
        large = LargeBody(b'{"prompt":"%b"}' % TEXT)
        while large.advance():
            pass
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()
