"""Errors of a fleet file: each names its place, the value and a remedy, and hides secrets.

`&` separates the words that a message must have.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from tests.proxy.config.fleet_files import (
    blocks_of,
    check_problem,
    fleet,
    problems,
    problems_of,
    worker,
)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("", "", "is empty & begin with model:"),
        ("- 1", "", "is [1] & not keys and values"),
        ("model: [", "line 1, column 9", "not YAML"),
        ("model: a\nmodel: b", "line 2, column 1", "'model' is given twice"),
        ("model: a\x00", "", "not YAML"),
        ("model: a", "workers", "is missing & vLLM servers"),
        ("model: a\nworkers: []", "workers", "at least one worker is required"),
        ("model: a\ndiscovery: null\nworkers: []", "workers", "at least one worker is required"),
        ("model: a\nworkers: {a: 1}", "workers", "{a: 1} & must be a list"),
        ("model: a\nworkers: [7]", "workers[0]", "7 & keys and values"),
    ],
)
def test_invalid_file(text: str, path: str, words: str) -> None:
    check_problem(problems(text), path, words)


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"launch": {"env": {"A": 1}}}, "launch.env.A", "1 & in quotes"),
        ({"launch": {"env": {"A=B": ""}}}, "launch.env.A=B", "'A=B' & characters"),
        ({"launch": {"lauch": 1}}, "launch.lauch", "valid: model, args"),
        ({"role": "prefill"}, "role", "no worker of its model has the role decode"),
        ({"role": "decode"}, "role", "has the role prefill & change this role to general"),
        ({"role": "fast"}, "role", "'fast' & 'short', 'long', 'general', 'prefill' or 'decode'"),
        ({"name": "a b"}, "name", "'a b' & 64 characters at most"),
        ({"name": "a" * 65}, "name", "64 characters at most"),
        ({"max_requests": True}, "max_requests", "true & whole number"),
        (
            {"url": "https://a", "tls": {"ca_file": 7}},
            "tls.ca_file",
            "7 & must be a path; put it in quotes",
        ),
        ({"model": ""}, "model", "is empty"),
        ({"url": "127.0.0.1:9001"}, "url", "'127.0.0.1:9001' & only http://"),
        ({"url": "ftp://a:1"}, "url", "'ftp://a:1' & only http:// and https://"),
        ({"url": "http://a:1/v1"}, "url", "'http://a:1/v1' & leave out '/v1'"),
        ({"url": "http://a:1?x=1"}, "url", "'http://a:1?***' & leave out '?...'"),
        ({"url": "http://a:99999"}, "url", "'http://a:99999' & 1 to 65535"),
        ({"url": "http://a:0"}, "url", "port 0"),
        ({"url": "http://a:x"}, "url", "1 to 65535"),
        ({"url": "http://:80"}, "url", "no host"),
        ({"url": "http://a b"}, "url", "no host"),
        ({"url": "http://a..b"}, "url", "no host"),
        ({"url": "http://[::1"}, "url", "IPv6"),
        ({"journal": 5}, "journal", "5"),
        ({"journal": "127.0.0.1:5700"}, "journal[0]", "write it as tcp://host:port"),
        ({"journal": "http://a:1"}, "journal[0]", "write it as tcp://host:port"),
        ({"journal": "tcp://a"}, "journal[0]", "write it as tcp://host:port"),
        ({"journal": "tcp://a:0"}, "journal[0]", "1 to 65535"),
        ({"journal": "tcp://a:65536"}, "journal[0]", "1 to 65535"),
        ({"journal": "tcp://a:x"}, "journal[0]", "1 to 65535"),
        ({"journal": "tcp://:5700"}, "journal[0]", "no valid host"),
        ({"journal": "tcp://::1:5700"}, "journal[0]", "no valid host"),
        ({"journal": "tcp://[::1:5700"}, "journal[0]", "no valid host"),
        ({"journal": "tcp://a b:5700"}, "journal[0]", "no valid host"),
        ({"journal": "tcp://*:5700"}, "journal[0]", "can't be connected to"),
        ({"journal": "tcp://0.0.0.0:5700"}, "journal[0]", "can't be connected to"),
        ({"journal": "ipc://journal"}, "journal[0]", "ipc:///path"),
        ({"journal": f"ipc:///{'a' * 107}"}, "journal[0]", "more than 107 bytes"),
        ({"tls": {}}, "tls", "the url is 'http://127.0.0.1:9001'"),
        ({"url": "https://h:1", "launch": {}}, "launch", "http://"),
        ({"url": "https://h:1", "tls": {"cert_file": "x"}}, "tls.key_file", "is missing"),
        (
            {"url": "https://h:1", "tls": {"verify": False}},
            "tls.verify",
            "is not a known key; leave it out; valid: ca_file",
        ),
    ],
)
def test_invalid_worker(fields: dict[str, Any], path: str, words: str) -> None:
    check_problem(problems_of(worker(**fields)), f"workers[0].{path}", words)


REDIS, COLLECTOR = "write it as redis://host:6379/0", "http://collector:4318"
HEADERS, PROCESSES = "OTEL_EXPORTER_OTLP_HEADERS", "from 1 to 64, or auto"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("routing.panic_threshold", 1.5, "1.5 & less than or equal to 1 & 0: breakers are never"),
        ("router.timeouts.request_s", 0, "greater than 0"),
        ("router.timeouts.request_s", "never", "number"),
        ("router.timeouts.request_s", inf, "number"),
        ("router.timeouts.body_min_bytes_per_s", -1, "or equal to 0"),
        ("router.timeouts.body_min_bytes_per_s", 1.5, "whole number"),
        ("router.timeouts.body_min_bytes_per_s", True, "whole number"),
        ("router.max_collected_bytes", 1000, ""),
        ("router.fairness.batch_age_s", 600.0, ""),
        ("router.processes", 0, PROCESSES),
        ("router.processes", 65, PROCESSES),
        ("router.processes", -1, PROCESSES),
        ("router.processes", "many", PROCESSES),
        ("router.processes", "AUTO", PROCESSES),
        ("router.processes", True, PROCESSES),
        ("router.processes", 1.5, PROCESSES),
        ("router.processes", [2], PROCESSES),
        ("router.shared.url", "http://r:6379", REDIS),
        ("router.shared.url", "redis://", REDIS),
        ("router.shared.url", "REDIS://r", REDIS),
        ("router.shared.url", "unix://", REDIS),
        ("router.shared.url", "redis://r:70000", REDIS),
        ("router.shared.url", "redis://:secret@r:6379", "give password_file instead"),
        ("router.shared.url", "redis://r?password=secret", "give password_file instead"),
        ("router.shared.url", "redis://r/0?token=secret", "token is no option here; valid: db"),
        ("router.shared.url", "redis://r?ssl_cert_reqs=none", "ssl_cert_reqs is no option"),
        ("router.shared.url", "rediss://r?db=x", "'x' is no number of a database"),
        ("router.shared.url", "redis://r/0/1", "'0/1' is no number of a database"),
        ("router.admin.host", "0.0.0.0", "router.admin.key_file"),  # noqa: S104
        ("router.admin.host", "::", "router.admin.key_file"),
        ("router.admin.host", "10.0.0.1", "router.admin.key_file"),
        ("router.admin.host", "a.internal", "router.admin.key_file"),
        ("router.continuation", "yes", "'yes' & true, false or text"),
        ("router.batches.path", "", "is empty; leave it out"),
        ("router.tracing.endpoint", "c:4318", COLLECTOR),
        ("router.tracing.endpoint", "c:4318/v1/traces?token=secret", COLLECTOR),
        ("router.tracing.endpoint", "http://me:secret@c/v1/traces", HEADERS),
        ("router.tracing.endpoint", "http://c/v1/traces?token=secret", HEADERS),
        ("router.tracing.endpoint", "http://c/v1/traces?secret", HEADERS),
        ("router.tracing.endpoint", "http://c/v1/traces#secret", HEADERS),
        ("router.tracing.endpoint", "http://me:pw@c/v1/traces?token=secret", HEADERS),
        ("discovery.kubernetes.url", "10.0.0.1:6443", "https://host:port"),
        ("discovery.kubernetes.url", "https://", "https://host:port"),
        ("discovery.kubernetes.url", "https://a/api", "https://host:port"),
        ("discovery.kubernetes.url", "ftp://a", "https://host:port"),
        ("discovery.kubernetes.url", "https://user:secret@a:1", "token_file"),
        ("discovery.kubernetes.url", "https://a:1?token=secret", "token_file"),
    ],
)
def test_invalid_value(path: str, value: object, words: str) -> None:
    blocks = blocks_of(path, value)
    if "discovery" in blocks:
        blocks["discovery"]["pools"] = [{"name": "a", "selector": "a=b"}]  # required
    found = problems_of(**blocks)
    check_problem(found, path, words)
    assert "secret" not in found[path]


@pytest.mark.parametrize(
    ("block", "path", "words"),
    [
        ("router: {shared: {}}", "router.shared.url", ""),
        ("router: {shared: {url: 'redis://r', timeout_s: 0}}", "router.shared.timeout_s", ""),
        ("router: {shared: {url: 'redis://r', namespace: ''}}", "router.shared.namespace", ""),
        ("router: {shared: {url: 'redis://r', ca_file: c}}", "router.shared.ca_file", "rediss://"),
        ("router: {shared: {url: 'redis://r/1', cluster: true}}", "router.shared.url", "but 0"),
        ("router: {shared: {url: 'unix:///r', cluster: true}}", "router.shared.url", "no socket"),
        ("router: {admin: {key_env: A, key_file: b}}", "router.admin.key_env", "key_file is given"),
        ("router: {tracing: {endpoint: 'http://c/', sample: 2}}", "router.tracing.sample", ""),
        ("router: {tracing: {sample: 0.5}}", "router.tracing.endpoint", ""),
        ("router: {tls: {cert_file: x}}", "router.tls.key_file", "is missing"),
        ("worker_tls: {key_file: x}", "worker_tls.cert_file", "is missing"),
    ],
)
def test_invalid_block(block: str, path: str, words: str) -> None:
    check_problem(problems(f"{fleet()}{block}\n"), path, words)


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
    (message,) = problems_of(worker(**fields)).values()
    assert "123" not in message
    assert "***" in message


def test_long_value_is_shortened_in_the_error() -> None:
    assert len(problems_of(worker(role="x" * 5000))["workers[0].role"]) < 200


def test_all_errors_are_reported_at_once() -> None:
    """No error hides another, neither of the same block nor of other blocks."""
    found = problems(
        """
        model: 7
        workers:
          - {name: s0, role: fast, url: "http://127.0.0.1:9001"}
          - {name: s1, url: "127.0.0.1:9002", max_model_len: 0}
          - {name: s2, url: "http://127.0.0.1:9003", launch: {cpus: [-1], args: [--port=3]}}
          - {name: s3, url: "http://127.0.0.1:8000", nonsense: 1}
          - {name: s3, url: "http://127.0.0.1:9005", max_requests: 0}
        router: {port: 8000, queue: {max_wait_s: -1}, timeouts: 5}
        routing: {polcy: length}
        """
    )
    assert set(found) == {
        "model",
        "workers[0].role",
        "workers[1].url",
        "workers[1].max_model_len",
        "workers[2].launch.cpus[0]",
        "workers[2].launch.args[0]",
        "workers[3].url",
        "workers[3].nonsense",
        "workers[4].name",
        "workers[4].max_requests",
        "router.queue.max_wait_s",
        "router.timeouts",
        "routing.polcy",
    }
    assert found["routing.polcy"] == "is not a known key; did you mean policy?"
    assert found["router.queue.max_wait_s"] == (
        "-1: should be greater than 0 (Maximum waiting time of a request in seconds; after it the "
        "response is 429); default 30.0"
    )


@pytest.mark.parametrize("wrong", ["role: prefil", "url: x", "model: ''", "name: ' '"])
def test_invalid_worker_block_causes_no_further_errors(wrong: str) -> None:
    """Otherwise a typing error would also report missing decode workers."""
    field, _, value = wrong.partition(": ")
    decode = worker(2, role="decode", model="m") | {field: value.strip("'")}
    assert list(problems_of(worker(1, role="prefill"), decode, transfer="nixl")) == [
        f"workers[1].{field}"
    ]


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
        ({"routing": 100}, "routing"),
        ({"router": 100}, "router"),
        ({"worker_tls": {"cert_file": "c", "keyfile": "k"}}, "worker_tls.keyfile"),
    ],
)
def test_misspelt_field_is_not_also_reported_as_missing(blocks: dict[str, Any], field: str) -> None:
    workers = (
        worker(1, role="short", max_model_len=4096),
        worker(2, role="long", max_model_len=8192),
    )
    assert list(problems_of(*workers, **({"routing": {"short_limit": 4096}} | blocks))) == [field]
