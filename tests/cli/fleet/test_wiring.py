"""Fleets with a transfer: what `up` starts, and what it refuses to start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.errors import ConfigError
from proxy.setup.settings import specs
from vllm_sched.cli.fleet import fleet, up, wiring
from vllm_sched.cli.main import main
from vllm_sched.workers import launch, transfer
from vllm_sched.workers.transfer import LAYOUT, SIDE_PORT, Wiring

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a CPU build installed, with NIXL."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setattr(transfer, "_factory", lambda: '"NixlConnector" "ExampleConnector"')
    monkeypatch.setattr(transfer, "_importable", lambda package: package == "nixl")


def end(role: str, *args: str, **told: Any) -> dict[str, Any]:
    return {"name": role[0], "role": role, "launch": {"args": list(args), **told}}


def written(folder: Path, *workers: dict[str, Any], transfer: Any = "nixl") -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "workers": [*workers], "transfer": transfer}))
    return path


def problems(folder: Path, *workers: dict[str, Any], **blocks: Any) -> list[str]:
    path = written(folder, *workers, **blocks)
    with pytest.raises(ConfigError) as refused:
        fleet.read(path)
    return str(refused.value).splitlines()


def test_each_end_is_started_as_what_it_is(tmp_path: Path) -> None:
    general = {"name": "g", "launch": {}}
    config = up.placed(fleet.read(written(tmp_path, end("prefill"), end("decode"), general)))
    made = [up.described(config, each, tmp_path, tmp_path) for each in config.workers]
    roles = []
    for each in made[:2]:
        told = each.command[each.command.index("--kv-transfer-config") + 1]
        roles.append(json.loads(told)["kv_role"])
        blocks = [i for i, word in enumerate(each.command) if word == "--block-size"]
        assert each.command[blocks[-1] + 1] == "128"
    assert roles == ["kv_producer", "kv_consumer"]
    assert "--kv-transfer-config" not in made[2].command


@pytest.mark.parametrize(
    ("args", "slots"),
    [
        (["--max-num-seqs=16"], 16),
        (["--max_num_seqs", "8", "--max-num-seqs=16"], 16),
        (["--max-num-seqs=16", "-dp", "2"], 32),  # each of its engines has as many
        (["--max-num-seqs=0"], None),
        (["--max-num-batched-tokens=512"], None),
    ],
)
def test_the_router_knows_how_many_seats_a_worker_is_launched_with(
    tmp_path: Path, args: list[str], slots: int | None
) -> None:
    whole = {"name": "g", "launch": {"args": args}}
    config = fleet.read(written(tmp_path, end("prefill", *args), end("decode", *args), whole))
    assert [(spec.slots, spec.max_requests) for spec in specs(config)] == [(slots, None)] * 3
    said = [wiring.wiring_of(config, each).said for each in config.workers]
    told = f", {slots} slots for hand-overs and other requests"
    assert [each.endswith(told) for each in said] == [False, slots is not None, False]


def test_one_that_says_what_all_load_agrees_with_one_that_does_not(tmp_path: Path) -> None:
    fleet.read(written(tmp_path, end("prefill", model="m"), end("decode")))


def test_the_environment_given_reaches_it_and_wins(tmp_path: Path) -> None:
    config = fleet.read(written(tmp_path, end("prefill", env={SIDE_PORT: "5999"}), end("decode")))
    ports = [wiring.wiring_of(config, each).env[SIDE_PORT] for each in config.workers]
    assert ports[0] == "5999" != ports[1]


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (end("prefill"), end("decode", "--block-size=32"), "launch.args: --block-size 32"),
        (end("prefill", "--dtype=a"), end("decode", "--dtype", "b"), "launch.args: --dtype b"),
        (
            end("prefill", "--kv-cache-dtype=fp8"),
            end("decode"),
            "launch.args: --kv-cache-dtype (none): workers[0] (p) has fp8",
        ),
        (
            end("prefill", "--revision=abc", "--quantization=fp8"),
            end("decode", "--revision=def", "--quantization=fp8"),
            "launch.args: --revision def: workers[0] (p) has abc",
        ),
        (
            end("prefill"),
            end("decode", "--chat-template=/x/other.jinja"),
            "launch.args: --chat-template /x/other.jinja: workers[0] (p) has none",
        ),
        (end("prefill", model="org/a"), end("decode", model="org/b"), "launch.model: org/b"),
        (
            end("prefill", env={LAYOUT: "NHD"}),
            end("decode", env={LAYOUT: "HND"}),
            f"launch.env.{LAYOUT}: LBHNC: workers[0] (p) has LBNHC",
        ),
        (
            end("prefill", env={LAYOUT: "NHD"}),
            end("decode"),
            f"launch.env.{LAYOUT}: LBHNC: workers[0] (p) has LBNHC",
        ),
        (
            end("prefill", env={SIDE_PORT: "5600"}),
            end("decode", env={SIDE_PORT: "5600"}),
            f"launch.env.{SIDE_PORT}: 5600: workers[0] has the same",
        ),
        (
            end("prefill"),
            end("decode", '--kv-transfer-config={"kv_connector": "X", "kv_role": "kv_both"}'),
            "the connector 'X': transfer is nixl, which needs NixlConnector",
        ),
        (
            end("prefill"),
            end("decode", "-sc.method=mtp", "-sc.num_speculative_tokens=2"),
            'launch.args: --speculative-config {"method": "mtp"}: workers[0] (p) has none',
        ),
        (
            end("prefill"),
            end("decode", "--disable-hybrid-kv-cache-manager"),
            "launch.args: --disable-hybrid-kv-cache-manager yes: workers[0] (p) has none",
        ),
        (
            end("prefill"),
            end(
                "decode",
                '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"}',
            ),
            "kv_role 'kv_producer': a decode worker needs kv_consumer",
        ),
        (
            end("prefill"),
            end(
                "decode",
                '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both", '
                '"kv_connector_extra_config": {"kv_lease_duration": 20}}',
            ),
            "kv_lease_duration 20: transfer.lease_s is 30",
        ),
        (
            end("prefill"),
            end("decode", "--kv-transfer-config={oops"),
            "--kv-transfer-config is not a JSON object",
        ),
        (
            end("prefill"),
            end("decode", env={SIDE_PORT: "soon"}),
            f"launch.env.{SIDE_PORT}: 'soon' is not a port",
        ),
        (
            end("prefill"),
            end("decode", env={SIDE_PORT: "9" * 5000}),
            "9' is not a port",
        ),
        (
            end("prefill"),
            end("decode", env={SIDE_PORT: ""}),
            f"launch.env.{SIDE_PORT}: '' is not a port",
        ),
    ],
)
def test_ends_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], said: str
) -> None:
    (line,) = problems(tmp_path, prefill, decode)
    assert "workers[1]." in line
    assert said in line
    assert ";" in line  # what to do about it


OWN = '--kv-transfer-config={"kv_connector": "%s", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("mode", "named", "wanted"),
    [
        ("push", "NixlPushConnector", None),
        ("push", "NixlConnector", "nixl with mode: push, which needs NixlPushConnector"),
        ("push", "NixlPullConnector", "nixl with mode: push, which needs NixlPushConnector"),
        ("pull", "NixlPushConnector", "nixl, which needs NixlConnector"),
        ("pull", "NixlPullConnector", None),
        ("pull", "NixlConnector", None),
    ],
)
def test_one_end_that_pushes_and_one_that_pulls_are_refused(
    tmp_path: Path, mode: str, named: str, wanted: str | None
) -> None:
    ends, moved = (end("prefill", OWN % named), end("decode")), {"connector": "nixl", "mode": mode}
    if wanted is None:
        fleet.read(written(tmp_path, *ends, transfer=moved))
        return
    (line,) = problems(tmp_path, *ends, transfer=moved)
    assert f"workers[0].launch.args: --kv-transfer-config with the connector '{named}'" in line
    assert f"transfer is {wanted};" in line


def test_what_the_router_goes_by_is_no_longer_than_what_a_worker_keeps(tmp_path: Path) -> None:
    own = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"%s}'
    longer = own % ', "kv_connector_extra_config": {"kv_lease_duration": 60}'
    ends = end("prefill", "--kv-transfer-config", longer), end("decode")
    fleet.read(written(tmp_path, *ends, transfer={"connector": "nixl", "lease_s": 60}))
    ends = end("prefill", "--kv-transfer-config", own % ""), end("decode")
    (line,) = problems(tmp_path, *ends, transfer={"connector": "nixl", "lease_s": 60})
    assert "kv_lease_duration 30: transfer.lease_s is 60" in line


def test_no_policy_cuts_what_shared_storage_stores(tmp_path: Path) -> None:
    cut = end("prefill", policies={"long_prompt": {}})
    moved = {"connector": "shared-storage", "path": "/kv"}
    (line,) = problems(tmp_path, cut, end("decode"), transfer=moved)
    assert "workers[0].launch.policies: long_prompt" in line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--enable-chunked-prefill"], "--enable-chunked-prefill: shared-storage keeps"),
        (
            ["--max_model_len", "4096", "--max-num-batched-tokens=512"],
            "--max-num-batched-tokens 512: --max-model-len is 4096",
        ),
        (["--max-model-len=4096", "--max-num-batched-tokens=4096"], None),
        (["--max-model-len=4096"], None),
        (["--max-num-batched-tokens=512"], None),  # nobody knows here how long they may be
    ],
)
def test_nor_do_flags(tmp_path: Path, args: list[str], said: str | None) -> None:
    ends = end("prefill", *args), end("decode")
    moved = {"connector": "shared-storage", "path": "/kv"}
    if said is None:
        fleet.read(written(tmp_path, *ends, transfer=moved))
        return
    (line,) = problems(tmp_path, *ends, transfer=moved)
    assert f"workers[0].launch.args: {said}" in line


def test_shared_storage_needs_a_folder(tmp_path: Path) -> None:
    ends = end("prefill"), end("decode")
    (line,) = problems(tmp_path, *ends, transfer="shared-storage")
    assert "transfer.path: is missing" in line
    own = '--kv-transfer-config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
    ends = end("prefill", own), end("decode", own)
    fleet.read(written(tmp_path, *ends, transfer="shared-storage"))  # its own flags say where


def test_ends_that_fit_are_not(tmp_path: Path) -> None:
    own = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    fleet.read(
        written(
            tmp_path,
            end("prefill", "--block-size=64", "--kv-transfer-config", own),
            end("decode", "--block-size", "64"),
            {"name": "g", "launch": {"args": ["--block-size=32", "--dtype=a"]}},
        )
    )


TURNED_ROUND = [
    "--kv-transfer-config.kv_connector=NixlConnector",
    "--kv-transfer-config.kv_role=kv_consumer",
    "--kv-transfer-config.enable_permute_local_kv=true",
]


@pytest.mark.parametrize(
    ("one", "other", "flags"),
    [
        ({}, {LAYOUT: "HND"}, []),  # which NIXL's workers have where none is set
        ({LAYOUT: "LBHNC"}, {LAYOUT: "HND"}, []),
        ({LAYOUT: "HND"}, {LAYOUT: "NHD"}, TURNED_ROUND),
    ],
)
def test_layouts_that_are_equal_or_turned_round_are_no_matter(
    tmp_path: Path, one: dict[str, str], other: dict[str, str], flags: list[str]
) -> None:
    fleet.read(written(tmp_path, end("prefill", env=one), end("decode", *flags, env=other)))


def test_workers_of_another_model_may_differ(tmp_path: Path) -> None:
    others = [
        {**end(role, "--block-size=32"), "name": f"{role}2", "model": "n"}
        for role in ("prefill", "decode")
    ]
    fleet.read(written(tmp_path, end("prefill"), end("decode"), *others))


def test_those_of_one_model_may_not_though_only_one_names_it(tmp_path: Path) -> None:
    named = {**end("decode", "--block-size=64"), "model": "m"}
    (line,) = problems(tmp_path, end("prefill", "--block-size=32"), named)
    assert "workers[1].launch.args: --block-size 64" in line


def test_a_connector_that_vllm_lacks_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_factory", lambda: '"ExampleConnector" "NixlPushConnector"')
    assert main(["up", str(written(tmp_path, end("prefill"), end("decode")))]) == 2
    line = capsys.readouterr().err
    assert "transfer: 'nixl': the vLLM installed here has no NixlConnector" in line
    assert "choose from shared-storage" in line


@pytest.mark.parametrize(
    ("addresses", "own", "told"),
    [({}, "9001", "8998"), ({"p": "http://127.0.0.1:9001"}, "8998", "9001"), ({}, "", "8998")],
)
def test_a_bootstrap_server_listens_where_decode_workers_are_told(
    tmp_path: Path, addresses: dict[str, str], own: str, told: str
) -> None:
    moved = {"connector": "mooncake", "addresses": addresses}
    prefill = end("prefill", env={transfer.BOOTSTRAP_PORT: own})
    (line,) = problems(tmp_path, prefill, end("decode"), transfer=moved)
    path = "workers[0].launch.env.VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert f"{path}: {own!r}: decode workers use port {told}; leave it out" in line
    assert f"transfer.addresses, as in p: http://127.0.0.1:{own or '8999'}" in line
    prefill = end("prefill", env={transfer.BOOTSTRAP_PORT: told})
    fleet.read(written(tmp_path, prefill, end("decode"), transfer=moved))


@pytest.mark.parametrize(
    ("env", "names_one"),
    [
        ({"LMCACHE_CHUNK_SIZE": "256"}, False),
        ({"LMCACHE_ENABLE_PD": "False"}, False),
        ({"LMCACHE_REMOTE_URL": ""}, False),
        ({"LMCACHE_ENABLE_PD": "True"}, True),
        ({"LMCACHE_CONFIG_FILE": "/d.yaml"}, True),
    ],
)
@pytest.mark.parametrize("exported", [True, False])
def test_a_store_is_named_where_workers_read_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    names_one: bool,
    exported: bool,
) -> None:
    """In the file, or in the environment that `up` hands on; not all of LMCache's is a store."""
    for name, value in env.items() if exported else ():
        monkeypatch.setenv(name, value)
    own: dict[str, Any] = {} if exported else {"env": env}
    ends = end("prefill", **own), end("decode", **own)
    if names_one:
        fleet.read(written(tmp_path, *ends, transfer="lmcache"))
        return
    lines = problems(tmp_path, *ends, transfer="lmcache")
    assert ["names no store" in line for line in lines] == [True, True]


