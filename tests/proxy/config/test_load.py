"""Loading fleet files; every error names its place and its remedy."""

from __future__ import annotations

from contextlib import suppress
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


def problems(text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "fleet.yaml")
    assert str(caught.value).splitlines() == [f"fleet.yaml: {p}" for p in caught.value.problems]
    return {problem.path: problem.message for problem in caught.value.problems}


def worker(**fields: Any) -> str:
    """Return a file whose only worker has these fields."""
    fields = {"name": "s0", "url": "http://127.0.0.1:9001"} | fields
    return yaml.safe_dump({"model": "m", "workers": [fields]})


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


def test_missing_keys_have_defaults() -> None:
    config = parse("model: m\nworkers: [{name: a, url: 'http://a'}]", "fleet.yaml")
    assert config.workers[0].role == "general"
    assert config.workers[0].address == ("a", 80)
    router = config.router
    assert (router.port, router.admin.port, router.max_body_bytes) == (8000, 8001, 64 << 20)
    assert (router.queue.max_bytes, router.retries.attempts) == (256 << 20, 3)
    assert (config.routing.policy, config.routing.prefix_affinity) == ("adaptive", True)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse(GOOD, "fleet.yaml").model = "other"  # type: ignore[misc]


def test_all_errors_are_reported_at_once() -> None:
    text = """
        model: 7
        workers:
          - {name: s0, role: fast, url: "http://127.0.0.1:9001"}
          - {name: s1, url: "127.0.0.1:9002", max_model_len: 0}
          - {name: s2, url: "http://127.0.0.1:9003", launch: {args: [1]}}
          - {name: s3, url: "http://127.0.0.1:9004"}
          - {name: s3, url: "http://127.0.0.1:9005"}
        router: {queue: {max_wait_s: -1}}
        routing: {polcy: length}
    """
    found = problems(text)
    assert set(found) == {
        "model",
        "workers[0].role",
        "workers[1].url",
        "workers[1].max_model_len",
        "workers[2].launch.args[0]",
        "workers[4].name",
        "router.queue.max_wait_s",
        "routing.polcy",
    }
    assert found["routing.polcy"] == "is not a known key; did you mean policy?"
    assert found["router.queue.max_wait_s"] == (
        "-1: should be greater than 0 (Maximum waiting time of a request in seconds; after it the "
        "response is 429); default 30.0"
    )


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("", "", ["is empty", "begin with model:"]),
        ("- 1", "", ["is [1]", "not keys and values"]),
        ("model: [", "line 1, column 9", ["not YAML"]),
        ("model: a\nmodel: b", "line 2, column 1", ["'model' is given twice"]),
        ("model: a\x00", "", ["not YAML"]),
        ("model: a", "workers", ["is missing", "vLLM servers"]),
        ("model: a\nworkers: []", "workers", ["at least one worker is required"]),
        ("model: a\nworkers: {a: 1}", "workers", ["{a: 1}", "must be a list"]),
        ("model: a\nworkers: [7]", "workers[0]", ["7", "keys and values"]),
        (worker(launch={"env": {"A": 1}}), "workers[0].launch.env.A", ["1", "in quotes"]),
        (worker(launch={"lauch": 1}), "workers[0].launch.lauch", ["valid: model, args"]),
        (worker(role="prefill"), "workers[0].role", ["no worker of its model has the role decode"]),
        (
            worker(role="decode"),
            "workers[0].role",
            ["has the role prefill", "change this role to general"],
        ),
        (
            worker(role="fast"),
            "workers[0].role",
            ["'fast'", "'short', 'long', 'general', 'prefill' or 'decode'"],
        ),
        (worker(name="a b"), "workers[0].name", ["'a b'", "64 characters at most"]),
        (worker(name="a" * 65), "workers[0].name", ["64 characters at most"]),
        (worker(max_requests=True), "workers[0].max_requests", ["true", "whole number"]),
        (worker(model=""), "workers[0].model", ["is empty"]),
        (
            worker() + "routing: {panic_threshold: 1.5}",
            "routing.panic_threshold",
            ["1.5", "should be less than or equal to 1", "0: breakers are never ignored"],
        ),
    ],
)
def test_errors_have_path_and_words(text: str, path: str, words: list[str]) -> None:
    found = problems(text)
    assert list(found) == [path]
    for word in words:
        assert word in found[path]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:9001", "only http://"),
        ("ftp://a:1", "only http:// and https://"),
        ("http://a:1/v1", "leave out '/v1'"),
        ("http://a:1?x=1", "leave out '?...'"),
        ("http://a:99999", "1 to 65535"),
        ("http://a:0", "port 0"),
        ("http://a:x", "1 to 65535"),
        ("http://:80", "no host"),
        ("http://a b", "no host"),
        ("http://a..b", "no host"),
        ("http://[::1", "IPv6"),
    ],
)
def test_bad_urls_are_reported(url: str, words: str) -> None:
    found = problems(worker(url=url))
    assert list(found) == ["workers[0].url"]
    assert repr(url.replace("?x=1", "?***")) in found["workers[0].url"]
    assert words in found["workers[0].url"]


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("127.0.0.1:5700", "write it as tcp://host:port"),
        ("http://a:1", "write it as tcp://host:port"),
        ("tcp://a", "write it as tcp://host:port"),
        ("tcp://a:0", "1 to 65535"),
        ("tcp://a:65536", "1 to 65535"),
        ("tcp://a:x", "1 to 65535"),
        ("tcp://:5700", "no valid host"),
        ("tcp://::1:5700", "no valid host"),
        ("tcp://[::1:5700", "no valid host"),
        ("tcp://a b:5700", "no valid host"),
        ("tcp://*:5700", "can't be connected to"),
        ("tcp://0.0.0.0:5700", "can't be connected to"),
        ("ipc://journal", "ipc:///path"),
        (f"ipc:///{'a' * 107}", "more than 107 bytes"),
    ],
)
def test_bad_journals_are_reported(endpoint: str, words: str) -> None:
    found = problems(worker(journal=endpoint))
    assert list(found) == ["workers[0].journal[0]"]
    assert words in found["workers[0].journal[0]"]


