"""Fields that steer a KV transfer are found in every spelling that an engine reads."""

from __future__ import annotations

import json
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.request.kv_transfer_fields import find_steering, find_steering_in_form

EVIL = '{"do_remote_prefill": true, "remote_host": "10.0.0.1"}'
TYPE = b"multipart/form-data; boundary=XyZ"
XARGS = b'Content-Disposition: form-data; name="vllm_xargs"'
PROMPT = b'Content-Disposition: form-data; name="prompt"'
IN_XARGS = "vllm_xargs.kv_transfer_params"
ARGS = "sampling_params.extra_args.kv_transfer_params"


def steering_field(body: str) -> str | None:
    return find_steering(orjson.loads(body), body.encode())


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"kv_transfer_params": %s}', "kv_transfer_params"),
        ('{"ec_transfer_params": %s}', "ec_transfer_params"),
        ('{"kv_transfer\\u005fparams": %s}', "kv_transfer_params"),
        ('{"\\u006bv_transfer_params"  : %s}', "kv_transfer_params"),
        ('{"kv_transfer_params": %s, "kv_transfer_params": null}', "kv_transfer_params"),
        ('{"kv_transfer_params": null, "kv_transfer_params": %s}', "kv_transfer_params"),
        ('{"kv_transfer_params": %s, "kv\\u005ftransfer_params": null}', "kv_transfer_params"),
        ('{"vllm_xargs": {"kv_transfer_params": %s}}', IN_XARGS),
        ('{"vllm_xargs": {"x": 1, "ec_transfer_params": %s}}', "vllm_xargs.ec_transfer_params"),
        ('{"vllm\\u005fxargs": {"kv\\u005ftransfer_params": %s}}', IN_XARGS),
        ('{"vllm_xargs": {"kv_transfer_params": %s}, "vllm_xargs": 1}', IN_XARGS),
        ('{"vllm_xargs": {"kv_transfer_params": %s, "kv_transfer_params": null}}', IN_XARGS),
        ('{"token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":%s}}}', ARGS),
        ('{"sampling_params": {"extra\\u005fargs": {"kv_transfer_params": %s}}}', ARGS),
        ('{"sampling_params": {"extra_args": {"kv_transfer_params": %s}, "extra_args": 1}}', ARGS),
        (
            '{"sampling_params": {"extra_args": {"kv_transfer_params": %s}}, "sampling_params": 1}',
            ARGS,
        ),
    ],
)
@pytest.mark.parametrize("value", [EVIL, '"text"', "0", "{}", "true"])
def test_steering_fields_are_found_in_every_spelling(body: str, name: str, value: str) -> None:
    assert steering_field(body % value) == name


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"kv_transfer_params": null}',
        '{"kv_transfer_params" :\\n null , "ec_transfer_params":null}'.replace("\\n", "\n"),
        '{"vllm_xargs": null}',
        '{"vllm_xargs": {"kv_transfer_params": null, "top": "kv_transfer_params"}}',
        '{"vllm_xargs": {"deeper": {"kv_transfer_params": 1}}}',
        '{"vllm_xargs": ["kv_transfer_params"], "n": 1}',
        '{"sampling_params": {"kv_transfer_params": 1, "max_tokens": 3}}',
        '{"sampling_params": {"extra_args": {"top_a": 0.1}}}',
        '{"sampling_params": {"extra_args": [1]}}',
        '{"prompt": "what does kv_transfer_params do?"}',
        '{"prompt": "kv_transfer_params"}',
        '{"prompt": "{\\"kv_transfer_params\\": {\\"do_remote_prefill\\": true}}"}',
        '{"prompt": "\\\\\\", \\"kv_transfer_params\\": 1, \\"x\\": \\""}',
        '{"messages": [{"role": "user", "content": "x", "kv_transfer_params": {"a": 1}}]}',
        '{"tools": [{"function": {"parameters": {"properties": {"kv_transfer_params": {}}}}}]}',
        '{"KV_TRANSFER_PARAMS": {}, "kv_transfer_params ": {}, "kv-transfer-params": {}}',
    ],
)
def test_bodies_without_steering_fields_pass(body: str) -> None:
    assert steering_field(body) is None


TEXT = st.text() | st.sampled_from(
    ["kv_transfer_params", '"kv_transfer_params": 1', "\\", '"', '", "vllm_xargs": {"']
)


@given(st.lists(TEXT).map(" ".join), st.booleans())
def test_text_of_prompts_is_no_steering_field(prompt: str, ascii_only: bool) -> None:
    fields = {"model": "tiny", "vllm_xargs": {"note": prompt}, "prompt": prompt}
    assert steering_field(json.dumps(fields, ensure_ascii=ascii_only)) is None


@given(st.lists(TEXT).map(" ".join), st.sampled_from([(), ("vllm_xargs",)]), st.integers(0, 2**18))
def test_steering_field_is_found_next_to_any_prompt(
    prompt: str, path: tuple[str, ...], escaped: int
) -> None:
    key = "".join(
        f"\\u{ord(c):04x}" if escaped >> at & 1 else c for at, c in enumerate("kv_transfer_params")
    )
    inner = f'{json.dumps(prompt)}: 1, "{key}": {EVIL}, "z": {json.dumps(prompt)}'
    for name in path:
        inner = f'"{name}": {{{inner}}}'
    body = f'{{"prompt": {json.dumps(prompt)}, {inner}}}'
    assert steering_field(body) == ".".join([*path, "kv_transfer_params"])


