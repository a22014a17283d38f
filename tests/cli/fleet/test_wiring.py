"""Fleets with a transfer: the launched workers, and refusals."""

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
    """Pretend that a CPU build with NIXL is installed."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setattr(transfer, "_factory", lambda: '"NixlConnector" "ExampleConnector"')
    monkeypatch.setattr(transfer, "_importable", lambda package: package == "nixl")


def entry(role: str, *args: str, **options: Any) -> dict[str, Any]:
    return {"name": role[0], "role": role, "launch": {"args": list(args), **options}}


def written(folder: Path, *workers: dict[str, Any], transfer: Any = "nixl") -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "workers": [*workers], "transfer": transfer}))
    return path


def problems(folder: Path, *workers: dict[str, Any], **blocks: Any) -> list[str]:
    path = written(folder, *workers, **blocks)
    with pytest.raises(ConfigError) as refused:
        fleet.read(path)
    return str(refused.value).splitlines()


def test_workers_are_launched_with_their_kv_role(tmp_path: Path) -> None:
    general = {"name": "g", "launch": {}}
    config = up.assign_ports(
        fleet.read(written(tmp_path, entry("prefill"), entry("decode"), general))
    )
    made = [up.make_worker(config, worker, tmp_path, tmp_path) for worker in config.workers]
    roles = []
    for worker in made[:2]:
        config_json = worker.command[worker.command.index("--kv-transfer-config") + 1]
        roles.append(json.loads(config_json)["kv_role"])
        blocks = [i for i, word in enumerate(worker.command) if word == "--block-size"]
        assert worker.command[blocks[-1] + 1] == "128"
    assert roles == ["kv_producer", "kv_consumer"]
    assert "--kv-transfer-config" not in made[2].command


@pytest.mark.parametrize(
    ("args", "slots"),
    [
        (["--max-num-seqs=16"], 16),
        (["--max_num_seqs", "8", "--max-num-seqs=16"], 16),
        (["--max-num-seqs=16", "-dp", "2"], 32),  # per engine
        (["--max-num-seqs=0"], None),
        (["--max-num-batched-tokens=512"], None),
    ],
)
def test_router_knows_max_num_seqs_of_launched_workers(
    tmp_path: Path, args: list[str], slots: int | None
) -> None:
    whole = {"name": "g", "launch": {"args": args}}
    config = fleet.read(written(tmp_path, entry("prefill", *args), entry("decode", *args), whole))
    assert [(spec.slots, spec.max_requests) for spec in specs(config)] == [(slots, None)] * 3
    descriptions = [wiring.wiring_of(config, each).said for each in config.workers]
    suffix = f", {slots} slots for hand-overs and other requests"
    assert [each.endswith(suffix) for each in descriptions] == [False, slots is not None, False]


def test_explicit_model_agrees_with_the_default(tmp_path: Path) -> None:
    fleet.read(written(tmp_path, entry("prefill", model="m"), entry("decode")))


def test_launch_env_overrides_the_generated_environment(tmp_path: Path) -> None:
    config = fleet.read(
        written(tmp_path, entry("prefill", env={SIDE_PORT: "5999"}), entry("decode"))
    )
    ports = [wiring.wiring_of(config, each).env[SIDE_PORT] for each in config.workers]
    assert ports[0] == "5999" != ports[1]


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (entry("prefill"), entry("decode", "--block-size=32"), "launch.args: --block-size 32"),
        (entry("prefill", "--dtype=a"), entry("decode", "--dtype", "b"), "launch.args: --dtype b"),
        (
            entry("prefill", "--kv-cache-dtype=fp8"),
            entry("decode"),
            "launch.args: --kv-cache-dtype (none): workers[0] (p) has fp8",
        ),
        (
            entry("prefill", "--revision=abc", "--quantization=fp8"),
            entry("decode", "--revision=def", "--quantization=fp8"),
            "launch.args: --revision def: workers[0] (p) has abc",
        ),
        (
            entry("prefill"),
            entry("decode", "--chat-template=/x/other.jinja"),
            "launch.args: --chat-template /x/other.jinja: workers[0] (p) has none",
        ),
        (entry("prefill", model="org/a"), entry("decode", model="org/b"), "launch.model: org/b"),
        (
            entry("prefill", env={LAYOUT: "NHD"}),
            entry("decode", env={LAYOUT: "HND"}),
            f"launch.env.{LAYOUT}: LBHNC: workers[0] (p) has LBNHC",
        ),
        (
            entry("prefill", env={LAYOUT: "NHD"}),
            entry("decode"),
            f"launch.env.{LAYOUT}: LBHNC: workers[0] (p) has LBNHC",
        ),
        (
            entry("prefill", env={SIDE_PORT: "5600"}),
            entry("decode", env={SIDE_PORT: "5600"}),
            f"launch.env.{SIDE_PORT}: 5600: workers[0] has the same",
        ),
        (
            entry("prefill"),
            entry("decode", '--kv-transfer-config={"kv_connector": "X", "kv_role": "kv_both"}'),
            "the connector 'X': transfer is nixl, which needs NixlConnector",
        ),
        (
            entry("prefill"),
            entry("decode", "-sc.method=mtp", "-sc.num_speculative_tokens=2"),
            'launch.args: --speculative-config {"method": "mtp"}: workers[0] (p) has none',
        ),
        (
            entry("prefill"),
            entry("decode", "--disable-hybrid-kv-cache-manager"),
            "launch.args: --disable-hybrid-kv-cache-manager yes: workers[0] (p) has none",
        ),
        (
            entry("prefill"),
            entry(
                "decode",
                '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"}',
            ),
            "kv_role 'kv_producer': a decode worker needs kv_consumer",
        ),
        (
            entry("prefill"),
            entry(
                "decode",
                '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both", '
                '"kv_connector_extra_config": {"kv_lease_duration": 20}}',
            ),
            "kv_lease_duration 20: transfer.lease_s is 30",
        ),
        (
            entry("prefill"),
            entry("decode", "--kv-transfer-config={oops"),
            "--kv-transfer-config is not a JSON object",
        ),
        (
            entry("prefill"),
            entry("decode", env={SIDE_PORT: "soon"}),
            f"launch.env.{SIDE_PORT}: 'soon' is not a port",
        ),
        (entry("prefill"), entry("decode", env={SIDE_PORT: "9" * 5000}), "9' is not a port"),
        (
            entry("prefill"),
            entry("decode", env={SIDE_PORT: ""}),
            f"launch.env.{SIDE_PORT}: '' is not a port",
        ),
    ],
)
def test_incompatible_workers_are_refused_by_name(
    tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], message: str
) -> None:
    (line,) = problems(tmp_path, prefill, decode)
    assert "workers[1]." in line
    assert message in line
    assert ";" in line  # the remedy


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
def test_push_and_pull_connectors_must_match_the_mode(
    tmp_path: Path, mode: str, named: str, wanted: str | None
) -> None:
    ends, moved = (
        (entry("prefill", OWN % named), entry("decode")),
        {"connector": "nixl", "mode": mode},
    )
    if wanted is None:
        fleet.read(written(tmp_path, *ends, transfer=moved))
        return
    (line,) = problems(tmp_path, *ends, transfer=moved)
    assert f"workers[0].launch.args: --kv-transfer-config with the connector '{named}'" in line
    assert f"transfer is {wanted};" in line


def test_lease_must_not_exceed_the_workers_lease(tmp_path: Path) -> None:
    own = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"%s}'
    longer = own % ', "kv_connector_extra_config": {"kv_lease_duration": 60}'
    ends = entry("prefill", "--kv-transfer-config", longer), entry("decode")
    fleet.read(written(tmp_path, *ends, transfer={"connector": "nixl", "lease_s": 60}))
    ends = entry("prefill", "--kv-transfer-config", own % ""), entry("decode")
    (line,) = problems(tmp_path, *ends, transfer={"connector": "nixl", "lease_s": 60})
    assert "kv_lease_duration 30: transfer.lease_s is 60" in line


def test_shared_storage_refuses_policies_that_split_prompts(tmp_path: Path) -> None:
    cut = entry("prefill", policies={"long_prompt": {}})
    moved = {"connector": "shared-storage", "path": "/kv"}
    (line,) = problems(tmp_path, cut, entry("decode"), transfer=moved)
    assert "workers[0].launch.policies: long_prompt" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--enable-chunked-prefill"], "--enable-chunked-prefill: shared-storage keeps"),
        (
            ["--max_model_len", "4096", "--max-num-batched-tokens=512"],
            "--max-num-batched-tokens 512: --max-model-len is 4096",
        ),
        (["--max-model-len=4096", "--max-num-batched-tokens=4096"], None),
        (["--max-model-len=4096"], None),
        (["--max-num-batched-tokens=512"], None),  # the context is unknown here
    ],
)
def test_shared_storage_refuses_flags_that_split_prompts(
    tmp_path: Path, args: list[str], message: str | None
) -> None:
    ends = entry("prefill", *args), entry("decode")
    moved = {"connector": "shared-storage", "path": "/kv"}
    if message is None:
        fleet.read(written(tmp_path, *ends, transfer=moved))
        return
    (line,) = problems(tmp_path, *ends, transfer=moved)
    assert f"workers[0].launch.args: {message}" in line


def test_shared_storage_requires_a_path(tmp_path: Path) -> None:
    ends = entry("prefill"), entry("decode")
    (line,) = problems(tmp_path, *ends, transfer="shared-storage")
    assert "transfer.path: is missing" in line
    own = '--kv-transfer-config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
    ends = entry("prefill", own), entry("decode", own)
    fleet.read(
        written(tmp_path, *ends, transfer="shared-storage")
    )  # the worker's own flags name the path


def test_compatible_workers_are_accepted(tmp_path: Path) -> None:
    own = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    fleet.read(
        written(
            tmp_path,
            entry("prefill", "--block-size=64", "--kv-transfer-config", own),
            entry("decode", "--block-size", "64"),
            {"name": "g", "launch": {"args": ["--block-size=32", "--dtype=a"]}},
        )
    )


PERMUTE_KV_FLAGS = [
    "--kv-transfer-config.kv_connector=NixlConnector",
    "--kv-transfer-config.kv_role=kv_consumer",
    "--kv-transfer-config.enable_permute_local_kv=true",
]


@pytest.mark.parametrize(
    ("one", "other", "flags"),
    [
        ({}, {LAYOUT: "HND"}, []),  # NIXL's default
        ({LAYOUT: "LBHNC"}, {LAYOUT: "HND"}, []),
        ({LAYOUT: "HND"}, {LAYOUT: "NHD"}, PERMUTE_KV_FLAGS),
    ],
)
def test_equal_or_permuted_layouts_are_accepted(
    tmp_path: Path, one: dict[str, str], other: dict[str, str], flags: list[str]
) -> None:
    fleet.read(written(tmp_path, entry("prefill", env=one), entry("decode", *flags, env=other)))


def test_workers_of_different_models_may_differ(tmp_path: Path) -> None:
    others = [
        {**entry(role, "--block-size=32"), "name": f"{role}2", "model": "n"}
        for role in ("prefill", "decode")
    ]
    fleet.read(written(tmp_path, entry("prefill"), entry("decode"), *others))


def test_workers_of_one_model_may_not_differ(tmp_path: Path) -> None:
    named = {**entry("decode", "--block-size=64"), "model": "m"}
    (line,) = problems(tmp_path, entry("prefill", "--block-size=32"), named)
    assert "workers[1].launch.args: --block-size 64" in line


def test_a_connector_that_vllm_lacks_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_factory", lambda: '"ExampleConnector" "NixlPushConnector"')
    assert main(["up", str(written(tmp_path, entry("prefill"), entry("decode")))]) == 2
    line = capsys.readouterr().err
    assert "transfer: 'nixl': the vLLM installed here has no NixlConnector" in line
    assert "choose from shared-storage" in line


@pytest.mark.parametrize(
    ("addresses", "own", "expected"),
    [({}, "9001", "8998"), ({"p": "http://127.0.0.1:9001"}, "8998", "9001"), ({}, "", "8998")],
)
def test_bootstrap_port_must_match_the_address_for_decode_workers(
    tmp_path: Path, addresses: dict[str, str], own: str, expected: str
) -> None:
    moved = {"connector": "mooncake", "addresses": addresses}
    prefill = entry("prefill", env={transfer.BOOTSTRAP_PORT: own})
    (line,) = problems(tmp_path, prefill, entry("decode"), transfer=moved)
    path = "workers[0].launch.env.VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert f"{path}: {own!r}: decode workers use port {expected}; leave it out" in line
    assert f"transfer.addresses, as in p: http://127.0.0.1:{own or '8999'}" in line
    prefill = entry("prefill", env={transfer.BOOTSTRAP_PORT: expected})
    fleet.read(written(tmp_path, prefill, entry("decode"), transfer=moved))


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
def test_lmcache_store_is_read_from_launch_env_or_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    names_one: bool,
    exported: bool,
) -> None:
    """Not every LMCache variable names a store."""
    for name, value in env.items() if exported else ():
        monkeypatch.setenv(name, value)
    own: dict[str, Any] = {} if exported else {"env": env}
    ends = entry("prefill", **own), entry("decode", **own)
    if names_one:
        fleet.read(written(tmp_path, *ends, transfer="lmcache"))
        return
    lines = problems(tmp_path, *ends, transfer="lmcache")
    assert ["names no store" in line for line in lines] == [True, True]


def test_lmcache_workers_share_a_store(tmp_path: Path) -> None:

    ends = entry("prefill"), entry("decode", env={"LMCACHE_CONFIG_FILE": "/d.yaml"})
    (line,) = problems(tmp_path, *ends, transfer="lmcache")
    assert "workers[0].launch.env: names no store" in line
    ends = entry("prefill", env={"LMCACHE_REMOTE_URL": "lm://10.0.0.9:65432"}), ends[1]
    config = up.assign_ports(fleet.read(written(tmp_path, *ends, transfer="lmcache")))
    made = [up.make_worker(config, each, tmp_path, tmp_path) for each in config.workers]
    configs = [each.command[each.command.index("--kv-transfer-config") + 1] for each in made]
    assert [
        (json.loads(each)["kv_connector"], json.loads(each)["kv_role"]) for each in configs
    ] == [("LMCacheConnectorV1", "kv_producer"), ("LMCacheConnectorV1", "kv_consumer")]


def test_mooncake_workers_have_engine_ids_and_bootstrap_ports(tmp_path: Path) -> None:
    """The router sends these names and ports to decode workers."""
    second = {**entry("prefill"), "name": "p2"}
    both = entry("prefill"), second, entry("decode")
    (line,) = problems(tmp_path, *both, transfer="mooncake")
    assert "transfer.addresses: 'p2' would listen on port 8998, like 'p'" in line
    transfer_block = {"connector": "mooncake", "addresses": {"p2": "http://127.0.0.1:9001"}}
    config = up.assign_ports(fleet.read(written(tmp_path, *both, transfer=transfer_block)))
    made = [wiring.wiring_of(config, each) for each in config.workers]
    flags = [json.loads(each.flags[each.flags.index("--kv-transfer-config") + 1]) for each in made]
    assert [each.get("engine_id") for each in flags] == ["p", "p2", None]
    assert [each["kv_role"] for each in flags] == ["kv_producer", "kv_producer", "kv_consumer"]
    named = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert [each.env for each in made] == [{named: "8998"}, {named: "9001"}, {}]
    assert ["restart its decode" in each.said for each in made] == [True, True, False]
    many = entry("prefill", "-dp", "2"), entry("decode")
    (line,) = problems(tmp_path, *many, transfer="mooncake")
    assert (
        "workers[0].launch.args: --data-parallel-size 2: vLLM appends a number to each engine's id"
        in line
    )


@pytest.mark.parametrize("connector", ["mooncake", "lmcache"])
def test_external_workers_need_no_transfer_settings(tmp_path: Path, connector: str) -> None:
    urls = [
        {"name": role, "role": role, "url": f"http://127.0.0.1:900{number}"}
        for number, role in enumerate(("prefill", "decode"))
    ]
    fleet.read(written(tmp_path, *urls, transfer=connector))


def test_mooncake_engine_id_must_match_the_worker_name(tmp_path: Path) -> None:
    own = '--kv-transfer-config={"kv_connector": "MooncakeConnector", "kv_role": "kv_both"%s}'
    decode = entry("decode", own % "")
    (line,) = problems(tmp_path, entry("prefill", own % ""), decode, transfer="mooncake")
    assert "workers[0].launch.args: --kv-transfer-config with engine_id None" in line
    prefill = entry("prefill", own % ', "engine_id": "p"')
    fleet.read(written(tmp_path, prefill, decode, transfer="mooncake"))


def test_missing_package_is_refused_before_any_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_importable", lambda package: False)  # noqa: ARG005
    assert main(["up", str(written(tmp_path, entry("prefill"), entry("decode")))]) == 2
    line = capsys.readouterr().err
    assert "transfer: 'nixl': the package nixl is not installed here" in line
    assert "choose from shared-storage" in line


@pytest.mark.parametrize("connector", ["mooncake", "lmcache"])
@pytest.mark.parametrize("own", [True, False])
def test_missing_package_of_a_listed_connector_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    connector: str,
    own: bool,
) -> None:
    """The flag may come from `up` or from the fleet file."""
    pytest.importorskip("vllm")
    monkeypatch.undo()
    monkeypatch.setattr(transfer, "_importable", lambda package: package == "nixl")
    config = {"kv_connector": transfer.class_of(connector), "kv_role": "kv_both", "engine_id": "p"}
    args = [f"--kv-transfer-config={json.dumps(config)}"] if own else []
    env = {"LMCACHE_CONFIG_FILE": "/lmcache.yaml"}
    ends = entry("prefill", *args, env=env), entry("decode", *args, env=env)
    assert main(["up", str(written(tmp_path, *ends, transfer=connector))]) == 2
    line = capsys.readouterr().err
    assert f"transfer: {connector!r}: the package {connector} is not installed here" in line
    assert "choose from nixl, shared-storage" in line


def test_decode_worker_without_a_transfer_has_no_wiring(tmp_path: Path) -> None:
    config = fleet.read(written(tmp_path, {"name": "g", "launch": {}}, transfer=None))
    worker = config.workers[0].model_copy(update={"role": "decode"})
    assert wiring.wiring_of(config, worker) == Wiring()
