"""Worker models from a fleet file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.config import FleetConfig
from proxy.errors import ConfigError
from vllm_sched.cost import profiles
from vllm_sched.cost.step_time import StepTime
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.models import AssumedWorker, of_profile, transfer_of, worker_models
from vllm_sched.sim.types import WorkerModel


def read(*workers: dict[str, Any], source: Path = Path("f.yaml"), **blocks: Any) -> Any:
    entries = [{"name": f"w{number}", **given} for number, given in enumerate(workers)]
    config = FleetConfig.model_validate({"model": "m", "workers": entries, **blocks})
    return worker_models(config, source, AssumedWorker(profile="h100-8b"))


def with_flags(*args: str) -> WorkerModel:
    model: WorkerModel = read({"launch": {"args": list(args)}})["w0"]
    return model


def test_every_profile_has_a_machine() -> None:
    model = of_profile("h100-8b")
    assert model.kv_tokens * model.kv_token_bytes == pytest.approx(58e9, rel=0.01)
    for name in (*profiles.SHORT_NAMES, *(key.name for key in profiles.measured())):
        model = of_profile(name)
        assert model.time == profiles.find(name).time
        assert 3_000 < model.kv_tokens < 12_000_000
        assert model.max_model_len <= model.kv_tokens


def test_transfer_time_matches_published() -> None:
    assert transfer_of(4).seconds(313_000_000, 40_000) == pytest.approx(0.174, rel=0.02)
    model = of_profile("h100-70b-tp4")
    assert model.transfer_s(16) == transfer_of(4).seconds(16 * 320 * 1024, 160)
    assert model.transfer_s(17) > model.transfer_s(16)


def test_launch_flags_set_the_worker_model() -> None:
    args = [
        "--max-model-len=8192", "--max-num-seqs", "32", "--max_num_batched_tokens=512",
        "--block-size=32", "--num-gpu-blocks-override", "1024", "--no-enable-prefix-caching",
        "--no-async-scheduling", "--enforce-eager",
    ]  # fmt: skip
    model: WorkerModel = read({"launch": {"args": args, "policies": {"lanes": {}}}})["w0"]
    assert (model.max_model_len, model.max_num_seqs, model.max_num_batched_tokens) == (
        8192,
        32,
        512,
    )
    assert (model.block_tokens, model.kv_tokens) == (32, 32_768)
    assert (model.prefix_caching, model.async_scheduling) == (False, False)
    assert model.policies == {"lanes": {}}
    assert with_flags("--max-num-batched-tokens=64").max_num_seqs == 64
    more = with_flags("--gpu-memory-utilization=0.95").kv_tokens - with_flags().kv_tokens
    assert more * 131_072 == pytest.approx(0.03 * 80 * 2**30, rel=0.01)


def test_profile_and_role_set_the_defaults() -> None:
    model = read({"profile": "a100-8b"})["w0"]
    assert (model.max_num_seqs, model.max_num_batched_tokens) == (256, 2048)
    assert (model.prefix_caching, model.async_scheduling, model.transfers) == (True, True, False)
    found = read({"role": "prefill"}, {"role": "decode"}, {"role": "long"}, transfer="nixl")
    assert [found[name].transfers for name in ("w0", "w1", "w2")] == [True, True, False]


CHUNKED = "--no-enable-chunked-prefill"


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ("--kv_cache_dtype=fp8 --max-num-seqs=8", ["--kv-cache-dtype"]),
        (f"--long-prefill-token-threshold=512 {CHUNKED}", [CHUNKED]),
        ("--dtype=float32 -pp 2", ["--dtype", "--pipeline-parallel-size"]),
        ("--of-tomorrow.key 1 --of-tomorrow.b=2", ["--of-tomorrow"]),
        ("--port 8001 -dp=1 --dtype bfloat16 --no-async-scheduling", []),
        ("", []),
        ("--quantization=fp8", ["--quantization"]),
    ],
)
def test_unmodelled_flags_are_listed(flags: str, unread: list[str]) -> None:
    assert with_flags(*flags.split()).unread == tuple(unread)
    # A flag that the profile's step times hold for is simulated.
    launch = {"args": ["--quantization=fp8"]}
    fp8 = {"profile": "h100-llama-3.1-8b-fp8-tp1", "launch": launch}
    assert read(fp8)["w0"].unread == ()


def test_settings_that_change_caches_are_listed() -> None:
    launch = {"args": ["--kv-cache-dtype=fp8"], "kv_offloading_size": 20}
    model = read({"journal": "auto", "launch": launch})["w0"]
    assert model.unread == ("--kv-cache-dtype", "kv_offloading_size", "journal")


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ("", (0, False)),
        ("{flag}=0", (0, False)),
        ("--long_prefill_token_threshold 512", (512, False)),
        ("{flag}=512 {flag}-adaptive", (512, True)),
        ("{flag}-adaptive --no-long-prefill-token-threshold-adaptive", (0, False)),
    ],
)
def test_long_prefill_token_threshold_flag_is_read(flags: str, limit: tuple[int, bool]) -> None:
    model = with_flags(*flags.format(flag="--long-prefill-token-threshold").split())
    assert (model.longest_chunk, model.longest_chunk_adapts) == limit


def test_calibration_file_is_found_beside_the_fleet_file(tmp_path: Path) -> None:
    content = {"step_time": {"decode_fixed_s": 0.5}, "kv_tokens": 9000, "kv_token_bytes": 512}
    (tmp_path / "cost.json").write_text(json.dumps(content))
    model = read({"profile": "cost.json"}, source=tmp_path / "fleet.yaml")["w0"]
    assert model.time == StepTime(decode_fixed_s=0.5)
    assert (model.kv_tokens, model.max_model_len, model.kv_token_bytes) == (9000, 9000, 512)
    # Fields that the file lacks are marked as assumed.
    assert {"gpus", "max_num_batched_tokens"} < set(model.assumed)
    assert not {"kv_tokens", "kv_token_bytes"} & set(model.assumed)


def test_relative_calibration_path_is_resolved_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder, tokens in ((here, 8000), (beside, 9000)):
        folder.mkdir()
        (folder / "cost.json").write_text(json.dumps({"step_time": {}, "kv_tokens": tokens}))
    monkeypatch.chdir(here)
    workers = [{"name": "w0", "profile": "cost.json"}, {"name": "w1", "url": "http://a:1"}]
    config = FleetConfig.model_validate({"model": "m", "workers": workers})
    shell = AssumedWorker(profile="cost.json")

    def sizes() -> list[int]:
        found = worker_models(config, beside / "fleet.yaml", shell)
        return [found[name].kv_tokens for name in ("w0", "w1")]

    assert sizes() == [9000, 8000]  # relative to the file; to the working directory
    (here / "cost.json").unlink()
    assert sizes() == [9000, 9000]
    (beside / "cost.json").rename(here / "cost.json")
    assert sizes() == [9000, 9000]


def test_calibration_file_sets_sizes_and_front_time(tmp_path: Path) -> None:
    sizes = {"gpus": 4, "max_model_len": 16_384, "max_num_batched_tokens": 512, "kv_tokens": 65_536}
    (tmp_path / "cost.json").write_text(json.dumps({"step_time": {}, "front_s": 0.004, **sizes}))
    model = of_profile("cost.json", tmp_path)
    assert {name: getattr(model, name) for name in sizes} == sizes
    source, workers = tmp_path / "fleet.yaml", [{"name": "w0", "profile": "cost.json"}]
    config = FleetConfig.model_validate({"model": "m", "workers": workers})
    assert worker_models(config, source)["w0"].front_s == 0.004
    assert worker_models(config, source, AssumedWorker(front_ms=0.0))["w0"].front_s == 0.0


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ({"profile": "h100-9b"}, "no built-in profile has model=9b; valid here: llama-3.1-8b"),
        ({"profile": "none.json"}, "profile none.json: No such file"),
        ({"max_model_len": 500_000}, "holds 446,099 tokens, less than"),
        *(
            ({"launch": {"args": args.split()}, "max_model_len": 9000}, message)
            for args, message in (
                ("--gpu-memory-utilization=2", "at most 1"),
                ("--gpu-memory-utilization=most", "at most 1"),
                ("--gpu-memory-utilization=0.1", "KV cache holds 0 tokens"),
                ("--tensor-parallel-size=4", "h100-8b is a worker with 1"),
                ("-tp=4", "h100-8b is a worker with 1"),
                ("--max-num-seqs=8k", "--max-num-seqs 8k: give a plain whole"),
                ("--max-num-seqs=9000", "more than --max-num-batched-tokens, 8192"),
                ("--block-size 0", "--block-size 0: give a plain whole"),
                ("--long-prefill-token-threshold=9001", "9001: more than max_model_len, 9000"),
                ("--long-prefill-token-threshold=-1", "-1: give a plain whole number, 0 or more"),
            )
        ),
    ],
)
def test_invalid_worker_is_refused_in_one_line(worker: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read({}, worker)
    (problem,) = error.value.problems
    assert problem.path == "workers[1]"
    assert message in problem.message
    assert "\n" not in problem.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "is not JSON"),
        ("[]", "has no step_time"),
        ('{"step_time": {"nonsense": 1}}', "unknown coefficient 'nonsense'"),
        ('{"step_time": {}, "kv_tokens": 0}', "kv_tokens is 0"),
        ('{"step_time": {}, "kv_tokens": true}', "kv_tokens is True"),
        ('{"step_time": {}, "gpus": 2.5}', "gpus is 2.5"),
        ('{"step_time": {}, "front_s": -1}', "front_s is -1"),
    ],
)
def test_invalid_calibration_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        of_profile("cost.json", tmp_path)


def test_worker_without_profile_and_discovery_are_refused() -> None:
    config = FleetConfig.model_validate(
        {
            "model": "m",
            "workers": [{"name": "w0", "url": "http://a:1"}],
            "discovery": {"pools": [{"name": "p", "dns": "workers"}]},
        }
    )
    with pytest.raises(ConfigError) as error:
        worker_models(config, Path("f.yaml"))
    assert [problem.path for problem in error.value.problems] == ["discovery", "workers[0].profile"]
