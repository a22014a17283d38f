"""`vllm-sched plan`: output, files and refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Program
from tests.present import present
from vllm_sched.cost import profiles
from vllm_sched.sim.planning import plan as planning
from vllm_sched.sim.planning import trials
from vllm_sched.sim.planning.search import FleetSearch

PLAN = ["plan", "--workload", "2000x20", "--gpus", "2", "--profile", "h100-8b", "--quick"]
TARGETS = ["--goodput", "ttft:800", "tpot:500"]


SHORT_RUNS = {
    "COARSE": trials.COARSE._replace(max_requests=300),
    "FINE": trials.FINE._replace(max_requests=300),
    "MIN_TTFTS": 0.2,
    "SAMPLE_REQUESTS": 400,
}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a few hundred requests, because the tests check only the form of the output."""
    for name, value in SHORT_RUNS.items():
        monkeypatch.setattr(trials, name, value)


ONE_POLICY = ["--policies", "default"]
LINE = {"timestamp": 0, "input_length": 600, "output_length": 5}
LOAD = ["--engine=fluid", "--workload=2000x20", "--request-rate=1", "--num-requests=5"]


def planned(program: Program, *words: object, status: int = 0) -> str:
    """Plan without policies for the targets; return the output on one line."""
    return program(*PLAN, *ONE_POLICY, *words, *TARGETS, status=status).words


