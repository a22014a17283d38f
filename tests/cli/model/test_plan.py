"""`vllm-sched plan`: output, files and refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from vllm_sched.cli.main import main
from vllm_sched.cost import profiles
from vllm_sched.sim.planning import plan as planning
from vllm_sched.sim.planning import trials
from vllm_sched.sim.planning.search import FleetSearch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PLAN = ["plan", "--workload", "2000x20", "--gpus", "2", "--profile", "h100-8b", "--quick"]
TARGETS = ["--goodput", "ttft:800", "tpot:500"]


SHORT_RUNS = {
    "MAX_COARSE_REQUESTS": 300, "MAX_FINE_REQUESTS": 300, "MIN_TTFTS": 0.2, "SAMPLE_REQUESTS": 400,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a few hundred requests, because the tests check only the form of the output."""
    for name, requests in SHORT_RUNS.items():
        monkeypatch.setattr(trials, name, requests)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text on one line."""
    return " ".join(capsys.readouterr().out.split())


def test_plan_is_printed_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    assert main([*PLAN, "--policies", "default", "--save", str(path), *TARGETS]) == 0
    text = printed(capsys)
    assert "best: 2 general; no policy" in text
    assert "runner-up: 1 prefill + 1 decode" in text
    more = re.search(r"one GPU more: ([\d.]+) requests/s", text)
    fewer = re.search(r"one GPU fewer: ([\d.]+) requests/s", text)
    assert more
    assert fewer
    assert float(more[1]) > float(fewer[1])
    assert "one worker, calculated" in text
    assert "KV cache 446,099 tokens of 128 KiB" in text
    options = "--workload=2000x20 --gpus=2 --profile=h100-8b --quick --policies default"
    assert f"vllm-sched plan {options} --goodput ttft:800" in path.read_text()
    assert main(["check", str(path)]) == 0
    assert "general-1" in capsys.readouterr().out


def test_calibration_path_is_relative_to_the_fleet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, fleets = tmp_path / "measured", tmp_path / "fleets"
    for folder in (measured, fleets):
        folder.mkdir()
    cost = {"step_time": profiles.find("h100-8b").time.to_json(), "max_model_len": 16384}
    (measured / "cost.json").write_text(json.dumps(cost))
    monkeypatch.chdir(tmp_path)
    words = ["--profile", "measured/cost.json", "--policies", "default"]
    assert main([*PLAN, *words, "--save", "fleets/a plan.yaml", *TARGETS]) == 0
    head = (fleets / "a plan.yaml").read_text()
    assert "#     vllm-sched simulate 'fleets/a plan.yaml' --engine=fluid" in head
    assert "profile: ../measured/cost.json" in head
    load = ["--engine=fluid", "--workload=2000x20", "--request-rate=1", "--num-requests=5"]
    assert main(["simulate", "fleets/a plan.yaml", *load]) == 0
    monkeypatch.chdir(fleets)
    assert main(["simulate", "a plan.yaml", *load]) == 0


def test_saved_profile_path_refers_to_the_planned_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the working directory the same relative path would be another file."""
    here, fleets = tmp_path / "proj" / "h100", tmp_path / "deep" / "er" / "fleets"
    for folder in (here, fleets):
        folder.mkdir(parents=True)
    (here / "linked").symlink_to(fleets)
    (here / "beside").mkdir()
    for path, front_s in ((tmp_path / "proj" / "cost.json", 60), (here / "cost.json", 0)):
        cost = {"step_time": profiles.find("h100-8b").time.to_json(), "front_s": front_s}
        path.write_text(json.dumps(cost))
    monkeypatch.chdir(here)
    words = ["--profile", "cost.json", "--policies", "default"]
    load = ["--engine=fluid", "--workload=2000x20", "--request-rate=1", "--num-requests=2"]
    for folder, named in (("beside", "../cost.json"), ("linked", "../../../proj/h100/cost.json")):
        assert main([*PLAN, *words, "--save", f"{folder}/f.yaml", *TARGETS]) == 0
        assert f"profile: {named}" in (here / folder / "f.yaml").read_text()
        save = here / f"{folder}.json"
        assert main(["simulate", f"{folder}/f.yaml", *load, "--save", str(save)]) == 0
        assert json.loads(save.read_text())["mean_ttft_ms"] < 60_000


