"""Worker models from a fleet file.

A worker's `profile` (or the command line's) names a built-in or live profile or a file of
`calibrate`. Sizes come from the flags under `launch.args`, else from the profile. In a calibrated
file `gpus`, `max_num_seqs`, `kv_token_bytes` and `kv_pieces` may be added by hand. Missing sizes
get defaults and are listed in `WorkerModel.assumed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from proxy.config import FleetConfig, LaunchConfig, WorkerConfig
from proxy.errors import ConfigError, Problem
from vllm_sched.bench.calibrate.aiconfigurator import find_profile
from vllm_sched.cost import profiles
from vllm_sched.cost.curved_step_time import step_time_of
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.errors import UsageError
from vllm_sched.sim.types import WorkerModel
from vllm_sched.workers.connectors import ROLES
from vllm_sched.workers.flags import parse

# Defaults for calibrated files.
MAX_MODEL_LEN: Final = 131_072
DEFAULT_SIZES: Final[Mapping[str, int]] = {
    "gpus": 1, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
    "kv_tokens": 262_144, "block_tokens": 16, "kv_token_bytes": 131_072, "kv_pieces": 64,
}  # fmt: skip
# Bytes/s. Published: 40,000 pieces (313 MB) took 174 ms over four links of 200 Gb/s. A worker is
# assumed to have one such link per GPU.
PUBLISHED_BANDWIDTH: Final = 87e9
GPU_BANDWIDTH: Final = PUBLISHED_BANDWIDTH / 4
TRANSFER_SETUP_S: Final = 0.002
PIECE_S: Final = (0.174 - 313e6 / PUBLISHED_BANDWIDTH) / 40_000
CHUNK_LIMIT: Final = "--long-prefill-token-threshold"
# Flags that the simulation uses.
SIMULATED_FLAGS: Final = frozenset((
    "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--block-size",
    "--num-gpu-blocks-override", "--gpu-memory-utilization", "--tensor-parallel-size",
    "--enable-prefix-caching", "--no-enable-prefix-caching", "--async-scheduling",
    "--no-async-scheduling", CHUNK_LIMIT, f"{CHUNK_LIMIT}-adaptive",
    "--no-long-prefill-token-threshold-adaptive",
))  # fmt: skip
# Flags (some only with this value) without effect on the simulation. Others are reported.
HARMLESS_FLAGS: Final = frozenset((
    "--additional-config", "--aggregate-engine-logging", "--allowed-local-media-path",
    "--allowed-media-domains", "--api-key", "--api-server-count", "--chat-template",
    "--chat-template-content-format", "--code-revision", "--collect-detailed-traces",
    "--config-format", "--data-parallel-size=1", "--default-chat-template-kwargs",
    "--disable-log-stats", "--disable-uvicorn-access-log", "--distributed-executor-backend",
    "--download-dir", "--dtype=auto", "--dtype=bfloat16", "--enable-auto-tool-choice",
    "--enable-chunked-prefill", "--enable-force-include-usage", "--enable-log-outputs",
    "--enable-log-requests", "--enable-prompt-tokens-details", "--enable-request-id-headers",
    "--enable-server-load-tracking", "--enable-sleep-mode", "--enable-tokenizer-info-endpoint",
    "--generation-config", "--headless", "--hf-config-path", "--hf-token", "--host",
    "--ignore-patterns", "--kv-cache-dtype=auto", "--kv-events-config", "--kv-transfer-config",
    "--load-format", "--log-config-file", "--log-level", "--logprobs-mode",
    "--master-addr", "--master-port", "--max-log-len",
    "--max-logprobs", "--middleware", "--model", "--model-impl", "--nnodes",
    "--no-enable-log-requests", "--no-enforce-eager", "--no-trust-remote-code", "--node-rank",
    "--otlp-traces-endpoint", "--override-generation-config", "--pipeline-parallel-size=1",
    "--port", "--prefix-caching-hash-algo", "--profiler-config", "--reasoning-parser",
    "--response-role", "--return-tokens-as-token-ids", "--revision", "--root-path",
    "--safetensors-load-strategy", "--scheduler-cls", "--scheduling-policy=fcfs", "--seed",
    "--served-model-name", "--show-hidden-metrics-for-version", "--shutdown-timeout",
    "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile", "--ssl-keyfile",
    "--structured-outputs-config", "--tokenizer", "--tokenizer-mode", "--tokenizer-revision",
    "--tool-call-parser", "--tool-parser-plugin", "--trust-remote-code", "--uds",
    "--uvicorn-log-level",
))  # fmt: skip


def transfer_of(gpus: int, bandwidth: float | None = None) -> TransferTime:
    """Return the transfer time at `bandwidth` bytes/s, or over one link per GPU."""
    return TransferTime(TRANSFER_SETUP_S, PIECE_S, 1 / (bandwidth or gpus * GPU_BANDWIDTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedWorker:
    """What is taken in place of a profile's figures; None = as measured."""

    profile: str | None = None  # for workers without a profile
    front_ms: float | None = None
    gb_per_s: float | None = None  # of each worker's link
    mixed_ms: float | None = None  # extra time of a mixed step

    def apply_to(self, model: WorkerModel) -> WorkerModel:
        if self.front_ms is not None:
            model = replace(model, front_s=self.front_ms / 1000)
        if self.gb_per_s is not None:
            model = replace(model, transfer=transfer_of(model.gpus, self.gb_per_s * 1e9))
        if self.mixed_ms is not None:
            model = replace(model, time=replace(model.time, mixed_s=self.mixed_ms / 1000))
        return model


