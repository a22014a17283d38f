"""Checks across fields of the fleet file."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.config.fleet_files import check_problem, problems_of, worker


def launched(*words: str, **fields: Any) -> list[dict[str, Any]]:
    """Return a fleet of one worker that is started with these arguments."""
    return [worker(1, launch={"args": [*words]}, **fields)]


def pair(port: int, short: int, **more: Any) -> list[dict[str, Any]]:
    return [
        worker(port, role="short", max_model_len=short, **more),
        worker(port + 1, role="long", max_model_len=99_999, **more),
    ]


PAIR = [worker(1, role="prefill"), worker(2, role="decode")]
LISTEN_ALL = {"allow_anonymous": True, "host": "::"}
TO_8192 = worker(2, role="long", launch={"args": ["--max-model-len", "8192"]})
TO_8K = worker(2, role="long", launch={"args": ["--max-model-len", "8k"]})
NO_LIMIT = worker(3, role="short")
NIXL = {"transfer": "nixl"}


@pytest.mark.parametrize(
    ("workers", "blocks"),
    [
        ([worker(1), worker(2), {"name": "free", "launch": {}}], {}),
        ([{"name": n, "url": f"http://{n}:8000"} for n in ("a", "b")], {}),
        ([worker(8000)], {"router": {**LISTEN_ALL, "host": "10.0.0.1"}}),
        ([worker(1)], {"router": {"port": 0, "admin": {"port": 0}}}),
        # Policy flags are allowed without policies, and a value may have spaces.
        (launched("--additional-config", "{}"), {}),
        *((launched("--x", text), {}) for text in (
            '--additional-config={"a": 1}', '{"a": -1}', "- x", "a -b c",
        )),
        # A stated limit may be below the worker's.
        *((launched(*args, max_model_len=limit), {}) for limit in (4, 5) for args in (
            ["--max-model-len", "5"], ["--max_model_len=5"],
        )),
        ([worker(1, role="short", max_model_len=2048), worker(2, role="long")],
         {"routing": {"short_limit": 2048}}),
        ([worker(1, role="short"), TO_8192], {"routing": {"short_limit": 8191}}),
        # No check if a worker's limit is unknown or with one pool only.
        ([worker(1, role="short", max_model_len=2048), NO_LIMIT, worker(2, role="long")], {}),
        ([NO_LIMIT, TO_8K], {}),
        ([worker(1, role="short", max_model_len=2048)], {}),
        (pair(1, 10_000) + pair(3, 16_000, model="b"), {}),
        *((PAIR, {"transfer": transfer, "routing": {"disaggregate_above": above}})
          for above in (500, 0, "auto")
          for transfer in ("nixl", {"connector": "nixl", "mode": "push"}, "lmcache")),
        ([worker(1)], {"routing": {"disaggregate_above": "auto"}}),
        (PAIR, {"transfer": {"connector": "lmcache", "addresses": {"w2": "a:1:2"}}}),
    ],
)  # fmt: skip
def test_valid_combinations(workers: list[dict[str, Any]], blocks: dict[str, Any]) -> None:
    assert problems_of(*workers, **blocks) == {}


FLAG, FLAGS = "workers[0].launch.args[1]", "workers[0].launch.args"
ABOVE = "routing.disaggregate_above"


@pytest.mark.parametrize(
    ("workers", "blocks", "path", "words"),
    [
        *(([worker(1), {"name": "b", "url": f"http://{host}:1/"}], {}, "workers[1].url",
           "workers[0].url is the same address") for host in ("127.0.0.1", "localhost")),
        ([worker(8000)], {}, "workers[0].url", "router.port"),
        ([worker(8001)], {}, "workers[0].url", "router.admin.port"),
        ([worker(8000)], {"router": LISTEN_ALL}, "workers[0].url", ""),
        ([worker(1)], {"router": {"admin": {"port": 8000}}}, "router.admin.port", ""),
        ([worker(1, "a"), worker(2, "b"), worker(3, "a")], {}, "workers[2].name",
         "'a': workers[0] has the same name; rename one of them"),
        ([{"name": "a"}], {}, "workers[0].url", ""),
        ([worker(1, journal="tcp://a:1"), worker(2, journal=["tcp://a:2", "tcp://a:1"])], {},
         "workers[1].journal[1]", "'tcp://a:1': workers[0].journal[0] is the same"),
        *(([worker(1, launch={"args": ["--x", flag], "policies": {"p": {}}})], {}, FLAG, words)
          for flag, words in (
              ("--port", "the worker's url"), ("--scheduler_cls=x", "policies"),
              ("--additional_config.x=1", "policies"), ("--api-key", "api_key"),
          )),
        *((launched("--x", text), {}, FLAG, f"write it as {'='.join(text.split())}")
          for text in ("--max-model-len 5", "-tp 2 ", "--load_format\ndummy")),
        (launched("--max-model-len", "5", max_model_len=6), {}, FLAGS, ""),
        (launched("--max_model_len=5", max_model_len=6), {}, FLAGS, ""),
        ([worker(1, role="short", max_model_len=2048), worker(2, role="long")], {},
         "routing.short_limit",
         "10000: above the context length of every short worker, 2048 tokens at most (w1)"),
        ([worker(1, role="short"), TO_8192], {}, "routing.short_limit",
         "10000: no long request would fit on a long worker, 8192 tokens at most"),
        (pair(1, 10_000) + pair(3, 4_000, model="b"), {}, "routing.short_limit", "w3"),
        ([worker(1)], {"router": {"queue": {"max_bytes": 1000}}}, "router.queue.max_bytes",
         "67108864"),
        ([worker(1)], {"router": {"drain_notice_s": 30}}, "router.drain_notice_s",
         "30: is part of drain_s, 30,"),
        (PAIR, {}, "workers[0].role", "as in transfer: nixl"),
        *(([worker(1, role=role), worker(2)], NIXL, "workers[0].role", f"has the role {other}")
          for role, other in (("prefill", "decode"), ("decode", "prefill"))),
        ([worker(1)], NIXL, "transfer", ""),
        ([worker(1)], {"routing": {"disaggregate_above": 500}}, ABOVE, ""),
        *((PAIR, {**NIXL, "routing": {"disaggregate_above": above}}, ABOVE,
           "must be a whole number of tokens, 0 or more, or auto")
          for above in (-1, -4, "often", 1.5, True, None, [1], "1000")),
        *((PAIR, {"transfer": transfer}, path, "") for transfer, path in (
            ({"connector": "mooncake", "mode": "push"}, "transfer.mode"),
            ({"connector": "nixl", "path": "/kv"}, "transfer.path"),
            ({"connector": "nixl", "addresses": {"w1": "a:1"}}, "transfer.addresses"),
            ({"connector": "lmcache", "addresses": {"w2": "a:1"}}, "transfer.addresses.w2"),
            ({"connector": "mooncake", "addresses": {"w9": "http://a:1"}},
             "transfer.addresses.w9"),
            ({"connector": "mooncake", "addresses": {"w1": "http://a:65536"}},
             "transfer.addresses.w1"),
            ("p2p-nccl", "transfer.connector"),
            ("nixxl", "transfer.connector"),
            ({"connector": "nixl", "lanes": 2}, "transfer.lanes"),
        )),
    ],
)  # fmt: skip
def test_invalid_combinations(
    workers: list[dict[str, Any]], blocks: dict[str, Any], path: str, words: str
) -> None:
    check_problem(problems_of(*workers, **blocks), path, words)


@pytest.mark.parametrize(
    "sides",
    [
        [{"role": "prefill"}, {"role": "decode", "model": "b"}],
        [{"role": "decode"}, {"role": "prefill", "model": "b"}],
        [{"role": "prefill"}, {"role": "prefill"}],
    ],
)
def test_each_side_without_its_other_side_is_a_problem(sides: list[dict[str, str]]) -> None:
    workers = [worker(number, **side) for number, side in enumerate(sides, 1)]
    problems = problems_of(*workers, transfer="nixl")
    assert list(problems) == ["workers[0].role", "workers[1].role"]
