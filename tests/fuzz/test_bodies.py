"""Fuzzed bodies through all steps of the router, without sending."""

from __future__ import annotations

import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import TransferConfig
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.route_table import ROUTES, PromptFields, Route
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, ReceivedRequest, Refusal, RequestInfo
from proxy.core.router import Router, RouterSettings
from proxy.http.sse import EventStream, replace_cached_tokens, usage_in
from proxy.transfer.legs import decode_body, prefill_body
from proxy.transfer.registry import connector
from proxy.transfer.types import Pair, Side, usage_of
from proxy.wire.handover.release import parse_fields as read_answer
from tests.fuzz.texts import BODIES, INVALID, VALID

MODEL = "tiny"
MAX_SANE = 2**62  # far above any sum of charges
JSON_TYPE, FORM_TYPE = b"application/json", b"multipart/form-data; boundary=b"
NIXL = connector(TransferConfig(connector="nixl"))
EXAMPLES = settings(max_examples=60, deadline=None)
PATHS = st.sampled_from(sorted(ROUTES))


def fleet() -> tuple[Fleet, list[Worker]]:
    """Return a fleet with a worker of each role."""
    made = Fleet()
    for role in (Role.GENERAL, Role.PREFILL, Role.DECODE):
        made.roster.add(WorkerSpec(role.value, "http://127.0.0.1:1", role, MODEL))
        for at in (0.0, 1.0):
            made.health.probe_ok(role.value, at)
        made.roster.set_served(role.value, (MODEL,), 16384)
    return made, list(made.roster)


def charges(workers: list[Worker]) -> list[tuple[int, ...]]:
    return [(w.requests, w.prefill_tokens, w.decode_tokens, w.kv_tokens) for w in workers]


def play_request(
    route: Route, body: bytes, kind: bytes, response: bytes = b""
) -> RequestInfo | Refusal:
    """Play a request with this body; `response` is the worker's response with its usage."""
    fleet_of_roles, workers = fleet()
    router = Router(RouterSettings(transfer=True, disaggregate_above=1), fleet_of_roles)
    info = router.read(ReceivedRequest(route, body, kind, "id"))
    if isinstance(info, Refusal):
        assert 400 <= info.status < 500
        return info
    for number in (
        info.prompt_tokens,
        info.prompt_error,
        info.largest_prompt,
        info.expected_output,
    ):
        assert type(number) is int
        assert 0 <= number <= MAX_SANE
    assert 1 <= info.samples <= MAX_SANE
    assert info.output_tokens is None or 0 <= info.output_tokens <= MAX_SANE
    if counter := router.counter_for(info):
        assert counter in workers
    placed = router.submit(info, 2.0)
    if isinstance(placed, Lease):
        finish_request(router, placed, body, response)
        assert charges(workers) == [(0, 0, 0, 0)] * 3
    return info


def finish_request(router: Router, lease: Lease, body: bytes, response: bytes) -> None:
    if lease.prefill is not None:
        pair = Pair(Side("p", "h"), Side("d", "h"), "1")
        first = prefill_body(NIXL, pair, lease.info, body)
        assert orjson.loads(first)["max_tokens"] == 1 or lease.info.route == "responses"
        answer = read_answer(response)
        result = NIXL.result_of(pair, answer)
        second = decode_body(NIXL, pair, result, lease.info, body)
        known, lease.info.field_names = lease.info.field_names, None
        assert known is not None
        assert first == prefill_body(NIXL, pair, lease.info, body)
        assert second == decode_body(NIXL, pair, result, lease.info, body)
        router.leases.end_prefill(lease, 3.0, usage_of(answer))
        orjson.loads(second)
    router.leases.record_first_token(lease, 4.0)
    router.leases.record_tokens(lease, 1)
    router.leases.finish(lease, 5.0, Outcome.DONE, usage_in(response))
    assert 0.0 < router.sizer.learned(MODEL, lease.info.route).bytes_per_token < 1e3


@EXAMPLES
@given(PATHS, BODIES, st.sampled_from([JSON_TYPE, b"", FORM_TYPE, b"\xff"]))
def test_any_body_is_played_or_refused(path: str, body: bytes, kind: bytes) -> None:
    play_request(ROUTES[path], body, kind)


@EXAMPLES
@given(st.sampled_from(["chat/completions", "completions", "responses"]), VALID, INVALID)
def test_valid_request_is_played_with_any_response(name: str, text: str, response: str) -> None:
    route = ROUTES[f"/v1/{name}"]
    body = b'{"model":"tiny","prompt":"x","messages":[],"input":"x",' + text[1:].encode(
        "utf-8", "surrogatepass"
    )
    usage = b'{"usage":' + response.encode("utf-8", "surrogatepass") + b"}"
    if body.endswith(b",}"):
        body = body[:-2] + b"}"
    play_request(route, body, JSON_TYPE, usage)


NUMBERS = st.sampled_from(
    ["0", "1", "-1", "7.5", "9" * 30, "9" * 999, "1e999", "null", '"x"', "[]"]
)


