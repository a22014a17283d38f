"""`vllm-sched key`: the router accepts the printed key and hash."""

from __future__ import annotations

import io
from hashlib import sha256

import pytest
import yaml

from proxy.config import parse
from proxy.setup.tenancy import read_keys
from vllm_sched.cli.main import main


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(line.split() for line in capsys.readouterr().out.splitlines())


def test_new_key_and_its_hash_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    first = printed(capsys)
    main(["key"])
    assert printed(capsys)["key"] != first["key"]
    assert first["hash"] == f"sha256:{sha256(first['key'].encode()).hexdigest()}"
    data = {
        "model": "m",
        "workers": [{"name": "w", "url": "http://127.0.0.1:9001"}],
        "tenants": [
            {"name": "a", "key_hashes": [first["hash"]]},
            {"name": "b", "keys_env": "PLAIN"},
        ],
    }
    config = parse(yaml.safe_dump(data), "fleet.yaml")
    other = first["key"][::-1]
    keys = read_keys(config, "fleet.yaml", {"PLAIN": other})
    assert keys[sha256(first["key"].encode()).digest()] == "a"
    assert keys[sha256(other.encode()).digest()] == "b"


def test_stdin_key_is_hashed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-vs-aaaaaaaaaaaaaaaa\n"))
    assert main(["key", "--stdin"]) == 0
    assert printed(capsys) == {"hash": f"sha256:{sha256(b'sk-vs-aaaaaaaaaaaaaaaa').hexdigest()}"}


@pytest.mark.parametrize("text", ["", "short\n", "with some spaces in it\n", "ü" * 20])
def test_invalid_key_is_refused_and_not_printed(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["key", "--stdin"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text.strip() not in output.err or not text.strip()
