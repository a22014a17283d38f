"""Texts that are JSON, nearly JSON, or no JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

# Members that the router reads, of every route, and members that engines read.
KEYS = (
    "model", "messages", "prompt", "input", "inputs", "texts", "images", "token_ids", "system",
    "tools", "tool_choice", "instructions", "state", "questions", "query", "queries", "documents",
    "items", "text_1", "text_2", "data_1", "data_2", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "min_tokens", "n", "best_of", "stream", "stream_options", "echo",
    "truncate_prompt_tokens", "truncation", "background", "previous_response_id", "priority",
    "cache_salt", "sampling_params", "extra_args", "vllm_xargs", "kv_transfer_params",
    "prompt_logprobs", "use_beam_search", "content", "role", "type", "text", "name", "",
)  # fmt: skip
ODD_NUMBERS = (
    "0", "-0", "-1", "1", "1.0", "1e0", "16", "99999999999", "18446744073709551616", "1e308",
    "-1e308", "5e-324", "0.1", "2147483648", "1" + "0" * 300,
)  # fmt: skip
INVALID_NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e9999", "01", "1.", "+1", "0x1", "1_0", "9" * 5000, ".5",
)  # fmt: skip
ODD_STRINGS = (
    '""', '"tiny"', '"\\u0000"', '"\\ud83d\\ude00"', '"auto"', '"true"', '"x\\"y"', '"\\\\"',
    '"data:image/png;base64,AAAA"', '"kv_transfer_params"', '"\u2028é"',
)  # fmt: skip
INVALID_STRINGS = ('"\\ud800"', '"\\x"', '"\t"', '"open', "'x'", '"\\u12"')
SPACE = st.sampled_from(["", " ", "\n", "\t", "\r\n  "])


def _object(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    key = st.sampled_from(KEYS).map(json.dumps) | st.text(max_size=8).map(json.dumps)
    spelt = key | st.sampled_from(['"\\u006dodel"', '"m\\u006fdel"', '"vllm_\\u0078args"'])
    member = st.builds(lambda k, s, v: f"{k}{s}:{s}{v}", spelt, SPACE, inner)
    return st.lists(member, max_size=6).map(lambda members: "{" + ",".join(members) + "}")


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return _object(inner) | st.lists(inner, max_size=5).map(
        lambda items: "[" + ",".join(items) + "]"
    )


def _values(*, valid: bool) -> st.SearchStrategy[str]:
    odd = (*ODD_NUMBERS, *ODD_STRINGS, "true", "false", "null")
    if not valid:
        odd = (*odd, *INVALID_NUMBERS, *INVALID_STRINGS, "", "tru", "[", "{")
    plain: Any = st.sampled_from(odd) | st.integers().map(str)
    plain |= st.text(max_size=30).map(json.dumps)
    return st.recursive(plain, _nested, max_leaves=12)


VALID = _object(_values(valid=True))
INVALID = _object(_values(valid=False))
# Too deep for a recursive parser.
DEEP = st.builds(
    lambda depth, one, close: '{"messages":' + one[0] * depth + (one[1] * depth if close else ""),
    st.sampled_from([10, 500, 1000, 5000, 100_000]),
    st.sampled_from([("[", "]"), ('{"a":', "}"), ('[{"content":', "}]")]),
    st.booleans(),
).map(lambda text: text + "}")
BODIES: st.SearchStrategy[bytes] = st.one_of(
    VALID.map(lambda text: text.encode("utf-8", "surrogatepass")),
    INVALID.map(lambda text: text.encode("utf-8", "surrogatepass")),
    DEEP.map(str.encode),
    st.binary(max_size=200),
    st.builds(lambda text, at, byte: text[:at] + byte + text[at:],
              VALID.map(lambda text: text.encode("utf-8", "surrogatepass")),
              st.integers(0, 200), st.binary(min_size=1, max_size=3)),
)  # fmt: skip
