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


def test_a_sane_fleet_has_no_problem() -> None:
    assert found([at(1), at(2), {"name": "free", "launch": {}}]) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_two_workers_at_one_place(host: str) -> None:
    problems = found([at(1), {"name": "b", "url": f"http://{host}:1/"}])
    assert list(problems) == ["workers[1].url"]
    assert "workers[0].url is at the same place" in problems["workers[1].url"]


def test_one_port_on_two_machines_is_fine() -> None:
    assert found([{"name": n, "url": f"http://{n}:8000"} for n in ("a", "b")]) == {}


def test_a_worker_where_the_router_is() -> None:
    assert "router.port" in found([at(8000)])["workers[0].url"]
    assert "router.admin.port" in found([at(8001)])["workers[0].url"]
    everywhere, elsewhere = {"allow_anonymous": True, "host": "::"}, {"host": "10.0.0.1"}
    assert found([at(8000)], router=everywhere).keys() == {"workers[0].url"}
    assert found([at(8000)], router={**everywhere, **elsewhere}) == {}


def test_the_router_and_its_admin_api_need_two_ports() -> None:
    assert list(found([at(1)], router={"admin": {"port": 8000}})) == ["router.admin.port"]
    assert found([at(1)], router={"port": 0, "admin": {"port": 0}}) == {}


def test_two_workers_of_one_name() -> None:
    problems = found([at(1, "a"), at(2, "b"), at(3, "a")])
    assert problems == {"workers[2].name": "'a': workers[0] is called that too; rename one of them"}


def test_a_worker_that_nobody_starts_needs_a_url() -> None:
    assert list(found([{"name": "a"}])) == ["workers[0].url"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--port", "the worker's url"),
        ("--scheduler_cls=x", "policies"),
        ("--additional_config.x=1", "policies"),
        ("--api-key", "api_key"),
    ],
)
def test_flags_that_up_sets_itself(flag: str, words: str) -> None:
    launch = {"args": ["--x", flag], "policies": {"p": {}}}
    problems = found([at(1, launch=launch)])
    assert list(problems) == ["workers[0].launch.args[1]"]
    assert words in problems["workers[0].launch.args[1]"]


def test_without_policies_their_flags_are_free() -> None:
    assert found([at(1, launch={"args": ["--additional-config", "{}"]})]) == {}


@pytest.mark.parametrize("word", ["--max-model-len 5", "-tp 2 ", "--load_format\ndummy"])
def test_a_flag_and_its_value_are_two_words(word: str) -> None:
    problems = found([at(1, launch={"args": ["--x", word]})])
    assert list(problems) == ["workers[0].launch.args[1]"]
    assert f"write it as {'='.join(word.split())}" in problems["workers[0].launch.args[1]"]


@pytest.mark.parametrize("word", ['--additional-config={"a": 1}', '{"a": -1}', "- x", "a -b c"])
def test_a_value_may_have_blanks(word: str) -> None:
    assert found([at(1, launch={"args": ["--x", word]})]) == {}


@pytest.mark.parametrize("args", [["--max-model-len", "5"], ["--max_model_len=5"]])
def test_two_context_lengths(args: list[str]) -> None:
    assert list(found([at(1, max_model_len=6, launch={"args": args})])) == [
        "workers[0].launch.args"
    ]
    assert found([at(1, max_model_len=5, launch={"args": args})]) == {}
    assert found([at(1, max_model_len=4, launch={"args": args})]) == {}  # it may be given less


def test_nothing_would_be_short_enough_for_the_short_workers() -> None:
    workers = [at(1, role="short", max_model_len=2048), at(2, role="long")]
    (message,) = found(workers).values()
    assert message.startswith("10000: no short worker holds so much, the largest (w1) 2048")
    assert found(workers, routing={"short_limit": 2048}) == {}


def test_nothing_would_be_long() -> None:
    long = at(2, role="long", launch={"args": ["--max-model-len", "8192"]})
    workers = [at(1, role="short"), long]
    (message,) = found(workers).values()
    assert message.startswith("10000: nothing that fits would be long, the largest")
    assert found(workers, routing={"short_limit": 8191}) == {}


def test_limits_are_not_judged_where_a_worker_must_be_asked() -> None:
    unknown = at(3, role="short")
    assert found([at(1, role="short", max_model_len=2048), unknown, at(2, role="long")]) == {}
    flag = at(2, role="long", launch={"args": ["--max-model-len", "8k"]})
    assert found([unknown, flag]) == {}