AS_MEASURED: Final = AssumedWorker()


def worker_models(
    config: FleetConfig, source: Path, assumed: AssumedWorker = AS_MEASURED
) -> dict[str, WorkerModel]:
    """Return the worker models by name; `source` is the fleet file's path."""
    problems: list[Problem] = []
    models: dict[str, WorkerModel] = {}
    if config.discovery is not None:
        why = "discovered workers can't be simulated; list them under workers"
        problems.append(Problem("discovery", why))
    here, beside = Path(), source.parent
    read: dict[tuple[str, tuple[Path, ...]], WorkerModel] = {}
    for index, worker in enumerate(config.workers):
        path = f"workers[{index}]"
        profile = worker.profile or assumed.profile
        if profile is None:
            why = f"is missing; name a machine ({profiles.USAGE}) or a file that `calibrate` saved"
            problems.append(Problem(f"{path}.profile", why + ", or give --profile"))
            continue
        try:
            # The fleet file's folder comes first for its own profiles, the current for --profile.
            folders = (here, beside) if worker.profile is None else (beside, here)
            if (profile, folders) not in read:
                read[profile, folders] = of_profile(profile, *folders)
            models[worker.name] = model_of(worker, read[profile, folders], config, assumed)
        except UsageError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise ConfigError(str(source), problems)
    return models


def of_profile(profile: str, *folders: Path) -> WorkerModel:
    """Return the model of a profile, without any flags.

    A file is searched in `folders`, by default in the current folder.
    """
    if not profile.endswith(".json"):
        built_in = find_profile(profile)
        size = built_in.size
        return WorkerModel(
            name=profile,
            profile=profile,
            gpus=size.gpus,
            time=built_in.time,
            max_model_len=min(size.max_model_len, size.kv_tokens()),
            kv_tokens=size.kv_tokens(),
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_num_batched_tokens,
            kv_token_bytes=size.kv_token_bytes,
            kv_pieces=size.kv_pieces,
            transfer=transfer_of(size.gpus),
            flags=built_in.flags,
        )
    places = [folder / profile for folder in folders or (Path(),)]
    return _load_calibration(
        profile, next((place for place in places if place.exists()), places[-1])
    )


def _load_calibration(name: str, path: Path) -> WorkerModel:
    content, time = read_calibration(path, f"profile {name}")
    front_s = content.get("front_s", 0.0)
    if type(front_s) not in (int, float) or not 0 <= front_s < math.inf:
        raise UsageError(f"profile {name}: front_s is {front_s!r}; give seconds, 0 or more")
    sizes: dict[str, Any] = {
        key: _count(content, key, name, default) for key, default in DEFAULT_SIZES.items()
    }
    if "max_model_len" not in content:
        sizes["max_model_len"] = min(MAX_MODEL_LEN, sizes["kv_tokens"])
    return WorkerModel(
        name=name,
        profile=name,
        time=time,
        transfer=transfer_of(sizes["gpus"]),
        front_s=front_s,
        assumed=tuple(key for key in DEFAULT_SIZES if key not in content),
        **sizes,
    )


def read_calibration(path: Path, called: str) -> tuple[dict[str, Any], StepTime]:
    """Return a calibrated file's content and cost model; errors begin with `called`."""
    advice = "save one with `vllm-sched calibrate --save`"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{called}: {error.strerror}; {advice}") from None
    except ValueError:
        raise UsageError(f"{called} is not JSON; {advice}") from None
    if not isinstance(content, dict) or "step_time" not in content:
        raise UsageError(f"{called} has no step_time; {advice}")
    try:
        return content, step_time_of(content["step_time"])
    except UsageError as error:
        raise UsageError(f"{called}: {error}") from None


def _count(content: Mapping[str, Any], key: str, name: str, default: int) -> int:
    value = content.get(key, default)
    if type(value) is not int or value < 1:
        raise UsageError(f"profile {name}: {key} is {value!r}; give a whole number, 1 or more")
    return value


# Worker flags


