"""vLLM's own parser accepts the flags of all deployed workers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from proxy.config import TransferConfig, WorkerConfig
from proxy.config.workers import WorkerRole
from tests.deploy.rendered import OVERLAYS, ROOT, containers, overlay
from vllm_sched.cli.fleet.fleet import read
from vllm_sched.cli.fleet.wiring import transfer_wiring
from vllm_sched.cli.serve import vllm_command
from vllm_sched.workers import launch

# Variables that LeaderWorkerSet sets in each container.
GROUP = {
    "$(LWS_GROUP_SIZE)": "2",
    "$(LWS_WORKER_INDEX)": "1",
    "$(LWS_LEADER_ADDRESS)": "worker-large-0.worker-large.vllm-sched",
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the arguments of every worker in deploy/, by their place."""
    for path in sorted(ROOT.glob("deploy/fleets/*.yaml")):
        for worker in read(path).workers:
            if worker.launch is not None:
                yield f"{path.name}: {worker.name}", ["model", *worker.launch.args]
    compose = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
    for name, service in compose["services"].items():
        if (command := service.get("command", [""]))[0] == "serve":
            yield f"compose.yaml: {name}", command[1:]
    for name in OVERLAYS:
        for what, container, _ in containers(overlay(name)):
            if container["args"][0] == "serve":
                yield f"{name}: {what}", container["args"][1:]


COMMANDS = dict(commands())


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("where", COMMANDS)
def test_vllm_accepts_the_flags(where: str, parser: FlexibleArgumentParser) -> None:
    model, *given = COMMANDS[where]
    for variable, value in GROUP.items():
        given = [arg.replace(variable, value) for arg in given]
    policies = [arg.partition("=")[2] for arg in given if arg.startswith("--policy=")]
    flags = [arg for arg in given if not arg.startswith("--policy=")]
    parsed = parser.parse_args(vllm_command(model, policies or None, [], flags))
    assert parsed.max_model_len or where.startswith("cpu-demo"), "a context is stated"


def test_unknown_flags_are_refused(parser: FlexibleArgumentParser) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["model", "--max-model-length=5"])


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_kv_transfer_flags_of_the_cluster_match_those_of_up(
    part: WorkerRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    flags = transfer_wiring(
        TransferConfig(connector="nixl"), WorkerConfig(name="w", role=part)
    ).flags
    wanted = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    args = COMMANDS[f"prefill-decode: StatefulSet/worker-{part}"]
    (given,) = (arg.partition("=")[2] for arg in args if arg.startswith("--kv-transfer-config="))
    assert json.loads(given) == wanted
    rest = [flag for flag in flags if flag not in ("--kv-transfer-config", json.dumps(wanted))]
    assert set(rest) <= set(args)