def test_block_tokens_option_is_saved(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "fleet.yaml"
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [*range(38)]}
    trace.write_text(json.dumps(line) + "\n")
    words = ["--workload", str(trace), "--block-tokens", "16", "--gpus", "1", "--model", "m"]
    assert main([*PLAN, *words, "--policies", "default", "--save", str(path), *TARGETS]) == 0
    head = path.read_text()
    assert head.count("--block-tokens=16") == 2  # for plan and for simulate
    assert "--model=m --goodput" in head


def test_exact_plan_uses_real_schedulers_and_prints_no_vllm_logs() -> None:
    # In a new process, because vLLM logs such lines once.
    words = ["--gpus", "1", "--policies", "default", "--exact", *TARGETS]
    code = (
        "import sys; from vllm_sched.cli.main import main; "
        "from vllm_sched.sim.planning import exact_check, trials; "
        "exact_check.EXACT_REQUESTS = exact_check.MAX_EXACT_REQUESTS = 100; "
        f"vars(trials).update({SHORT_RUNS}); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *PLAN, *words], capture_output=True, text=True
    )
    assert done.returncode == 0
    prefix = "vllm-sched plan: "
    assert all(line.startswith(prefix) for line in done.stderr.splitlines()), done.stderr
    output = " ".join(done.stdout.split())
    shown = re.search(r"schedulers (\d+) % of (\d+) in time at ([\d.]+) req./s: 1 general", output)
    assert shown
    assert int(shown[1]) >= 90
    assert int(shown[2]) >= 100
    assert f"best {shown[3]} {shown[1]} %" in output
    assert "with one more draw" in output


def test_output_describes_the_judging_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--gpus", "1", "--policies", "default", *TARGETS]
    assert main([*PLAN, *options]) == 0
    mixture_text = printed(capsys)
    assert "in each of 3 draws of 100 requests, none of them used in the search" in mixture_text
    assert (
        "a further draw has the same share in time with a probability of about 3 in 4"
        in mixture_text
    )
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 5}
    trace.write_text("\n".join([json.dumps(line)] * 70))
    assert main([*PLAN, "--workload", str(trace), *options]) == 0
    trace_text = printed(capsys)
    assert "none of them used in the search" not in trace_text
    assert "differ only in their gaps and in where they begin in the trace" in trace_text
    assert "further draw of this trace" in trace_text
    assert "this does not cover another day's traffic" in trace_text
    assert "to play the best fleet with them and the trace's first lines" in trace_text