def test_journal_is_one_address_or_a_list() -> None:
    def journal(text: object) -> tuple[str, ...]:
        return parse(worker(journal=text), "fleet.yaml").workers[0].journal

    assert journal("tcp://a:5700") == ("tcp://a:5700",)
    assert journal(["tcp://[::1]:1", "ipc:///run/j"]) == ("tcp://[::1]:1", "ipc:///run/j")
    assert journal([]) == ()
    assert "workers[0].journal" in problems(worker(journal=5))


@pytest.mark.parametrize("url", ["HTTPS://h:1", "  https://h:1/", "hTTps://h:1"])
def test_scheme_is_normalised(url: str) -> None:
    config = parse(worker(url=url), "fleet.yaml")
    assert config.workers[0].url == "https://h:1"
    assert (
        config.tls_of(config.workers[0]) is not None
    )  # otherwise the key would be sent unencrypted


def test_ipv6_url_has_an_address() -> None:
    config = parse(worker(url="http://[::1]:9001"), "fleet.yaml")
    assert config.workers[0].address == ("::1", 9001)


def test_long_value_is_shortened_in_the_error() -> None:
    assert len(problems(worker(role="x" * 5000))["workers[0].role"]) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": 123456},
        {"api_key": "123\n456"},
        {"launch": {"env": {"HF_TOKEN": 123456}}},
        {"url": "http://user:123456@a:1"},
        {"url": f"http://user:{'123456' * 20}@a:1"},
        {"url": "http://a:1/v1?token=123456"},
        {"url": "http://a:1#123456"},
        {"url": "a:1?123456"},
    ],
)
def test_errors_hide_secrets(fields: dict[str, Any]) -> None:
    (message,) = problems(worker(**fields)).values()
    assert "123" not in message
    assert "***" in message


@pytest.mark.parametrize("url", ["https://user:123456@a:1", "https://a:1?token=123456"])
def test_cluster_url_with_a_secret_is_refused(url: str) -> None:
    pools = "pools: [{name: p, selector: {app: v}}]"
    found = problems(f"model: m\ndiscovery: {{kubernetes: {{url: '{url}'}}, {pools}}}")
    [message] = [message for path, message in found.items() if path.endswith("url")]
    assert "123" not in message
    assert "token_file" in message


def test_yaml_anchors_are_supported() -> None:
    config = parse(
        "model: m\n"
        "workers:\n"
        "- &a {name: a, role: short, url: 'http://a', max_requests: 5}\n"
        "- {<<: *a, name: b, url: 'http://b'}\n",
        "fleet.yaml",
    )
    assert config.workers[1].max_requests == 5
    assert config.workers[1].name == "b"


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "bytes.yaml", "not UTF-8"),
    ):
        (tmp_path / "bytes.yaml").write_bytes(b"model: \xff")
        with pytest.raises(ConfigError, match=words) as caught:
            load(path)
        assert caught.value.source == str(path)


SEVERAL_ERRORS = """
model: m
workers:
  - {name: a, url: 'http://h:1', max_requests: 0}
  - {name: a, url: 'http://h:2', launch: {cpus: [-1], args: [--port=3]}}
  - {name: c, url: 'http://127.0.0.1:8000', nonsense: 1}
router: {port: 8000, queue: {max_wait_s: no}, timeouts: 5}
"""


def test_one_error_hides_no_others() -> None:
    """Neither errors of the same block nor of other blocks."""
    assert {*problems(SEVERAL_ERRORS)} == {
        "workers[0].max_requests",
        "workers[1].name",
        "workers[1].launch.cpus[0]",
        "workers[1].launch.args[0]",
        "workers[2].nonsense",
        "workers[2].url",
        "router.queue.max_wait_s",
        "router.timeouts",
    }


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("request_s", "0", "greater than 0"),
        ("request_s", "never", "number"),
        ("request_s", ".inf", "number"),
        ("body_min_bytes_per_s", "-1", "or equal to 0"),
        ("body_min_bytes_per_s", "1.5", "whole number"),
        ("body_min_bytes_per_s", "true", "whole number"),
    ],
)
def test_errors_of_timeouts_name_the_limit(name: str, value: str, limit: str) -> None:
    workers = "workers: [{name: a, url: 'http://h:1'}]"
    found = problems(f"model: m\n{workers}\nrouter: {{timeouts: {{{name}: {value}}}}}")
    assert found.keys() == {f"router.timeouts.{name}"}
    assert limit in found[f"router.timeouts.{name}"]