def test_limits_do_not_matter_where_there_is_one_pool() -> None:
    assert found([at(1, role="short", max_model_len=2048)]) == {}


def test_limits_are_judged_for_each_model() -> None:
    def pair(port: int, short: int, **more: Any) -> list[dict[str, Any]]:
        return [
            at(port, role="short", max_model_len=short, **more),
            at(port + 1, role="long", max_model_len=99_999, **more),
        ]

    assert found(pair(1, 10_000) + pair(3, 16_000, model="b")) == {}
    (message,) = found(pair(1, 10_000) + pair(3, 4_000, model="b")).values()
    assert "w3" in message


def test_a_body_too_large_for_the_queue() -> None:
    problems = found([at(1)], router={"queue": {"max_bytes": 1000}})
    assert list(problems) == ["router.queue.max_bytes"]
    assert "67108864" in problems["router.queue.max_bytes"]


PAIR = [at(1, role="prefill"), at(2, role="decode")]


@pytest.mark.parametrize("transfer", ["nixl", {"connector": "nixl", "mode": "push"}, "lmcache"])
def test_a_prefill_and_a_decode_worker_with_a_connector(transfer: Any) -> None:
    for above in (500, 0, "auto"):
        assert found(PAIR, transfer=transfer, routing={"disaggregate_above": above}) == {}


def test_prefill_needs_something_that_moves_its_cache() -> None:
    (message,) = found(PAIR).values()
    assert message.endswith("as in transfer: nixl")


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_one_side_alone(role: str, other: str) -> None:
    problems = found([at(1, role=role), at(2)], transfer="nixl")
    assert list(problems) == ["workers[0].role"]
    assert f"has the role {other}" in problems["workers[0].role"]
    strangers = [at(1, role=role), at(2, role=other, model="b")]
    assert list(found(strangers, transfer="nixl")) == ["workers[0].role", "workers[1].role"]


def test_a_fleet_of_prefill_workers_only() -> None:
    problems = found([at(1, role="prefill"), at(2, role="prefill")], transfer="nixl")
    assert list(problems) == ["workers[0].role", "workers[1].role"]


def test_a_transfer_between_nobody() -> None:
    assert list(found([at(1)], transfer="nixl")) == ["transfer"]


def test_a_threshold_without_a_transfer() -> None:
    problems = found([at(1)], routing={"disaggregate_above": 500})
    assert list(problems) == ["routing.disaggregate_above"]
    assert found([at(1)], routing={"disaggregate_above": "auto"}) == {}


@pytest.mark.parametrize("above", [-1, -4, "often", 1.5, True, None, [1], "1000"])
def test_a_threshold_that_is_none(above: Any) -> None:
    problems = found(PAIR, transfer="nixl", routing={"disaggregate_above": above})
    (message,) = problems.values()
    assert list(problems) == ["routing.disaggregate_above"]
    assert message.endswith("give a whole number of tokens, 0 or more, or auto")


@pytest.mark.parametrize(
    ("transfer", "path"),
    [
        ({"connector": "mooncake", "mode": "push"}, "transfer.mode"),
        ({"connector": "nixl", "path": "/kv"}, "transfer.path"),
        ({"connector": "nixl", "addresses": {"w1": "a:1"}}, "transfer.addresses"),
        ({"connector": "lmcache", "addresses": {"w2": "a:1"}}, "transfer.addresses.w2"),
        ({"connector": "mooncake", "addresses": {"w9": "http://a:1"}}, "transfer.addresses.w9"),
        ({"connector": "mooncake", "addresses": {"w1": "http://a:65536"}}, "transfer.addresses.w1"),
        ({"connector": "p2p-nccl", "addresses": {"w1": "a:1"}}, "transfer.addresses"),
        ("nixxl", "transfer.connector"),
        ({"connector": "nixl", "lanes": 2}, "transfer.lanes"),
    ],
)
def test_what_a_connector_has_no_use_for_or_lacks(transfer: Any, path: str) -> None:
    problems = found(PAIR, transfer=transfer)
    assert path in problems
    assert len(problems) == 1, problems


def test_addresses_that_will_do() -> None:
    both = {"w1": "a:1", "w2": "b.c:21001"}
    assert found(PAIR, transfer={"connector": "p2p-nccl", "addresses": both}) == {}
    one = {"w2": "a:1:2"}
    assert found(PAIR, transfer={"connector": "lmcache", "addresses": one}) == {}