@pytest.mark.parametrize("gain", [0.98, 1.02])
def test_output_explains_if_the_highest_rate_is_not_best(
    gain: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = planning.plan

    def plan(*given: Any, **named: Any) -> planning.FleetPlan:
        found = planned(*given, **named)
        best, other = found.ranking
        return replace(found, ranking=[best, replace(other, rate=best.rate * gain)])

    monkeypatch.setattr(planning, "plan", plan)
    assert main([*PLAN, "--policies", "default", *TARGETS]) == 0
    assert ("rates within 4% count as equal: the simpler fleet comes first" in printed(capsys)) == (
        gain > 1
    )


def test_plan_with_a_trace_name_that_is_not_utf8_is_saved(tmp_path: Path) -> None:
    trace, path = tmp_path / os.fsdecode(b"t\xff.jsonl"), tmp_path / "fleet.yaml"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5}\n')
    words = ["--workload", str(trace), "--gpus", "1", "--policies", "default"]
    assert main([*PLAN, *words, "--save", str(path), *TARGETS]) == 0
    assert "t\\udcff.jsonl" in path.read_text(encoding="utf-8")
    assert main(["check", str(path)]) == 0


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--goodput", "ttft:1"], "ask for ttft:"),
        ([*TARGETS, "--gpus", "0"], "--gpus 0: must be above 0"),
        ([*TARGETS, "--gpus", "9" * 322], "--gpus: must be at most 1,000,000"),
        ([*TARGETS, "--gpus", "-" + "9" * 322], "--gpus: must be at most 1,000,000"),
        (
            [*TARGETS, "--gpus", "1000000"],
            "--gpus 1000000: one simulation of these GPUs and one more worker would have",
        ),
        (["--goodput", "ttft:1e9"], "requests, at most 10,000,000 are possible; give a shorter"),
        ([*TARGETS, "--bandwidth", "-1"], "--bandwidth -1: must be above 0"),
        (["--goodput", "tpot:200", "--mixed-ms", "1e300"], "--mixed-ms 1e+300: must be"),
        ([*TARGETS, "--scale", "1e308"], "--scale 1e+308: must be above 0 and at most 1e+12"),
        ([*TARGETS, "--profile", "h100-70b-tp4"], "--gpus 2: a worker of h100-70b-tp4 takes 4"),
        ([*TARGETS, "--profile", "b300"], "unknown profile 'b300'"),
        ([*TARGETS, "--workload", "nothing"], "unknown workload 'nothing'"),
        (["--goodput", "speed:1"], "--goodput speed:1: unknown target"),
        ([*TARGETS, "--save", "/nowhere/at/all.yaml"], "there is no folder"),
        ([*TARGETS, "--save", "/"], "/: is a folder; name a file in it"),
        ([*TARGETS, "--plot", "plan.png"], "the picture is an SVG"),
        (
            [*TARGETS, "--profile", "model=llama-3.1-8b,system=b300"],
            "no built-in profile has system=b300; valid here: a100, b200, h100, h200",
        ),
        (
            [*TARGETS, "--profile", "model=llama-3.1-8b,system=h100,dtype=fp4"],
            "no built-in profile has dtype=fp4; valid here: bf16, fp8",
        ),
        ([*TARGETS, "--profile", "model=llama-3.1-8b"], "system is missing; valid: a100, b200"),
    ],
)
def test_invalid_plan_is_refused_in_one_line(
    more: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # runs of the usual length are refused
    assert main([*PLAN, *more]) == 2
    (line,) = [
        printed_line
        for printed_line in capsys.readouterr().err.splitlines()
        if "planning" not in printed_line
    ]
    assert line.startswith("vllm-sched plan: ")
    assert error in line


def test_several_machines_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, picture = tmp_path / "fleet.yaml", tmp_path / "plan.svg"
    names = ["h100-llama-3.1-8b-fp8-tp2", "h100-llama-3.1-8b-fp8-tp1"]
    files = ["--save", str(path), "--plot", str(picture)]
    assert main([*PLAN, "--profile", *names, "--policies", "default", *files, *TARGETS]) == 0
    text = printed(capsys)
    _, _, table = text.partition("machines, compared coarsely req./s")
    table, _, rest = table.partition("best: ")
    assert all(name in table for name in names)
    assert "all of one profile: h100-llama-3.1-8b-fp8-tp1" in text
    assert "fp8 weights change a model's responses a little" in text
    assert re.search(r"GPUs req./s per GPU fleet .* 1 [\d.]+ [\d.]+ 1 general", rest)
    content = path.read_text()
    assert f"--gpus=2 --quick --profile {' '.join(names)} --policies default" in content
    assert "- --quantization=fp8" in content
    assert "<svg" in picture.read_text()
    assert f"drew {picture}" in text


def test_fewest_gpus_for_a_rate_are_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    asked = ["--workload", "2000x20", "--quick", "--policies", "default", *TARGETS]
    words = ["plan", "--min-gpus", "--profile", "h100-8b", *asked]
    assert main(words) == 2
    assert "--min-gpus: give the rate to serve" in capsys.readouterr().err
    assert main([*words, "--request-rate", "20", "--save", str(path)]) == 0
    text = printed(capsys)
    served = re.search(r"best ([\d.]+) \d+", text)
    fewer = re.search(r"one GPU fewer: ([\d.]+) requests/s|there is no such fleet", text)
    assert served
    assert fewer
    assert float(served[1]) >= 20
    assert float(fewer[1] or 0) < 20
    assert "--min-gpus --profile=h100-8b --request-rate=20" in path.read_text()


def test_number_of_gpus_or_min_gpus_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes, error in (([], "one of the arguments --gpus --min-gpus is required"), (
        ["--gpus", "1", "--min-gpus"], "not allowed with argument --gpus"
    )):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(["plan", "--profile", "h100-8b", *sizes, *TARGETS])
        assert caught.value.code == 2
        assert error in capsys.readouterr().err


def test_workers_with_several_gpus_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--profile", "h100-70b-tp4", "--gpus", "7", "--policies", "default", *TARGETS]
    assert main([*PLAN, *large]) == 0
    text = printed(capsys)
    assert "3 of 7 GPUs are unused: a worker takes 4" in text
    assert "a single GPU more or fewer changes nothing" in text
    assert "4 GPUs (one worker) fewer: there is no such fleet" in text


def test_progress_is_printed_as_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_sched.cli.progress_bar.LINE_INTERVAL_S", 0.0)
    assert main([*PLAN, "--policies", "default", *TARGETS]) == 0
    began, *progress, ended = capsys.readouterr().err.splitlines()
    assert began == "vllm-sched plan: planning for 2000x20"
    assert ended == "vllm-sched plan: done"
    assert any(re.search(r"; 2 general; no policy: [\d,]+ requests$", line) for line in progress)
    shares = [int(line.split("plan: ")[1].split("%")[0]) for line in progress]
    assert shares == sorted(shares)
    assert 50 < shares[-1] < 100


def test_interrupt_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_sched.sim.planning.plan.plan", interrupted)
    assert main([*PLAN, *TARGETS]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vllm-sched plan: interrupted"


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Restore the default Ctrl-C handler, which earlier tests may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(method: Callable[..., Any], number: int, *, after: int) -> Callable[..., Any]:
    """Return the method, which raises the signal after `after` calls."""
    calls = 0

    def called(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            signal.raise_signal(number)
        return method(*args, **named)

    return called


@pytest.mark.usefixtures("default_ctrl_c")
@pytest.mark.parametrize(
    ("number", "method", "after", "found"),
    [
        (
            signal.SIGINT, "judge", 1,
            ["best: 2 general", "one GPU more: not known", "one GPU fewer: not known"],
        ),
        (
            signal.SIGTERM, "with_one_more", 0,
            ["best: 2 general", "runner-up: 1 prefill + 1 decode", "more: not known"],
        ),
        (
            signal.SIGINT, "with_one_fewer", 0,
            ["runner-up: ", "one GPU more: ", "requests/s in time", "fewer: not known"],
        ),
    ],
)  # fmt: skip
def test_interrupted_plan_prints_the_best_so_far(
    number: int,
    method: str,
    after: int,
    found: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleet.yaml"
    monkeypatch.setattr(
        FleetSearch, method, interrupting(getattr(FleetSearch, method), number, after=after)
    )
    assert main([*PLAN, "--policies", "default", "--save", str(path), *TARGETS]) == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    shown = capsys.readouterr()
    assert "done\n" not in shown.err
    text = " ".join(shown.out.split())
    assert text.startswith("interrupted at ")
    assert [part for part in found if part not in text] == []
    assert "# The search was interrupted at " in path.read_text()
    assert main(["check", str(path)]) == 0


@pytest.mark.usefixtures("default_ctrl_c")
def test_interrupted_exact_run_prints_the_fluid_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_sched.sim.planning import exact_check

    for name in ("EXACT_REQUESTS", "MAX_EXACT_REQUESTS"):
        monkeypatch.setattr(exact_check, name, 100)
    monkeypatch.setattr(
        exact_check, "play_exactly", interrupting(exact_check.play_exactly, signal.SIGINT, after=1)
    )
    words = ["--policies", "default", "--exact", *TARGETS]
    assert main([*PLAN, *words]) == 130
    text = printed(capsys)
    assert "best: 2 general" in text
    assert "with vLLM's own schedulers" in text
    assert (
        "vLLM's own schedulers were not used for all fleets; to play the best fleet with them"
        in text
    )
    assert "order and rates are from vLLM" not in text


def test_interrupt_before_first_result_prints_one_line(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_sched.cli.main", *PLAN, "--save", str(path), *TARGETS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "vllm-sched plan: planning for 2000x20\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err == "vllm-sched plan: interrupted\n"
    assert [*tmp_path.iterdir()] == []
