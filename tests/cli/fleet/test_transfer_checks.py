"""Fleets with a transfer: the launched workers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig
from proxy.errors import ConfigError
from proxy.setup.settings import specs
from tests.cli.program import Program
from vllm_sched.cli.fleet import fleet, up, wiring
from vllm_sched.workers import connectors, launch
from vllm_sched.workers.connectors import BOOTSTRAP_PORT, LAYOUT, SIDE_PORT

Entry = dict[str, Any]


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a CPU build with NIXL is installed."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setattr(connectors, "_factory_source", lambda: '"NixlConnector" "ExampleConnector"')
    monkeypatch.setattr(connectors, "_importable", lambda package: package == "nixl")


def entry(role: str, *args: str, **options: Any) -> Entry:
    return {"name": role[0], "role": role, "launch": {"args": list(args), **options}}


def own(connector: str, role: str = "kv_both", **more: Any) -> str:
    """Return the flag of a worker with its own transfer configuration."""
    config = {"kv_connector": connector, "kv_role": role, **more}
    return f"--kv-transfer-config={json.dumps(config)}"


def written(folder: Path, *workers: Entry, transfer: Any = "nixl") -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "workers": [*workers], "transfer": transfer}))
    return path


def problems(folder: Path, *workers: Entry, **blocks: Any) -> list[str]:
    path = written(folder, *workers, **blocks)
    with pytest.raises(ConfigError) as refused:
        fleet.read(path)
    return [f"{problem.path}: {problem.message}" for problem in refused.value.problems]


def commands(config: FleetConfig, folder: Path) -> list[tuple[str, ...]]:
    config = up.assign_ports(config)
    return [up.make_worker(config, each, folder, folder).command for each in config.workers]


def transfer_config(command: tuple[str, ...]) -> Any:
    return json.loads(command[command.index("--kv-transfer-config") + 1])


PREFILL, DECODE = entry("prefill"), entry("decode")
LEASE = {"kv_connector_extra_config": {"kv_lease_duration": 20}}


def test_workers_are_launched_with_their_kv_role(tmp_path: Path) -> None:
    general = {"name": "g", "launch": {}}
    *ends, alone = commands(fleet.read(written(tmp_path, PREFILL, DECODE, general)), tmp_path)
    assert [transfer_config(each)["kv_role"] for each in ends] == ["kv_producer", "kv_consumer"]
    for command in ends:
        *_, last = (i for i, word in enumerate(command) if word == "--block-size")
        assert command[last + 1] == "128"
    assert "--kv-transfer-config" not in alone


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
    descriptions = [wiring.wiring_of(config, each).summary for each in config.workers]
    suffix = f", {slots} slots for hand-overs and other requests"
    assert [each.endswith(suffix) for each in descriptions] == [False, slots is not None, False]


def test_launch_env_overrides_the_generated_environment(tmp_path: Path) -> None:
    prefill = entry("prefill", env={SIDE_PORT: "5999"}, model="m")
    config = fleet.read(written(tmp_path, prefill, DECODE))
    ports = [wiring.wiring_of(config, each).env[SIDE_PORT] for each in config.workers]
    assert ports[0] == "5999" != ports[1]


BESIDE_DEFAULT = [
    (entry("decode", "--block-size=32"), "launch.args: --block-size 32"),
    (
        entry("decode", "--chat-template=/x/other.jinja"),
        "launch.args: --chat-template /x/other.jinja: workers[0] (p) has none",
    ),
    (
        entry("decode", "-sc.method=mtp", "-sc.num_speculative_tokens=2"),
        'launch.args: --speculative-config {"method": "mtp"}: workers[0] (p) has none',
    ),
    (
        entry("decode", "--disable-hybrid-kv-cache-manager"),
        "launch.args: --disable-hybrid-kv-cache-manager yes: workers[0] (p) has none",
    ),
    (entry("decode", own("X")), "the connector 'X': transfer is nixl, which needs NixlConnector"),
    (
        entry("decode", own("NixlConnector", "kv_producer")),
        "kv_role 'kv_producer': a decode worker needs kv_consumer",
    ),
    (
        entry("decode", own("NixlConnector", **LEASE)),
        "kv_lease_duration 20: transfer.lease_s is 30",
    ),
    (
        entry("decode", "--kv-transfer-config={oops"),
        "--kv-transfer-config is not a JSON object",
    ),
    *(
        (entry("decode", env={SIDE_PORT: port}), f"launch.env.{SIDE_PORT}: {shown} is not a port")
        for port, shown in (("soon", "'soon'"), ("9" * 5000, "'99"), ("", "''"))
    ),
]
NHD, HND = {LAYOUT: "NHD"}, {LAYOUT: "HND"}
LAYOUTS_DIFFER = f"launch.env.{LAYOUT}: LBHNC: workers[0] (p) has LBNHC"


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        *((PREFILL, *each) for each in BESIDE_DEFAULT),
        (
            entry("prefill", "--dtype=a"), entry("decode", "--dtype", "b"),
            "launch.args: --dtype b",
        ),
        (
            entry("prefill", "--kv-cache-dtype=fp8"), DECODE,
            "launch.args: --kv-cache-dtype (none): workers[0] (p) has fp8",
        ),
        (
            entry("prefill", "--revision=abc", "--quantization=fp8"),
            entry("decode", "--revision=def", "--quantization=fp8"),
            "launch.args: --revision def: workers[0] (p) has abc",
        ),
        (
            entry("prefill", "--block-size=32"),
            {**entry("decode", "--block-size=64"), "model": "m"},
            "launch.args: --block-size 64",
        ),
        (entry("prefill", model="org/a"), entry("decode", model="org/b"), "launch.model: org/b"),
        (entry("prefill", env=NHD), entry("decode", env=HND), LAYOUTS_DIFFER),
        (entry("prefill", env=NHD), DECODE, LAYOUTS_DIFFER),
        (
            entry("prefill", env={SIDE_PORT: "5600"}), entry("decode", env={SIDE_PORT: "5600"}),
            f"launch.env.{SIDE_PORT}: 5600: workers[0] has the same",
        ),
    ],
)  # fmt: skip
def test_incompatible_workers_are_refused_by_name(
    tmp_path: Path, prefill: Entry, decode: Entry, message: str
) -> None:
    (line,) = problems(tmp_path, prefill, decode)
    assert "workers[1]." in line
    assert message.partition("'99")[0] in line
    assert ";" in line  # the remedy


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
    ends, moved = (entry("prefill", own(named)), DECODE), {"connector": "nixl", "mode": mode}
    if wanted is None:
        fleet.read(written(tmp_path, *ends, transfer=moved))
        return
    (line,) = problems(tmp_path, *ends, transfer=moved)
    assert f"workers[0].launch.args: --kv-transfer-config with the connector '{named}'" in line
    assert f"transfer is {wanted};" in line


def test_lease_must_not_exceed_the_workers_lease(tmp_path: Path) -> None:
    moved = {"connector": "nixl", "lease_s": 60}
    longer = own("NixlConnector", kv_connector_extra_config={"kv_lease_duration": 60})
    fleet.read(written(tmp_path, entry("prefill", longer), DECODE, transfer=moved))
    (line,) = problems(tmp_path, entry("prefill", own("NixlConnector")), DECODE, transfer=moved)
    assert "kv_lease_duration 30: transfer.lease_s is 60" in line


STORED = {"connector": "shared-storage", "path": "/kv"}


@pytest.mark.parametrize(
    ("prefill", "message"),
    [
        (entry("prefill", policies={"long_prompt": {}}), "policies: long_prompt"),
        (
            entry("prefill", "--enable-chunked-prefill"),
            "args: --enable-chunked-prefill: shared-storage keeps",
        ),
        (
            entry("prefill", "--max_model_len", "4096", "--max-num-batched-tokens=512"),
            "args: --max-num-batched-tokens 512: --max-model-len is 4096",
        ),
        (entry("prefill", "--max-model-len=4096", "--max-num-batched-tokens=4096"), None),
        (entry("prefill", "--max-model-len=4096"), None),
        (entry("prefill", "--max-num-batched-tokens=512"), None),  # the context is unknown here
    ],
)
def test_shared_storage_refuses_what_splits_prompts(
    tmp_path: Path, prefill: Entry, message: str | None
) -> None:
    if message is None:
        fleet.read(written(tmp_path, prefill, DECODE, transfer=STORED))
        return
    (line,) = problems(tmp_path, prefill, DECODE, transfer=STORED)
    assert f"workers[0].launch.{message}" in line


def test_shared_storage_requires_a_path(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, PREFILL, DECODE, transfer="shared-storage")
    assert "transfer.path: is missing" in line
    # The worker's own flags name the path.
    ends = entry("prefill", own("ExampleConnector")), entry("decode", own("ExampleConnector"))
    fleet.read(written(tmp_path, *ends, transfer="shared-storage"))


PERMUTED = [
    "--kv-transfer-config.kv_connector=NixlConnector",
    "--kv-transfer-config.kv_role=kv_consumer",
    "--kv-transfer-config.enable_permute_local_kv=true",
]
OTHER_MODEL = [
    {**entry(role, "--block-size=32"), "name": f"{role}2", "model": "n"}
    for role in ("prefill", "decode")
]


@pytest.mark.parametrize(
    "workers",
    [
        [
            entry("prefill", "--block-size=64", own("NixlConnector")),
            entry("decode", "--block-size", "64"),
            {"name": "g", "launch": {"args": ["--block-size=32", "--dtype=a"]}},
        ],
        [PREFILL, entry("decode", env=HND)],  # NIXL's default
        [entry("prefill", env={LAYOUT: "LBHNC"}), entry("decode", env=HND)],
        [entry("prefill", env=HND), entry("decode", *PERMUTED, env=NHD)],
        [PREFILL, DECODE, *OTHER_MODEL],
    ],
    ids=["equal", "default layout", "layout's other name", "permuted layout", "another model"],
)
def test_compatible_workers_are_accepted(tmp_path: Path, workers: list[Entry]) -> None:
    fleet.read(written(tmp_path, *workers))


@pytest.mark.parametrize(
    ("addresses", "given", "expected"),
    [({}, "9001", "8998"), ({"p": "http://127.0.0.1:9001"}, "8998", "9001"), ({}, "", "8998")],
)
def test_bootstrap_port_must_match_the_address_for_decode_workers(
    tmp_path: Path, addresses: dict[str, str], given: str, expected: str
) -> None:
    moved = {"connector": "mooncake", "addresses": addresses}
    prefill = entry("prefill", env={BOOTSTRAP_PORT: given})
    (line,) = problems(tmp_path, prefill, DECODE, transfer=moved)
    path = "workers[0].launch.env.VLLM_MOONCAKE_BOOTSTRAP_PORT"
    assert f"{path}: {given!r}: decode workers use port {expected}; leave it out" in line
    assert f"transfer.addresses, as in p: http://127.0.0.1:{given or '8999'}" in line
    prefill = entry("prefill", env={BOOTSTRAP_PORT: expected})
    fleet.read(written(tmp_path, prefill, DECODE, transfer=moved))


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
    given: Entry = {} if exported else {"env": env}
    ends = entry("prefill", **given), entry("decode", **given)
    if names_one:
        fleet.read(written(tmp_path, *ends, transfer="lmcache"))
        return
    lines = problems(tmp_path, *ends, transfer="lmcache")
    assert ["names no store" in line for line in lines] == [True, True]


def test_lmcache_workers_share_a_store(tmp_path: Path) -> None:
    decode = entry("decode", env={"LMCACHE_CONFIG_FILE": "/d.yaml"})
    (line,) = problems(tmp_path, PREFILL, decode, transfer="lmcache")
    assert "workers[0].launch.env: names no store" in line
    prefill = entry("prefill", env={"LMCACHE_REMOTE_URL": "lm://10.0.0.9:65432"})
    made = commands(fleet.read(written(tmp_path, prefill, decode, transfer="lmcache")), tmp_path)
    configs = map(transfer_config, made)
    assert [(each["kv_connector"], each["kv_role"]) for each in configs] == [
        ("LMCacheConnectorV1", "kv_producer"), ("LMCacheConnectorV1", "kv_consumer"),
    ]  # fmt: skip


def test_mooncake_workers_have_engine_ids_and_bootstrap_ports(tmp_path: Path) -> None:
    """The router sends these names and ports to decode workers."""
    both = PREFILL, PREFILL | {"name": "p2"}, DECODE
    (line,) = problems(tmp_path, *both, transfer="mooncake")
    assert "transfer.addresses: 'p2' would listen on port 8998, like 'p'" in line
    moved = {"connector": "mooncake", "addresses": {"p2": "http://127.0.0.1:9001"}}
    config = up.assign_ports(fleet.read(written(tmp_path, *both, transfer=moved)))
    made = [wiring.wiring_of(config, each) for each in config.workers]
    flags = [transfer_config(each.flags) for each in made]
    assert [each.get("engine_id") for each in flags] == ["p", "p2", None]
    assert [each["kv_role"] for each in flags] == ["kv_producer", "kv_producer", "kv_consumer"]
    ports = {BOOTSTRAP_PORT: "8998"}, {BOOTSTRAP_PORT: "9001"}, {}
    assert tuple(each.env for each in made) == ports
    assert ["restart its decode" in each.summary for each in made] == [True, True, False]
    (line,) = problems(tmp_path, entry("prefill", "-dp", "2"), DECODE, transfer="mooncake")
    many = "--data-parallel-size 2: vLLM appends a number to each engine's id"
    assert f"workers[0].launch.args: {many}" in line


def test_mooncake_engine_id_must_match_the_worker_name(tmp_path: Path) -> None:
    decode = entry("decode", own("MooncakeConnector"))
    prefill = entry("prefill", own("MooncakeConnector"))
    (line,) = problems(tmp_path, prefill, decode, transfer="mooncake")
    assert "workers[0].launch.args: --kv-transfer-config with engine_id None" in line
    prefill = entry("prefill", own("MooncakeConnector", engine_id="p"))
    fleet.read(written(tmp_path, prefill, decode, transfer="mooncake"))


@pytest.mark.parametrize("connector", ["mooncake", "lmcache"])
def test_external_workers_need_no_transfer_settings(tmp_path: Path, connector: str) -> None:
    urls = [
        {"name": role, "role": role, "url": f"http://127.0.0.1:900{number}"}
        for number, role in enumerate(("prefill", "decode"))
    ]
    fleet.read(written(tmp_path, *urls, transfer=connector))


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        (
            "_factory_source",
            '"ExampleConnector" "NixlPushConnector"',
            "the vLLM installed here has no",
        ),
        ("_importable", "", "the package nixl is not installed here"),
    ],
)
def test_missing_connector_is_refused_before_any_start(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, name: str, found: str,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(connectors, name, lambda *_: found)
    line = program.refusal("up", written(tmp_path, PREFILL, DECODE))
    assert f"transfer: 'nixl': {message}" in line
    assert "choose from shared-storage" in line


@pytest.mark.parametrize("connector", ["mooncake", "lmcache"])
@pytest.mark.parametrize("in_file", [True, False])
def test_missing_package_of_a_listed_connector_is_refused(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, connector: str, in_file: bool
) -> None:
    """The flag may come from `up` or from the fleet file."""
    pytest.importorskip("vllm")
    monkeypatch.undo()
    monkeypatch.setattr(connectors, "_importable", lambda package: package == "nixl")
    args = [own(connectors.connector_class(connector), engine_id="p")] if in_file else []
    env = {"LMCACHE_CONFIG_FILE": "/lmcache.yaml"}
    ends = entry("prefill", *args, env=env), entry("decode", *args, env=env)
    line = program.refusal("up", written(tmp_path, *ends, transfer=connector))
    assert f"transfer: {connector!r}: the package {connector} is not installed here" in line
    assert "choose from nixl, shared-storage" in line


def test_decode_worker_without_a_transfer_has_no_wiring(tmp_path: Path) -> None:
    config = fleet.read(written(tmp_path, {"name": "g", "launch": {}}, transfer=None))
    worker = config.workers[0].model_copy(update={"role": "decode"})
    assert wiring.wiring_of(config, worker) == wiring.Wiring()