@EXAMPLES
@given(NUMBERS, NUMBERS, NUMBERS, st.booleans())
def test_any_usage_keeps_estimates_valid(
    prompt: str, written: str, cached: str, typed: bool
) -> None:
    names = ("input_tokens", "output_tokens") if typed else ("prompt_tokens", "completion_tokens")
    response = (
        f'{{"kv_transfer_params": {{"remote_host": {prompt}}}, "usage": {{"{names[0]}": {prompt}, '
        f'"{names[1]}": {written}, "prompt_tokens_details": {{"cached_tokens": {cached}}}}}}}'
    )
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}'
    play_request(ROUTES["/v1/chat/completions"], body, JSON_TYPE, response.encode())
    replace_cached_tokens(response.encode(), 5)


@EXAMPLES
@given(
    st.lists(
        st.one_of(
            st.sampled_from([b"data: ", b"event: x\n", b"\n\n", b"\r\n\r\n", b": ping\n", b"\n"]),
            st.binary(max_size=20),
        )
    ),
    st.integers(1, 9),
)
def test_any_event_stream_passes_complete(parts: list[bytes], size: int) -> None:
    data, stream = b"".join(parts), EventStream()
    out = b"".join(stream.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert out + stream.rest() == data
    assert stream.tokens >= 0
    stream.error_event("gone", "code")


# Too deep, too long, or too many values.
REFUSED = (
    b'{"messages":' + b"[" * 500_000,
    b'{"messages":' + b'{"a":' * 500_000,
    b'{"max_tokens":' + b"9" * 500_000 + b"}",
    b'{"a":' + b"[]," * 10 + b"}",
    b"[" + b"1," * 3_000_000 + b"1]",
)


def test_too_deep_or_long_bodies_are_400() -> None:
    route = ROUTES["/v1/chat/completions"]
    for body in REFUSED:
        found = play_request(route, body, JSON_TYPE)
        assert isinstance(found, Refusal)
        assert found.status == 400


def _many(unit: bytes, size: int, before: bytes = b"{", after: bytes = b'"z":1}') -> bytes:
    return before + unit * (size // len(unit)) + after


ARGS = b'{"vllm_xargs":{},'
XARGS = b'content-disposition: form-data; name="vllm_xargs"\r\n'
# Bodies that take a quadratic parser seconds.
HARD = {
    "empty objects": lambda n: _many(b'"a":{},', n, ARGS),
    "empty lists": lambda n: _many(b'"a":[],', n, ARGS),
    "one name many times": lambda n: _many(b'"kv_transfer_params":null,', n),
    "backslashes": lambda n: _many(rb"\\", n, ARGS + b'"p":"', b'"}'),
    "quotes": lambda n: _many(rb"\"", n, ARGS + b'"p":"', b'"}'),
    "short strings": lambda n: _many(b'"aa",', n, ARGS + b'"messages":[', b"1]}"),
    "long strings": lambda n: _many(b'"' + b"a" * 97 + b'",', n, ARGS + b'"messages":[', b"1]}"),
    "messages": lambda n: _many(b"{},", n, b'{"messages":[', b"1]}"),
    "tools": lambda n: _many(b"{},", n, b'{"messages":[],"tools":[', b"1]}"),
    "nested lists": lambda n: _many(b"[[[[]]]],", n, ARGS + b'"a":[', b"1]}"),
    "white space": lambda n: _many(b" ", n, ARGS, b'"a":1}'),
    "escapes": lambda n: _many(b"\\u0061", n, ARGS + b'"p":"', b'"}'),
    "digits": lambda n: _many(b"9", n, b'{"max_tokens":0.', b"}"),
}
HARD_FORMS = {
    "mentions": lambda n: _many(b'name="model"', n, b"", b""),
    "parts": lambda n: _many(b'--b\r\n\r\nname="model"\r\n', n, b"", b""),
    "boundaries": lambda n: _many(b"--b", n, b"", b""),
    "one text for many": lambda n: XARGS * 99 + _many(b"[],", n, b"\r\n[", b"1]\r\n--b--"),
    "a long line": lambda n: _many(b" name", n, b"content-disposition:", b"vllm_xargs"),
    "stars": lambda n: _many(b"\nname", n, b"", b"name*"),
}


@pytest.mark.parametrize("name", [*HARD, *HARD_FORMS])
def test_reading_time_is_linear_in_the_size(name: str) -> None:
    """Sixteen times the bytes may take 64 times as long: sixteen, and a factor of four for noise.

    A quadratic parser takes 256 times as long. Processor time, the best of up to 50 runs.
    """
    form = name in HARD_FORMS
    make = (HARD | HARD_FORMS)[name]
    route = ROUTES["/v1/audio/transcriptions" if form else "/v1/chat/completions"]
    assert (route.shape is PromptFields.FORM) == form
    router = Router(RouterSettings(transfer=True), fleet()[0])

    small, large = make(8_000), make(128_000)

    def cost(body: bytes) -> float:
        began = time.process_time()
        router.read(ReceivedRequest(route, body, FORM_TYPE if form else JSON_TYPE, "id"))
        return time.process_time() - began

    small_s, large_s = cost(small), cost(large)
    for _ in range(50):
        if large_s < 64 * max(small_s, 1e-4):
            return
        small_s, large_s = min(small_s, cost(small)), min(large_s, cost(large))
    pytest.fail(f"{len(small)} bytes take {small_s:.6f} s, {len(large)} bytes {large_s:.6f} s")
