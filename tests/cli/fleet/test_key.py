"""`vllm-sched key`: the router accepts the printed key and hash."""

from __future__ import annotations

import io
from hashlib import sha256

import pytest
import yaml

from proxy.config import parse
from proxy.setup.tenancy import read_keys
from tests.cli.program import Printed, Program


def printed(output: Printed) -> dict[str, str]:
    return dict(line.split() for line in output.out.splitlines())


def test_new_key_and_its_hash_are_printed(program: Program) -> None:
    first = printed(program("key"))
    assert printed(program("key"))["key"] != first["key"]
    assert first["hash"] == f"sha256:{sha256(first['key'].encode()).hexdigest()}"
    hashed, plain = {"key_hashes": [first["hash"]]}, {"keys_env": "PLAIN"}
    data = {
        "model": "m",
        "workers": [{"name": "w", "url": "http://127.0.0.1:9001"}],
        "tenants": [{"name": "a", **hashed}, {"name": "b", **plain}],
    }
    config = parse(yaml.safe_dump(data), "fleet.yaml")
    other = first["key"][::-1]
    keys = read_keys(config, "fleet.yaml", {"PLAIN": other})
    assert keys[sha256(first["key"].encode()).digest()] == "a"
    assert keys[sha256(other.encode()).digest()] == "b"


def test_stdin_key_is_hashed(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-vs-aaaaaaaaaaaaaaaa\n"))
    hashed = {"hash": f"sha256:{sha256(b'sk-vs-aaaaaaaaaaaaaaaa').hexdigest()}"}
    assert printed(program("key", "--stdin")) == hashed


@pytest.mark.parametrize("text", ["", "short\n", "with some spaces in it\n", "\u00fc" * 20])
def test_invalid_key_is_refused_and_not_printed(
    text: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    refused = program("key", "--stdin", status=2)
    assert refused.out == ""
    assert text.strip() not in refused.err or not text.strip()
