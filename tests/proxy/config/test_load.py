"""Loading and showing valid fleet files, and files that are no YAML."""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.config import PartialConfig, load, parse, shown
from proxy.config.types import Block
from proxy.errors import ConfigError, Problem
from tests.proxy.config.fleet_files import blocks_of, fleet, read, worker

GOOD = """
model: tiny
workers:
  - {name: s0, role: short, url: "http://127.0.0.1:9001"}
  - name: l0
    role: long
    url: http://127.0.0.1:9002/
    launch:
      args: [--max-model-len, "16384"]
      policies: {long_prompt: {}}
      cpus: [1]
      env: {}
router: {host: 127.0.0.1, port: 8000, admin: {host: 127.0.0.1, port: 8001}}
routing: {policy: adaptive, short_limit: 10000}
"""


def test_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(GOOD.lstrip(), encoding="utf-8-sig")
    assert load(file) == parse(GOOD, "fleet.yaml")


def test_example_file_is_read() -> None:
    config = parse(GOOD, "fleet.yaml")
    short, long = config.workers
    assert (short.name, short.role, short.url) == ("s0", "short", "http://127.0.0.1:9001")
    assert long.url == "http://127.0.0.1:9002"
    assert long.address == ("127.0.0.1", 9002)
    assert long.launch is not None
    assert long.launch.args == ("--max-model-len", "16384")
    assert (long.launch.policies, long.launch.cpus) == ({"long_prompt": {}}, (1,))
    assert config.routing.short_limit == 10_000
    assert config.model_of(short) == "tiny"
    with pytest.raises(ValidationError, match="frozen"):
        config.model = "other"  # type: ignore[misc]
    assert parse(yaml.safe_dump(shown(config)), "again.yaml") == config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("router.processes", number) for number in (1, 2, 64, "auto")),
        *(("router.shared.url", url) for url in (
            "redis://r:6379/0", "rediss://user@r", "unix:///run/redis.sock", "redis://[::1]:7",
            "unix:///run/redis.sock?db=2", "rediss://r/3?ssl_cert_reqs=none",
        )),
    ],
)  # fmt: skip
def test_valid_value_is_kept(path: str, value: object) -> None:
    assert attrgetter(path)(read(**blocks_of(path, value))) == value


@pytest.mark.parametrize(
    ("given", "journal"),
    [
        ("tcp://a:5700", ("tcp://a:5700",)),
        (["tcp://[::1]:1", "ipc:///run/j"], ("tcp://[::1]:1", "ipc:///run/j")),
        ([], ()),
    ],
)
def test_journal_is_one_address_or_a_list(given: object, journal: tuple[str, ...]) -> None:
    assert read(worker(journal=given)).workers[0].journal == journal


@pytest.mark.parametrize("url", ["HTTPS://h:1", "  https://h:1/", "hTTps://h:1"])
def test_scheme_is_normalised(url: str) -> None:
    config = read(worker(url=url))
    assert config.workers[0].url == "https://h:1"
    # Otherwise the key would be sent unencrypted.
    assert config.tls_of(config.workers[0]) is not None


@pytest.mark.parametrize(
    ("url", "address"), [("http://a", ("a", 80)), ("http://[::1]:9001", ("::1", 9001))]
)
def test_url_has_an_address(url: str, address: tuple[str, int]) -> None:
    assert read(worker(url=url)).workers[0].address == address


def test_worker_tls_is_merged() -> None:
    config = read(
        worker(1),
        worker(2, url="https://h"),
        worker(3, url="https://h:2", tls={"ca_file": "/c"}),
        worker(4, url="https://h:3", tls={}),
        worker_tls={"ca_file": "/a"},
    )
    merged = [config.tls_of(worker) for worker in config.workers]
    assert [tls and str(tls.ca_file) for tls in merged] == [None, "/a", "/c", "/a"]
    assert config.workers[1].address == ("h", 443)


def test_yaml_anchors_are_supported() -> None:
    config = parse(
        "model: m\n"
        "workers:\n"
        "- &a {name: a, role: short, url: 'http://a', max_requests: 5}\n"
        "- {<<: *a, name: b, url: 'http://b'}\n",
        "fleet.yaml",
    )
    assert (config.workers[1].max_requests, config.workers[1].name) == (5, "b")


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"model: \xff")
    for path, words in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "bytes.yaml", "not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load(path)
        assert caught.value.source == str(path)


def test_extra_checks_see_the_valid_blocks() -> None:
    seen: list[list[str]] = []

    def check(draft: PartialConfig) -> list[Problem]:
        seen.append([worker.name for worker in draft.workers.values()])
        return [Problem("workers[1].launch", "no")]

    with pytest.raises(ConfigError) as caught:
        parse(fleet(worker(1, url="x"), worker(2, "b")), "fleet.yaml", also=[check])
    assert seen == [["b"]]
    assert [p.path for p in caught.value.problems] == ["workers[0].url", "workers[1].launch"]


def test_shown_config_is_complete_and_hides_secrets() -> None:
    args = ["--hf-token", "hush1", "--tokenizer", "t", "--x-key=hush2", "--max-num-seqs", "4"]
    env = {"HF_TOKEN": "hush3", "OMP_NUM_THREADS": "1", "DATABASE_URL": "hush4"}
    config = read(
        worker(api_key="hush5", launch={"args": args, "env": env}),
        router={"batches": {"database": "postgresql://u:hush6@h/d?password=hush7"}},
        discovery={"pools": [{"name": "p", "selector": "a=b", "api_key": "hush8"}]},
        tenants=[{"name": "t", "class": "batch", "key_hashes": ["sha256:" + "ab" * 32]}],
    )
    assert config.workers[0].api_key == "hush5"
    assert "hush" not in repr(config.router)
    assert "hush" not in repr(config.discovery)
    assert "hush5" not in repr(config.workers)
    data = shown(config)
    assert "hush" not in str(data)
    assert "abab" not in str(data)
    assert data["router"]["timeouts"]["connect_s"] == 3.0
    assert data["router"]["batches"]["database"] == "postgresql://***@h/d?***"
    launch = data["workers"][0]["launch"]
    assert launch["args"] == [
        "--hf-token", "***", "--tokenizer", "t", "--x-key=***", "--max-num-seqs", "4",
    ]  # fmt: skip
    assert launch["env"] == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "1", "DATABASE_URL": "***"}
    assert data["discovery"]["pools"][0]["api_key"] == "***"
    assert data["tenants"][0]["class"] == "batch"


# Any YAML value under known keys.
KEYS = st.sampled_from(
    ["model", "workers", "name", "url", "role", "launch", "args", "env", "router", "admin", "port"]
) | st.none() | st.integers() | st.text(max_size=3)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_file_is_valid_or_a_config_error(data: dict[Any, Any]) -> None:
    with suppress(ConfigError):
        parse(yaml.safe_dump(data), "fleet.yaml")


BLOCKS = Block.__subclasses__()


@pytest.mark.parametrize("block", BLOCKS, ids=[block.__name__ for block in BLOCKS])
def test_every_setting_has_a_description(block: type[Block]) -> None:
    for name, info in block.model_fields.items():
        assert info.description or isinstance(info.default, Block), name