def test_workers_of_lmcache_share_a_store(tmp_path: Path) -> None:
    """Which is known to its own settings; they name a file of it, or all of it."""
    ends = end("prefill"), end("decode", env={"LMCACHE_CONFIG_FILE": "/d.yaml"})
    (line,) = problems(tmp_path, *ends, transfer="lmcache")
    assert "workers[0].launch.env: names no store" in line
    ends = end("prefill", env={"LMCACHE_REMOTE_URL": "lm://10.0.0.9:65432"}), ends[1]
    config = up.placed(fleet.read(written(tmp_path, *ends, transfer="lmcache")))
    made = [up.described(config, each, tmp_path, tmp_path) for each in config.workers]
    told = [each.command[each.command.index("--kv-transfer-config") + 1] for each in made]
    assert [(json.loads(each)["kv_connector"], json.loads(each)["kv_role"]) for each in told] == [
        ("LMCacheConnectorV1", "kv_producer"),
        ("LMCacheConnectorV1", "kv_consumer"),
    ]


def test_workers_of_mooncake_are_started_to_be_found(tmp_path: Path) -> None:
    """By the names and ports that the router tells decode workers."""
    second = {**end("prefill"), "name": "p2"}
    both = end("prefill"), second, end("decode")
    (line,) = problems(tmp_path, *both, transfer="mooncake")
    assert "transfer.addresses: 'p2' would listen on port 8998, like 'p'" in line
    told = {"connector": "mooncake", "addresses": {"p2": "http://127.0.0.1:9001"}}
    config = up.placed(fleet.read(written(tmp_path, *both, transfer=told)))
    made = [wiring.wiring_of(config, each) for each in config.workers]
    flags = [json.loads(each.flags[each.flags.index("--kv-transfer-config") + 1]) for each in made]
    assert [each.get("engine_id") for each in flags] == ["p", "p2", None]
    assert [each["kv_role"] for each in flags] == ["kv_producer", "kv_producer", "kv_consumer"]
    named = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert [each.env for each in made] == [{named: "8998"}, {named: "9001"}, {}]
    assert ["restart its decode" in each.said for each in made] == [True, True, False]
    many = end("prefill", "-dp", "2"), end("decode")
    (line,) = problems(tmp_path, *many, transfer="mooncake")
    assert (
        "workers[0].launch.args: --data-parallel-size 2: vLLM appends a number to each engine's id"
        in line
    )


