"""`vllm-sched check` and `router`, and the example fleets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import proxy.app
from proxy.config import FleetConfig, parse
from proxy.errors import ConfigError
from tests.cli.fleet.conftest import FLEET, FleetFile
from tests.cli.program import Program

EXAMPLES = {
    path.stem: path for path in sorted(Path(__file__).parents[3].glob("deploy/fleets/*.yaml"))
}


def with_launch(**launch: Any) -> dict[str, Any]:
    return {"model": "m", "workers": [{"name": "a", "launch": launch}], "routing": {}}


def problem_paths(program: Program, path: Path) -> list[str]:
    """Return the places that `check` reports, in order."""
    printed = program("check", path, status=2)
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert all(line.startswith(f"vllm-sched check: {path}: ") for line in lines)
    return [line.split(": ")[2].split(" (")[0] for line in lines]


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=EXAMPLES)
def test_example_fleets_are_valid(path: Path, program: Program) -> None:
    printed = program("check", path).out
    assert f"{path}: good" in printed
    assert "\nnote" not in printed


def test_check_shows_what_will_run(fleet_file: FleetFile, program: Program) -> None:
    launch = {"policies": {"long_prompt": {}}, "cpus": [0, 1]}
    workers: Any = FLEET["workers"]
    more = {"name": "l1", "role": "long", "launch": launch}
    lines = program("check", fleet_file(workers=[*workers, more])).out.splitlines()
    assert lines[1] == "router  http://127.0.0.1:8000, admin http://127.0.0.1:8001"
    assert lines[2] == "routing adaptive, long above 1500 tokens"
    assert lines[5].split() == ["s0", "short", "http://127.0.0.1:9001", "tiny", "2048", "external"]
    assert lines[7].endswith("tiny   from worker  up (long_prompt, cpus 0 1)")
    assert "a free port" in lines[7]


def test_check_lists_pools_in_place_of_workers(fleet_file: FleetFile, program: Program) -> None:
    pools = [
        {"name": "s", "role": "short", "selector": "a=b", "max_model_len": 20000},
        {"name": "l", "role": "long", "dns": "long.llm", "model": "other"},
    ]
    printed = program("check", fleet_file(model="m", workers=[], discovery={"pools": pools})).out
    assert [" ".join(line.split()) for line in printed.splitlines()[-2:]] == [
        "s: any short EndpointSlices a=b m 20000 discovered",
        "l: any long dns long.llm other from worker discovered",
    ]


@pytest.mark.parametrize(("limit", "noted"), [(1024, False), (1025, True)])
def test_check_notes_a_short_limit_beyond_a_context(
    fleet_file: FleetFile, program: Program, limit: int, noted: bool
) -> None:
    last = program("check", fleet_file(routing={"short_limit": limit})).out.splitlines()[-1]
    note = "note    s0 holds 2048 tokens, and routing.short_limit is 1025:"
    assert last.startswith(note) is noted
    assert ("lower the limit to 1024" in last) is noted


@pytest.mark.parametrize(
    ("limits", "max_requests", "noted"),
    [({}, None, True), ({"concurrency": 8}, None, False), ({}, 16, False)],
)
def test_check_notes_tenants_and_workers_without_limits(
    fleet_file: FleetFile,
    program: Program,
    limits: dict[str, int],
    max_requests: int | None,
    noted: bool,
) -> None:
    tenants = [
        {"name": f"t{n}", "key_hashes": [f"sha256:{n:064x}"], "limits": limits} for n in range(9)
    ]
    of_fleet: Any = FLEET["workers"]
    workers = [{**each, "max_requests": max_requests} for each in of_fleet]
    last = program("check", fleet_file(tenants=tenants, workers=workers)).out.splitlines()[-1]
    names = "note    tenants t0, t1, t2, t3, t4 and 4 more have no limits.concurrency, and workers"
    assert last.startswith(names) is noted


def test_print_config_has_every_default_and_no_secret(
    fleet_file: FleetFile, program: Program
) -> None:
    fleet = with_launch(env={"HF_TOKEN": "hush"})
    fleet["workers"][0]["api_key"] = "hush"
    printed = program("check", fleet_file(**fleet), "--print-config").out
    assert "hush" not in printed
    again = parse(printed, "printed")
    assert again.router.timeouts.connect_s == 3.0
    assert again.workers[0].api_key == "***"


def test_router_runs_the_fleet_file(
    fleet_file: FleetFile, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[Path, FleetConfig]] = []
    reads: list[Callable[[Path], FleetConfig]] = []

    def run(path: Path, *, config: FleetConfig, read: Callable[[Path], FleetConfig]) -> int:
        ran.append((path, config))
        reads.append(read)
        return 7

    monkeypatch.setattr(proxy.app, "run", run)
    path = fleet_file()
    program("router", path, status=7)
    ((source, config),) = ran
    assert source == path
    assert [worker.name for worker in config.workers] == ["s0", "l0"]
    # A reload checks the file in the same way, launch blocks included.
    bad = fleet_file(**with_launch(policies={"no_such_policy": {}}))
    with pytest.raises(ConfigError, match=r"workers\[0\]\.launch\.policies \(a\): .*no_such"):
        reads[0](bad)


def test_router_requires_a_url_for_every_worker(fleet_file: FleetFile, program: Program) -> None:
    line = program.refusal("router", fleet_file(**with_launch()))
    assert "workers[0].url: is missing" in line
    assert "vllm-sched up" in line


@pytest.mark.parametrize("command", ["router", "up", "check"])
def test_missing_file_is_refused(command: str, program: Program) -> None:
    line = program.refusal(command, "/no/such.yaml")
    assert line.startswith(f"vllm-sched {command}: /no/such.yaml: can't be read")


def test_check_names_each_problem_once(
    fleet_file: FleetFile, program: Program, tmp_path: Path
) -> None:
    none = str(tmp_path / "none")
    tls = {"tls": {"ca_file": none}}
    launch = {"policies": {"nosuch": {}, "long_prompt": {"max_wait_s": -1}}}
    workers = [{"name": "s0"}, {"name": "w", "role": "any", "url": "https://h:1", **tls}]
    workers.append({"name": "l0", "role": "long", "url": "https://h:2", **tls})
    workers.append({"name": "a", "launch": launch})
    router = {"drain_s": -1, "tls": {"cert_file": none, "key_file": none}}
    path = fleet_file(workers=workers, router=router, tenants=[{"name": "t"}], routing={})
    assert sorted(problem_paths(program, path)) == [
        "router.drain_s", "router.tls.cert_file", "tenants[0]", "workers[0].url", "workers[1].role",
        "workers[1].tls.ca_file", "workers[2].tls.ca_file", "workers[3].launch.policies",
        "workers[3].launch.policies",
    ]  # fmt: skip
    problems = program("check", path, status=2).err
    assert "unknown policy 'nosuch'; valid: " in problems
    assert "long_prompt.max_wait_s=-1" in problems


@pytest.mark.parametrize(
    ("policies", "args", "error"),
    [
        ({"prefill_first": {}, "rotation": {}}, [], "prefill_first and rotation contradict"),
        ({"deferred_prefill": {"departures": 9}}, ["--max-num-seqs=8"], "max_num_seqs=8"),
        (
            {"long_prompt": {"long_prefill_token_threshold": 5000}},
            ["--max-model-len", "4096"],
            "exceeds max_model_len=4096",
        ),
    ],
)
def test_policies_that_the_worker_would_refuse_are_refused(
    fleet_file: FleetFile, program: Program, policies: object, args: list[str], error: str
) -> None:
    path = fleet_file(**with_launch(policies=policies, args=args))
    for command in ("check", "up"):
        line = program.refusal(command, path)
        assert "workers[0].launch.policies (a): " in line
        assert error in line


def test_policies_are_compared_with_the_context_of_the_engine(
    fleet_file: FleetFile, program: Program
) -> None:
    """The router may be told of less."""
    policies = {"long_prompt": {"long_prefill_token_threshold": 5000}}
    made = with_launch(policies=policies, args=["--max-model-len", "8192"])
    [worker] = made["workers"]
    program("check", fleet_file(**made | {"workers": [worker | {"max_model_len": 4096}]}))


def test_check_names_every_mistake_in_one_run(
    fleet_file: FleetFile, program: Program, tmp_path: Path
) -> None:
    """Each mistake is beside one that might hide it."""
    none = str(tmp_path / "none")
    tls = {"cert_file": none, "key_file": none}
    launch = {"args": ["--port=3"], "policies": {"nosuch": {}}}
    path = fleet_file(
        model="m",
        modle="m",
        workers=[
            {"name": "a b", "url": "https://h:1", "tls": {"ca_file": none}},
            {"name": "b", "url": "x", "launch": launch},
            {"name": "b", "url": "http://h:3", "max_requests": 0},
            {"name": "d", "url": "http://h:3", "role": "shrt", "tls": {"cert_file": none}},
            {"name": "e", "url": "http://127.0.0.1:8001"},
        ],
        discovery={"pools": [{"name": "c d", "dns": "x", "port": "http"}], "dns_every_s": 0},
        tenants=[
            {"name": "t u", "keys_file": none},
            {"name": "v", "keys_env": "NO_SUCH_KEYS", "weight": 0},
            {"name": "v", "models": []},
        ],
        worker_tls={"ca_file": none},
        router={
            "port": 70000,
            "tls": tls,
            "admin": {"port": 8001, "key_file": none, "tls": tls},
            "journal": {"key_file": none},
            "queue": {"max_bytes": 1000, "max_wait": 5},
            "fairness": {"batch_age_s": 9999},
            "batches": {"path": 5},
            "allow_anonymous": True,
        },
        routing={"policy": "fastest"},
        transfer={"connector": "nixl", "mode": "pusch", "path": "/kv"},
    )
    assert sorted(problem_paths(program, path)) == [
        "discovery.dns_every_s", "discovery.pools[0].name", "discovery.pools[0].port", "modle",
        "router.admin.key_file", "router.admin.tls.cert_file", "router.allow_anonymous",
        "router.batches.path", "router.fairness.batch_age_s", "router.journal.key_file",
        "router.port", "router.queue.max_bytes", "router.queue.max_wait", "router.tls.cert_file",
        "routing.policy", "tenants[0].keys_file", "tenants[0].name", "tenants[1].keys_env",
        "tenants[1].weight", "tenants[2]", "tenants[2].models", "tenants[2].name", "transfer.mode",
        "transfer.path", "worker_tls.ca_file", "workers[0].name", "workers[0].tls.ca_file",
        "workers[1].launch.args[0]", "workers[1].launch.policies", "workers[1].url",
        "workers[2].max_requests", "workers[2].name", "workers[3].role", "workers[3].tls",
        "workers[3].tls.key_file", "workers[3].url", "workers[4].url",
    ]  # fmt: skip


def test_check_shows_tenants_or_anonymous_access(program: Program, tmp_path: Path) -> None:
    anonymous = tmp_path / "anybody.yaml"
    open_to_all = "host: 0.0.0.0\n  allow_anonymous: true "
    anonymous.write_text(EXAMPLES["two-gpus"].read_text().replace("host: 127.0.0.1 ", open_to_all))
    for path, line in (
        (EXAMPLES["shared"], "tenants chat (interactive), search (standard), nightly (batch)"),
        (EXAMPLES["two-gpus"], "tenants none: any client on this machine may use it"),
        (anonymous, "tenants none: any client that reaches the router may use it"),
    ):
        assert line in program("check", path).out.splitlines()
