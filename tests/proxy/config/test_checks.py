"""Fields that are right by themselves and wrong together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from proxy.config import parse
from proxy.errors import ConfigError


def found(workers: list[dict[str, Any]], **blocks: Any) -> dict[str, str]:
    """Return what is wrong with a fleet, by path."""
    text = yaml.safe_dump({"model": "m", "workers": workers, **blocks})
    try:
        parse(text, "fleet.yaml")
    except ConfigError as error:
        return {problem.path: problem.message for problem in error.problems}
    return {}


def at(port: int, name: str = "", **fields: Any) -> dict[str, Any]:
    return {"name": name or f"w{port}", "url": f"http://127.0.0.1:{port}", **fields}


def launched(*words: str, **fields: Any) -> list[dict[str, Any]]:
    """Return a fleet of one worker that is started with these arguments."""
    return [at(1, launch={"args": [*words]}, **fields)]


def pair(port: int, short: int, **more: Any) -> list[dict[str, Any]]:
    return [
        at(port, role="short", max_model_len=short, **more),
        at(port + 1, role="long", max_model_len=99_999, **more),
    ]


PAIR = [at(1, role="prefill"), at(2, role="decode")]
EVERYWHERE = {"allow_anonymous": True, "host": "::"}
TO_8192 = at(2, role="long", launch={"args": ["--max-model-len", "8192"]})
TO_8K = at(2, role="long", launch={"args": ["--max-model-len", "8k"]})
UNKNOWN = at(3, role="short")
NIXL = {"transfer": "nixl"}


@pytest.mark.parametrize(
    ("workers", "blocks"),
    [
        ([at(1), at(2), {"name": "free", "launch": {}}], {}),
        ([{"name": n, "url": f"http://{n}:8000"} for n in ("a", "b")], {}),
        ([at(8000)], {"router": {**EVERYWHERE, "host": "10.0.0.1"}}),
        ([at(1)], {"router": {"port": 0, "admin": {"port": 0}}}),
        # Flags of policies are free where there are none, and a value may have blanks.
        (launched("--additional-config", "{}"), {}),
        *((launched("--x", each), {}) for each in (
            '--additional-config={"a": 1}', '{"a": -1}', "- x", "a -b c",
        )),
        # A worker may be given less than it holds.
        *((launched(*args, max_model_len=most), {}) for most in (4, 5) for args in (
            ["--max-model-len", "5"], ["--max_model_len=5"],
        )),
        ([at(1, role="short", max_model_len=2048), at(2, role="long")],
         {"routing": {"short_limit": 2048}}),
        ([at(1, role="short"), TO_8192], {"routing": {"short_limit": 8191}}),
        # Where a worker has to be asked, and where there is one pool, no limit is judged.
        ([at(1, role="short", max_model_len=2048), UNKNOWN, at(2, role="long")], {}),
        ([UNKNOWN, TO_8K], {}),
        ([at(1, role="short", max_model_len=2048)], {}),
        (pair(1, 10_000) + pair(3, 16_000, model="b"), {}),
        *((PAIR, {"transfer": transfer, "routing": {"disaggregate_above": above}})
          for above in (500, 0, "auto")
          for transfer in ("nixl", {"connector": "nixl", "mode": "push"}, "lmcache")),
        ([at(1)], {"routing": {"disaggregate_above": "auto"}}),
        (PAIR, {"transfer": {"connector": "lmcache", "addresses": {"w2": "a:1:2"}}}),
    ],
)  # fmt: skip
def test_no_problem(workers: list[dict[str, Any]], blocks: dict[str, Any]) -> None:
    assert found(workers, **blocks) == {}


FLAG, FLAGS = "workers[0].launch.args[1]", "workers[0].launch.args"
ABOVE = "routing.disaggregate_above"


@pytest.mark.parametrize(
    ("workers", "blocks", "path", "words"),
    [
        *(([at(1), {"name": "b", "url": f"http://{host}:1/"}], {}, "workers[1].url",
           "workers[0].url is the same address") for host in ("127.0.0.1", "localhost")),
        ([at(8000)], {}, "workers[0].url", "router.port"),
        ([at(8001)], {}, "workers[0].url", "router.admin.port"),
        ([at(8000)], {"router": EVERYWHERE}, "workers[0].url", ""),
        ([at(1)], {"router": {"admin": {"port": 8000}}}, "router.admin.port", ""),
        ([at(1, "a"), at(2, "b"), at(3, "a")], {}, "workers[2].name",
         "'a': workers[0] has the same name; rename one of them"),
        ([{"name": "a"}], {}, "workers[0].url", ""),
        *(([at(1, launch={"args": ["--x", flag], "policies": {"p": {}}})], {}, FLAG, words)
          for flag, words in (
              ("--port", "the worker's url"), ("--scheduler_cls=x", "policies"),
              ("--additional_config.x=1", "policies"), ("--api-key", "api_key"),
          )),
        *((launched("--x", each), {}, FLAG, f"write it as {'='.join(each.split())}")
          for each in ("--max-model-len 5", "-tp 2 ", "--load_format\ndummy")),
        (launched("--max-model-len", "5", max_model_len=6), {}, FLAGS, ""),
        (launched("--max_model_len=5", max_model_len=6), {}, FLAGS, ""),
        ([at(1, role="short", max_model_len=2048), at(2, role="long")], {}, "routing.short_limit",
         "10000: above the context length of every short worker, 2048 tokens at most (w1)"),
        ([at(1, role="short"), TO_8192], {}, "routing.short_limit",
         "10000: no long request would fit on a long worker, 8192 tokens at most"),
        (pair(1, 10_000) + pair(3, 4_000, model="b"), {}, "routing.short_limit", "w3"),
        ([at(1)], {"router": {"queue": {"max_bytes": 1000}}}, "router.queue.max_bytes", "67108864"),
        (PAIR, {}, "workers[0].role", "as in transfer: nixl"),
        *(([at(1, role=role), at(2)], NIXL, "workers[0].role", f"has the role {other}")
          for role, other in (("prefill", "decode"), ("decode", "prefill"))),
        ([at(1)], NIXL, "transfer", ""),
        ([at(1)], {"routing": {"disaggregate_above": 500}}, ABOVE, ""),
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
def test_one_problem(
    workers: list[dict[str, Any]], blocks: dict[str, Any], path: str, words: str
) -> None:
    [(where, message)] = found(workers, **blocks).items()
    assert where == path
    assert words in message


@pytest.mark.parametrize(
    "sides",
    [
        [{"role": "prefill"}, {"role": "decode", "model": "b"}],
        [{"role": "decode"}, {"role": "prefill", "model": "b"}],
        [{"role": "prefill"}, {"role": "prefill"}],
    ],
)
def test_each_worker_without_another_side_is_told(sides: list[dict[str, str]]) -> None:
    problems = found([at(number, **side) for number, side in enumerate(sides, 1)], transfer="nixl")
    assert list(problems) == ["workers[0].role", "workers[1].role"]