@pytest.mark.parametrize("connector", ["mooncake", "lmcache"])
def test_workers_that_somebody_else_starts_need_say_nothing(tmp_path: Path, connector: str) -> None:
    urls = [
        {"name": role, "role": role, "url": f"http://127.0.0.1:900{number}"}
        for number, role in enumerate(("prefill", "decode"))
    ]
    fleet.read(written(tmp_path, *urls, transfer=connector))


def test_a_mooncake_engine_is_called_what_decode_workers_look_for(tmp_path: Path) -> None:
    own = '--kv-transfer-config={"kv_connector": "MooncakeConnector", "kv_role": "kv_both"%s}'
    decode = end("decode", own % "")
    (line,) = problems(tmp_path, end("prefill", own % ""), decode, transfer="mooncake")
    assert "workers[0].launch.args: --kv-transfer-config with engine_id None" in line
    prefill = end("prefill", own % ', "engine_id": "p"')
    fleet.read(written(tmp_path, prefill, decode, transfer="mooncake"))


def test_a_package_that_is_missing_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_importable", lambda package: False)  # noqa: ARG005
    assert main(["up", str(written(tmp_path, end("prefill"), end("decode")))]) == 2
    line = capsys.readouterr().err
    assert "transfer: 'nixl': the package nixl is not installed here" in line
    assert "choose from shared-storage" in line