def model_of(
    worker: WorkerConfig, machine: WorkerModel, config: FleetConfig, assumed: AssumedWorker
) -> WorkerModel:
    """Return a worker on a machine, with its flags."""
    launch = worker.launch or LaunchConfig()
    flags = {flag.name: flag.value or "" for flag in parse(launch.args)}
    _check_gpus(flags, machine)
    block = _parse_number(flags, "--block-size") or machine.block_tokens
    blocks = _parse_number(flags, "--num-gpu-blocks-override")
    kv_tokens = blocks * block if blocks else _kv_tokens(flags, machine)
    budget = _parse_number(flags, "--max-num-batched-tokens") or machine.max_num_batched_tokens
    longest = worker.stated_max_model_len or min(machine.max_model_len, kv_tokens)
    model = replace(
        machine,
        name=worker.name,
        max_model_len=longest,
        kv_tokens=kv_tokens,
        block_tokens=block,
        max_num_seqs=_max_num_seqs(flags, machine, budget),
        max_num_batched_tokens=budget,
        prefix_caching=_is_on(flags, "enable-prefix-caching", machine.prefix_caching),
        async_scheduling=_is_on(flags, "async-scheduling", machine.async_scheduling),
        longest_chunk=_longest_chunk(flags, longest),
        longest_chunk_adapts=_is_on(
            flags, f"{CHUNK_LIMIT[2:]}-adaptive", machine.longest_chunk_adapts
        ),
        transfers=config.transfer is not None and worker.role in ROLES,
        policies=launch.policies,
        unread=(*_ignored_flags(flags, machine.flags), *_ignored_settings(worker, launch)),
    )
    if model.kv_tokens < model.max_model_len:
        raise UsageError(
            f"its KV cache holds {model.kv_tokens:,} tokens, less than one request of "
            f"max_model_len {model.max_model_len:,}: vLLM would not start; give a smaller "
            "max_model_len"
        )
    return assumed.apply_to(model)


def _kv_tokens(flags: Mapping[str, str], machine: WorkerModel) -> int:
    used = flags.get("--gpu-memory-utilization")
    if used is None or machine.profile.endswith(".json"):
        return machine.kv_tokens  # calibrated: measured with the worker's flags
    try:
        share = float(used)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(f"--gpu-memory-utilization {used}: give more than 0 and at most 1")
    return find_profile(machine.profile).size.kv_tokens(share)


def _max_num_seqs(flags: Mapping[str, str], machine: WorkerModel, budget: int) -> int:
    seqs = _parse_number(flags, "--max-num-seqs")
    if seqs and seqs > budget:
        raise UsageError(
            f"--max-num-seqs {seqs}: more than --max-num-batched-tokens, {budget}: vLLM "
            "would not start; give less"
        )
    return seqs or min(machine.max_num_seqs, budget)


def _longest_chunk(flags: Mapping[str, str], max_model_len: int) -> int:
    tokens = _parse_number(flags, CHUNK_LIMIT, minimum=0) or 0
    if tokens > max_model_len:
        raise UsageError(
            f"{CHUNK_LIMIT} {tokens}: more than max_model_len, {max_model_len}: vLLM "
            "would not start; give less"
        )
    return tokens


def _check_gpus(flags: Mapping[str, str], machine: WorkerModel) -> None:
    gpus = _parse_number(flags, "--tensor-parallel-size")
    if gpus and gpus != machine.gpus and "gpus" not in machine.assumed:
        raise UsageError(
            f"--tensor-parallel-size {gpus}: {machine.profile} is a worker with {machine.gpus} "
            "GPUs; name a profile with the same number of GPUs"
        )


def _ignored_flags(flags: Mapping[str, str], of_profile: Collection[str]) -> tuple[str, ...]:
    named: dict[str, None] = {}
    read = HARMLESS_FLAGS.union(of_profile)
    for flag, value in flags.items():
        name = flag.partition(".")[0]  # "--object.key"
        if name and name not in SIMULATED_FLAGS and not {name, f"{name}={value}"} & read:
            named[name] = None
    return tuple(named)


def _ignored_settings(worker: WorkerConfig, launch: LaunchConfig) -> Iterator[str]:
    """Yield the fleet file's settings that change what caches hold, or what is known of them."""
    if launch.kv_offloading_size is not None:
        yield "kv_offloading_size"
    if worker.journal:
        yield "journal"


def _parse_number(flags: Mapping[str, str], name: str, *, minimum: int = 1) -> int | None:
    value = flags.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and int(value) >= minimum):
        why = f"give a plain whole number, {minimum} or more, to simulate it"
        raise UsageError(f"{name} {value}: {why}")
    return int(value)


def _is_on(flags: Mapping[str, str], name: str, default: bool) -> bool:
    if f"--no-{name}" in flags:
        return False
    return True if f"--{name}" in flags else default