def test_plan_is_printed_and_saved(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    text = planned(program, "--save", path)
    assert "best: 2 general; no policy" in text
    assert "runner-up: 1 prefill + 1 decode" in text
    more = present(re.search(r"one GPU more: ([\d.]+) requests/s", text))
    fewer = present(re.search(r"one GPU fewer: ([\d.]+) requests/s", text))
    assert float(more[1]) > float(fewer[1])
    assert "one worker, calculated" in text
    assert "KV cache 446,099 tokens of 128 KiB" in text
    assert "in each of 3 draws of 100 requests, none of them used in the search" in text
    assert "has the same share in time with a probability of about 3 in 4" in text
    words = shlex.join(["vllm-sched", *PLAN, *ONE_POLICY, "--save", str(path), *TARGETS])
    assert f"#     {words}\n" in path.read_text()
    assert "general-1" in program("check", path).out


def test_path_of_a_calibration_is_relative_to_the_saved_fleet(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the working directory the same relative path would be another file."""
    here, fleets = tmp_path / "proj" / "h100", tmp_path / "deep" / "er" / "fleets"
    for folder in (here, fleets):
        folder.mkdir(parents=True)
    (here / "linked").symlink_to(fleets)
    (here / "beside").mkdir()
    for path, front_s in ((tmp_path / "proj" / "cost.json", 60), (here / "cost.json", 0)):
        cost = {"step_time": profiles.find("h100-8b").time.to_json(), "front_s": front_s}
        path.write_text(json.dumps(cost | {"max_model_len": 16384}))
    monkeypatch.chdir(here)
    for folder, named in (("beside", "../cost.json"), ("linked", "../../../proj/h100/cost.json")):
        saved = f"{folder}/a plan.yaml"
        planned(program, "--profile", "cost.json", "--save", saved)
        head = (here / saved).read_text()
        assert f"#     vllm-sched simulate '{saved}' --engine=fluid" in head
        assert f"profile: {named}" in head
        save = here / f"{folder}.json"
        program("simulate", saved, *LOAD, "--save", save)
        assert json.loads(save.read_text())["mean_ttft_ms"] < 60_000
    monkeypatch.chdir(fleets)
    program("simulate", "a plan.yaml", *LOAD)


def test_options_of_a_trace_are_saved(program: Program, tmp_path: Path) -> None:
    """The name of the trace is not UTF-8."""
    trace, path = tmp_path / os.fsdecode(b"t\xff.jsonl"), tmp_path / "fleet.yaml"
    trace.write_text(json.dumps(LINE | {"hash_ids": [*range(38)]}) + "\n")
    words = ["--workload", trace, "--block-tokens", "16", "--gpus", "1", "--model", "m"]
    planned(program, *words, "--save", path)
    head = path.read_text(encoding="utf-8")
    assert "--block-tokens 16" in head  # for plan
    assert "--block-tokens=16" in head  # for simulate
    assert "t\\udcff.jsonl" in head
    program("check", path)


def test_exact_plan_uses_real_schedulers_and_prints_no_vllm_logs() -> None:
    # In a new process, because vLLM logs such lines once.
    words = ["--gpus", "1", *ONE_POLICY, "--exact", *TARGETS]
    code = (
        "import sys; from vllm_sched.cli.main import main; "
        "from vllm_sched.sim.planning import exact_check, trials; "
        "exact_check.EXACT_REQUESTS = exact_check.MAX_EXACT_REQUESTS = 100; "
        "from vllm_sched.sim.planning.trials import RunSize; "
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
    found = re.search(r"schedulers (\d+) % of (\d+) in time at ([\d.]+) req./s: 1 general", output)
    share, count, rate = present(found).groups()
    assert int(share) >= 90
    assert int(count) >= 100
    assert f"best {rate} {share} %" in output
    assert "with one more draw" in output


def test_output_describes_the_draws_of_a_trace(program: Program, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([json.dumps(LINE)] * 70))
    text = planned(program, "--workload", trace, "--gpus", "1")
    assert "none of them used in the search" not in text
    assert "differ only in their gaps and in where they begin in the trace" in text
    assert "further draw of this trace" in text
    assert "this does not cover another day's traffic" in text
    assert "to play the best fleet with them and the trace's first lines" in text


@pytest.mark.parametrize("gain", [0.98, 1.02])
def test_output_explains_if_the_highest_rate_is_not_best(
    gain: float, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planning.plan

    def changed(*given: Any, **named: Any) -> planning.FleetPlan:
        found = plan(*given, **named)
        best, other = found.ranking
        return replace(found, ranking=[best, replace(other, rate=best.rate * gain)])

    monkeypatch.setattr(planning, "plan", changed)
    explained = "rates within 4% count as equal: the simpler fleet comes first"
    assert (explained in planned(program)) == (gain > 1)


LARGE = "--gpus 1000000: one simulation of these GPUs and one more worker would have"
KEY = "model=llama-3.1-8b"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("--goodput ttft:1", "ask for ttft:"),
        ("--gpus 0", "--gpus 0: must be above 0"),
        (f"--gpus {'9' * 322}", "--gpus: must be at most 1,000,000"),
        (f"--gpus -{'9' * 322}", "--gpus: must be at most 1,000,000"),
        ("--gpus 1000000", LARGE),
        ("--goodput ttft:1e9", "requests, at most 10,000,000 are possible; give a shorter"),
        ("--bandwidth -1", "--bandwidth -1: must be above 0"),
        ("--goodput tpot:200 --mixed-ms 1e300", "--mixed-ms 1e+300: must be"),
        ("--scale 1e308", "--scale 1e+308: must be above 0 and at most 1e+12"),
        ("--profile h100-70b-tp4", "--gpus 2: a worker of h100-70b-tp4 takes 4"),
        ("--profile b300", "unknown profile 'b300'"),
        ("--workload nothing", "unknown workload 'nothing'"),
        ("--goodput speed:1", "--goodput speed:1: unknown target"),
        ("--save /nowhere/at/all.yaml", "there is no folder"),
        ("--save /", "/: is a folder; name a file in it"),
        ("--plot plan.png", "the picture is an SVG"),
        (f"--profile {KEY},system=b300", "has system=b300; valid here: a100, b200, h100, h200"),
        (f"--profile {KEY},system=h100,dtype=fp4", "has dtype=fp4; valid here: bf16, fp8"),
        (f"--profile {KEY}", "system is missing; valid: a100, b200"),
    ],
)
def test_invalid_plan_is_refused(
    more: str, error: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # runs of the usual length are refused
    targets = [] if "--goodput" in more else TARGETS
    printed = program(*PLAN, *targets, *more.split(), status=2)
    (line,) = (line for line in printed.err.splitlines() if "planning" not in line)
    assert line.startswith("vllm-sched plan: ")
    assert error in line


def test_several_machines_are_compared(program: Program, tmp_path: Path) -> None:
    path, picture = tmp_path / "fleet.yaml", tmp_path / "plan.svg"
    names = ["h100-llama-3.1-8b-fp8-tp2", "h100-llama-3.1-8b-fp8-tp1"]
    text = planned(program, "--profile", *names, "--save", path, "--plot", picture)
    _, _, table = text.partition("machines, compared coarsely req./s")
    table, _, rest = table.partition("best: ")
    assert all(name in table for name in names)
    assert "all of one profile: h100-llama-3.1-8b-fp8-tp1" in text
    assert "fp8 weights change a model's responses a little" in text
    assert re.search(r"GPUs req./s per GPU fleet .* 1 [\d.]+ [\d.]+ 1 general", rest)
    content = path.read_text()
    assert f"--profile {' '.join(names)} --save" in content
    assert "- --quantization=fp8" in content
    assert "<svg" in picture.read_text()
    assert f"drew {picture}" in text


def test_fewest_gpus_for_a_rate_are_planned(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    words = ["plan", "--min-gpus", "--profile", "h100-8b", "--workload", "2000x20", "--quick"]
    words += [*ONE_POLICY, *TARGETS]
    assert "--min-gpus: give the rate to serve" in program.refusal(*words)
    text = program(*words, "--request-rate", "20", "--save", path).words
    served = present(re.search(r"best ([\d.]+) \d+", text))
    fewer = re.search(r"one GPU fewer: ([\d.]+) requests/s|there is no such fleet", text)
    assert float(served[1]) >= 20
    assert float(present(fewer)[1] or 0) < 20
    assert "plan --min-gpus --profile h100-8b" in path.read_text()


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ([], "one of the arguments --gpus --min-gpus is required"),
        (["--gpus", "1", "--min-gpus"], "not allowed with argument --gpus"),
    ],
)
def test_number_of_gpus_or_min_gpus_is_required(
    sizes: list[str], error: str, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        program("plan", "--profile", "h100-8b", *sizes, *TARGETS)
    assert error in capsys.readouterr().err


def test_workers_with_several_gpus_are_planned(program: Program) -> None:
    text = planned(program, "--profile", "h100-70b-tp4", "--gpus", "7")
    assert "3 of 7 GPUs are unused: a worker takes 4" in text
    assert "a single GPU more or fewer changes nothing" in text
    assert "4 GPUs (one worker) fewer: there is no such fleet" in text


def test_progress_is_printed_as_lines_without_a_terminal(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_sched.cli.progress_bar.LINE_INTERVAL_S", 0.0)
    printed = program(*PLAN, *ONE_POLICY, *TARGETS, "--gpus", "4")
    began, *progress, ended = printed.err.splitlines()
    assert began == "vllm-sched plan: planning for 2000x20"
    assert ended == "vllm-sched plan: done"
    assert any(re.search(r"; 4 general; no policy: [\d,]+ requests$", line) for line in progress)
    shares = [int(line.split("plan: ")[1].split("%")[0]) for line in progress]
    assert shares == sorted(shares)
    assert 50 < shares[-1] < 100


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
        (signal.SIGINT, "judge", 2,  # after the hardest draw, and after all
         ["best: 2 general", "one GPU more: not known", "one GPU fewer: not known"]),
        (signal.SIGTERM, "with_one_more", 0,
         ["best: 2 general", "runner-up: 1 prefill + 1 decode", "more: not known"]),
        (signal.SIGINT, "with_one_fewer", 0,
         ["runner-up: ", "one GPU more: ", "requests/s in time", "fewer: not known"]),
    ],
)  # fmt: skip
def test_interrupted_plan_prints_the_best_so_far(
    number: int,
    method: str,
    after: int,
    found: list[str],
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleet.yaml"
    called = interrupting(getattr(FleetSearch, method), number, after=after)
    monkeypatch.setattr(FleetSearch, method, called)
    printed = program(*PLAN, *ONE_POLICY, "--save", path, *TARGETS, status=130)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "done\n" not in printed.err
    assert printed.words.startswith("interrupted at ")
    assert [part for part in found if part not in printed.words] == []
    assert "# The search was interrupted at " in path.read_text()
    program("check", path)


@pytest.mark.usefixtures("default_ctrl_c")
def test_interrupted_exact_run_prints_the_fluid_plan(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_sched.sim.planning import exact_check

    for name in ("EXACT_REQUESTS", "MAX_EXACT_REQUESTS"):
        monkeypatch.setattr(exact_check, name, 100)
    called = interrupting(exact_check.play_exactly, signal.SIGINT, after=1)
    monkeypatch.setattr(exact_check, "play_exactly", called)
    text = planned(program, "--exact", status=130)
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
        assert present(process.stderr).readline() == "vllm-sched plan: planning for 2000x20\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "vllm-sched plan: interrupted\n")
    assert [*tmp_path.iterdir()] == []