@pytest.mark.parametrize("connector", ["mooncake", "lmcache"])
@pytest.mark.parametrize("own", [True, False])
def test_so_is_that_of_a_connector_that_vllm_itself_lists(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    connector: str,
    own: bool,
) -> None:
    """Whoever writes the flag."""
    pytest.importorskip("vllm")
    monkeypatch.undo()
    monkeypatch.setattr(transfer, "_importable", lambda package: package == "nixl")
    config = {"kv_connector": transfer.class_of(connector), "kv_role": "kv_both", "engine_id": "p"}
    args = [f"--kv-transfer-config={json.dumps(config)}"] if own else []
    env = {"LMCACHE_CONFIG_FILE": "/lmcache.yaml"}
    ends = end("prefill", *args, env=env), end("decode", *args, env=env)
    assert main(["up", str(written(tmp_path, *ends, transfer=connector))]) == 2
    line = capsys.readouterr().err
    assert f"transfer: {connector!r}: the package {connector} is not installed here" in line
    assert "choose from nixl, shared-storage" in line


def test_without_a_transfer_a_decode_worker_is_a_plain_one(tmp_path: Path) -> None:
    config = fleet.read(written(tmp_path, {"name": "g", "launch": {}}, transfer=None))
    worker = config.workers[0].model_copy(update={"role": "decode"})
    assert wiring.wiring_of(config, worker) == Wiring()