# Forms


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Return a form of parts, each a head and a value."""
    return b"".join(b"--XyZ\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--XyZ--\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b'Content-Disposition: form-data; name="vllm_xargs"',
        b"content-disposition:form-data;name=vllm_xargs",
        b'Content-Type: text/plain\r\nCONTENT-DISPOSITION: form-data; x="y"; name="vllm_xargs"',
        b'Content-Disposition: form-data; name="vllm_xargs"\r\nContent-Type: application/json',
        b"Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs",
        b'Content-Disposition: form-data; name*0="vllm_"; name*1="xargs"',
        b'Content-Disposition: form-data; NAME*0="vllm_"; NAME*1="xargs"',
        b'Content-Disposition: form-data; x=\n; name="vllm_xargs"',
        b'Content-Disposition: form-data; x="a\nb"; name="vllm_xargs"',
        b'Content-Disposition: form-data;\x0cname=\xa0"vllm_xargs"',
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        b'{"kv_transfer_params": "x"}',
        b'{"kv\\u005ftransfer_params": ["x"]}',
        b'{"kv_transfer_params": 1, "kv_transfer_params": null}',
        b' \r\n{"a": NaN, "kv_transfer_params": 1}\r\n',
    ],
)
def test_steering_fields_of_forms_are_found(head: bytes, value: bytes) -> None:
    file = (b'Content-Disposition: form-data; name="file"; filename="a.wav"', b"\x00\xff" * 5000)
    harmless = (head, b'{"temperature": 1}')
    for other in (file, harmless):
        assert find_steering_in_form(form(other, (head, value)), TYPE) == IN_XARGS
        assert find_steering_in_form(form((head, value), other), TYPE) == IN_XARGS
    assert find_steering_in_form(form(harmless, file), TYPE) is None


@pytest.mark.parametrize(
    "content_type",
    [
        TYPE + b"; charset=utf-7",
        TYPE + b'; Charset = "utf-16"',
        TYPE + b"; charset=utf-8; charset=utf-7",
        TYPE + b"; charset*=utf-8''utf-7",
    ],
)
def test_form_with_another_charset_is_steering(content_type: bytes) -> None:
    assert find_steering_in_form(form(), content_type) == "charset"
    assert find_steering_in_form(form(), TYPE + b"; charset=UTF-8") is None
    assert find_steering_in_form(form(), TYPE + b"; charset=UTF-8; x=charset") is None


def test_cost_of_a_long_content_type_is_linear() -> None:
    def cost(size: int) -> float:
        content_type, best = TYPE + b"; " + b"charset" * (size // 7), 1e9
        for _ in range(3):
            began = time.process_time()
            assert find_steering_in_form(b"", content_type) is None
            best = min(best, time.process_time() - began)
        return best

    assert cost(64_000) < 64 * max(cost(4_000), 1e-4)  # it was 256 times
    assert find_steering_in_form(b"", TYPE + b"; " + b"charset" * 9000 + b"=utf-8") == "charset"


@pytest.mark.parametrize(
    "part",
    [
        (PROMPT, b'vllm_xargs {"kv_transfer_params": 1}'),
        (PROMPT, b'{"kv_transfer_params": 1}'),
        (XARGS, b'["kv_transfer_params", 1]'),
        (XARGS, b'{"kv_transfer_params": null}'),
        (XARGS, b'{"x": {"kv_transfer_params": 1}}'),
        (XARGS, b'kv_transfer_params: {"'),
        (XARGS, b"[" * 50_000),
        (b'Content-Disposition: form-data; name="file"; filename="name*.wav"', b"\x00" * 100),
    ],
)
def test_forms_without_steering_fields_pass(part: tuple[bytes, bytes]) -> None:
    assert find_steering_in_form(form(part), TYPE) is None


@pytest.mark.parametrize("body", [b"", b"vllm_xargs", b"\nname*\r\n\r\n", b"name*" * 99])
def test_bodies_that_are_no_form_pass(body: bytes) -> None:
    assert find_steering_in_form(body, TYPE) is None
    assert find_steering_in_form(body, b"") is None


def test_truncated_form_is_read_up_to_its_end() -> None:
    text = b'{"kv_transfer_params": 1}'
    whole = form((XARGS, text))
    begin = whole.index(text)
    for end in range(len(whole) + 1):
        is_whole = end >= begin + len(text) and not whole[:end].endswith(b"\r\n-")
        steers = IN_XARGS if is_whole else None
        assert find_steering_in_form(whole[:end], TYPE) == steers, whole[:end]


def test_form_too_expensive_to_check_counts_as_steering() -> None:
    long_head = b'Content-Disposition: form-data; x="%b"; name="vllm_xargs"' % (b"y" * 10_000)
    for body in (
        b"name*" * 5_000_000,
        form((XARGS, b"[" + b"[]," * 30_000 + b"1]")),
        form((long_head, b'{"kv_transfer_params": 1}')),
        XARGS + b"\r\n" + b"y" * 100_000,
    ):
        assert find_steering_in_form(body, TYPE) == "vllm_xargs"
    # The part has no end.
    assert find_steering_in_form(XARGS + b"\r\n" + b"y" * 10_000, TYPE) is None