@pytest.mark.parametrize("wrong", ["role: prefil", "url: x", "model: ''", "name: ' '"])
def test_invalid_worker_block_causes_no_further_errors(wrong: str) -> None:
    """Otherwise a typing error would also report missing decode workers."""
    rest = ", ".join(
        f"{key}: {value}"
        for key, value in (
            ("name", "d0"), ("role", "decode"), ("url", "'http://h:2'"), ("model", "m"),
        )
        if not wrong.startswith(key)
    )  # fmt: skip
    other = "{name: p0, role: prefill, url: 'http://h:9'}"
    found = problems(f"model: m\nworkers: [{other}, {{{wrong}, {rest}}}]\ntransfer: nixl")
    field = wrong.partition(":")[0]
    assert found.keys() == {f"workers[1].{field}"}


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        ({"router": {"prot": 8001}}, "router.prot"),
        ({"router": {"admin": {"host": "10.0.0.1", "keyfile": "k"}}}, "router.admin.keyfile"),
        ({"router": {"admin": {"host": 5, "port": 8000}}}, "router.admin.host"),
        ({"router": {"host": "10.0.0.1", "allow_anonymous": "yes"}}, "router.allow_anonymous"),
        ({"router": {"host": "10.0.0.1"}, "tenats": [{"name": "t"}]}, "tenats"),
        ({"router": {"isolate_caches": True}, "tenats": [{"name": "t"}]}, "tenats"),
        ({"router": {"max_body_bites": 9, "queue": {"max_bytes": 9}}}, "router.max_body_bites"),
        (
            {"router": {"max_body_bytes": 1 << 29, "queue": {"max_byts": 1 << 29}}},
            "router.queue.max_byts",
        ),
        ({"routing": {"short_limits": 100}}, "routing.short_limits"),
        ({"worker_tls": {"cert_file": "c", "keyfile": "k"}}, "worker_tls.keyfile"),
    ],
)
def test_misspelt_field_is_not_also_reported_as_missing(blocks: dict[str, Any], field: str) -> None:
    workers = [
        {"name": "s", "url": "http://h:1", "role": "short", "max_model_len": 4096},
        {"name": "l", "url": "http://h:2", "role": "long", "max_model_len": 8192},
    ]
    blocks = {"routing": {"short_limit": 4096}, **blocks}
    found = problems(yaml.safe_dump({"model": "m", "workers": workers, **blocks}))
    assert found.keys() == {field}


def test_extra_checks_see_the_valid_blocks() -> None:
    seen: list[list[str]] = []

    def check(draft: PartialConfig) -> list[Problem]:
        seen.append([worker.name for worker in draft.workers.values()])
        return [Problem("workers[1].launch", "no")]

    text = "model: m\nworkers: [{name: a, url: x}, {name: b, url: 'http://b'}]"
    with pytest.raises(ConfigError) as caught:
        parse(text, "fleet.yaml", also=[check])
    assert seen == [["b"]]
    assert [p.path for p in caught.value.problems] == ["workers[0].url", "workers[1].launch"]


def test_shown_config_is_complete_and_hides_secrets() -> None:
    args = ["--hf-token", "secret1", "--tokenizer", "t", "--x-key=secret2", "--max-num-seqs", "4"]
    env = {"HF_TOKEN": "secret3", "OMP_NUM_THREADS": "1", "DATABASE_URL": "secret4"}
    text = worker(api_key="secret5", launch={"args": args, "env": env})
    text += "router: {batches: {database: 'postgresql://u:secret6@h/d?password=secret7'}}"
    config = parse(text, "fleet.yaml")
    assert "secret" not in repr(config.router)
    text = yaml.safe_dump(shown(config))
    assert "secret" not in text
    data = shown(config)
    assert data["router"]["timeouts"]["connect_s"] == 3.0
    assert data["router"]["batches"]["database"] == "postgresql://***@h/d?***"
    launch = data["workers"][0]["launch"]
    assert launch["args"] == [
        "--hf-token", "***", "--tokenizer", "t", "--x-key=***", "--max-num-seqs", "4",
    ]  # fmt: skip
    assert launch["env"] == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "1", "DATABASE_URL": "***"}


def test_shown_config_can_be_parsed() -> None:
    config = parse(GOOD, "fleet.yaml")
    assert parse(yaml.safe_dump(shown(config)), "again.yaml") == config


def test_api_key_is_not_in_the_repr() -> None:
    config = parse(worker(api_key="hush"), "fleet.yaml")
    assert config.workers[0].api_key == "hush"
    assert "hush" not in repr(config)


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
