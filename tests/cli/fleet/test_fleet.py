"""`vllm-sched check`, `router` and `explain`, and the example fleets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import proxy.app
from proxy.config import FleetConfig, parse
from proxy.errors import ConfigError
from vllm_sched.cli.main import main
from vllm_sched.workers.launch import free_port

EXAMPLES = sorted((Path(__file__).parents[3] / "deploy" / "fleets").glob("*.yaml"))
FLEET = {
    "model": "tiny",
    "workers": [
        {"name": "s0", "role": "short", "url": "http://127.0.0.1:9001", "max_model_len": 2048},
        {"name": "l0", "role": "long", "url": "http://127.0.0.1:9002", "max_model_len": 16384},
    ],
    "routing": {"short_limit": 1500},
}


def written(folder: Path, fleet: object = FLEET) -> str:
    """Write a fleet file and return its path."""
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet, sort_keys=False))
    return str(path)


def with_launch(**launch: Any) -> dict[str, Any]:
    return {"model": "m", "workers": [{"name": "a", "launch": launch}]}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_example_fleets_are_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{path}: good" in printed
    assert "\nnote" not in printed


def test_example_fleets_exist() -> None:
    assert {"cpu-demo.yaml", "short-long.yaml"} <= {path.name for path in EXAMPLES}


def test_check_shows_what_will_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = {"policies": {"long_prompt": {}}, "cpus": [0, 1]}
    more = {"name": "l1", "role": "long", "launch": launch}
    assert main(["check", written(tmp_path, FLEET | {"workers": [*FLEET["workers"], more]})]) == 0  # type: ignore[misc]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "router  http://127.0.0.1:8000, admin http://127.0.0.1:8001"
    assert lines[2] == "routing adaptive, long above 1500 tokens"
    assert lines[5].split() == ["s0", "short", "http://127.0.0.1:9001", "tiny", "2048", *OTHERS]
    assert lines[7].endswith("tiny   from worker  up (long_prompt, cpus 0 1)")
    assert "a free port" in lines[7]


OTHERS = ["external"]


@pytest.mark.parametrize(("limit", "noted"), [(1024, False), (1025, True)])
def test_check_notes_a_short_limit_beyond_a_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int, noted: bool
) -> None:
    assert main(["check", written(tmp_path, FLEET | {"routing": {"short_limit": limit}})]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.startswith("note    s0 holds 2048 tokens, and routing.short_limit is 1025:") is noted
    )
    assert ("lower the limit to 1024" in last) is noted


@pytest.mark.parametrize(
    ("limits", "max_requests", "noted"),
    [({}, None, True), ({"concurrency": 8}, None, False), ({}, 16, False)],
)
def test_check_notes_tenants_and_workers_without_limits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limits: dict[str, int],
    max_requests: int | None,
    noted: bool,
) -> None:
    tenants = [
        {"name": f"t{n}", "key_hashes": [f"sha256:{n:064x}"], "limits": limits} for n in range(9)
    ]
    workers = [{**each, "max_requests": max_requests} for each in FLEET["workers"]]
    config = FLEET | {"tenants": tenants, "workers": workers}
    assert main(["check", written(tmp_path, config)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    names = "note    tenants t0, t1, t2, t3, t4 and 4 more have no limits.concurrency, and workers"
    assert last.startswith(names) is noted


def test_check_prints_one_line_per_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = {"policies": {"nosuch": {}, "long_prompt": {"max_wait_s": -1}}}
    path = written(tmp_path, {"modl": "m", "workers": [{"name": "a", "launch": launch}]})
    assert main(["check", path]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert all(line.startswith(f"vllm-sched check: {path}: ") for line in lines)
    problems = [line.removeprefix(f"vllm-sched check: {path}: ") for line in lines]
    assert [line.partition(": ")[0] for line in problems] == [
        "model",
        "modl",
        "workers[0].launch.policies",
        "workers[0].launch.policies",
    ]
    assert "unknown policy 'nosuch'; valid: " in problems[2]
    assert "long_prompt" in problems[2]
    assert "long_prompt.max_wait_s=-1" in problems[3]


def test_print_config_has_every_default_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = with_launch(env={"HF_TOKEN": "hush"})
    fleet["workers"][0]["api_key"] = "hush"
    assert main(["check", written(tmp_path, fleet), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "hush" not in printed
    again = parse(printed, "printed")
    assert again.router.timeouts.connect_s == 3.0
    assert again.workers[0].api_key == "***"


def test_router_runs_the_fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Path, FleetConfig]] = []
    reads: list[Callable[[Path], FleetConfig]] = []

    def run(path: Path, *, config: FleetConfig, read: Callable[[Path], FleetConfig]) -> int:
        ran.append((path, config))
        reads.append(read)
        return 7

    monkeypatch.setattr(proxy.app, "run", run)
    path = written(tmp_path)
    assert main(["router", path]) == 7
    ((source, config),) = ran
    assert source == Path(path)
    assert [worker.name for worker in config.workers] == ["s0", "l0"]
    # A reload checks the file in the same way, launch blocks included.
    again = tmp_path / "again"
    again.mkdir()
    bad = with_launch(policies={"no_such_policy": {}})
    with pytest.raises(ConfigError, match=r"workers\[0\]\.launch\.policies: .*no_such_policy"):
        reads[0](Path(written(again, bad)))


def test_router_requires_a_url_for_every_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", written(tmp_path, with_launch())]) == 2
    err = capsys.readouterr().err
    assert "workers[0].url: is missing" in err
    assert "vllm-sched up" in err


@pytest.mark.parametrize("command", ["router", "up", "check"])
def test_missing_file_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "/no/such.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"vllm-sched {command}: /no/such.yaml: can't be read")


def run_explain(path: str, *options: str) -> int:
    return main(["explain", path, *options])


@pytest.mark.parametrize(
    ("tokens", "first", "last"),
    [
        (100, "s0: short_pool, first token in about", "l0"),
        (4000, "l0: long_pool, first token in about", "s0"),
    ],
)
def test_explain_names_worker_reason_and_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: int, first: str, last: str
) -> None:
    assert run_explain(written(tmp_path), "--prompt-tokens", str(tokens), "--max-tokens", "50") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert lines[1].split()[:2] == ["worker", "cost"]
    assert lines[3].split()[0] == last
    assert lines[4].startswith("these times are assumptions")


def test_explain_shows_why_a_worker_is_no_candidate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_explain(written(tmp_path), "--prompt-tokens", "4000") == 0
    assert "too small: holds 2048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-tokens", "20000"], ["too_long (status 400)", "too small: holds 16384"]),
        (["--prompt-tokens", "9", "--model", "b"], ["unknown_model (status 404)", "tiny"]),
    ],
)
def test_explain_shows_why_a_request_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    assert run_explain(written(tmp_path), *options) == 1
    out = capsys.readouterr().out
    assert out.startswith("no worker: ")
    for word in words:
        assert word in out


def test_explain_names_its_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explain(written(tmp_path, with_launch()), "--prompt-tokens", "100000") == 0
    assert "no max_model_len is given, so no limit is assumed: a\n" in capsys.readouterr().out


def test_explain_sends_the_admin_key_of_the_fleet_file(tmp_path: Path, admin: Admin) -> None:
    admin.answer = LIVE
    (tmp_path / "key").write_text("a-key-of-many-letters")
    key = {"port": admin.server_port, "key_file": str(tmp_path / "key")}
    path = written(tmp_path, FLEET | {"router": {"admin": key}})
    assert run_explain(path, "--prompt-tokens", "9", "--live") == 0
    assert admin.keys == ["Bearer a-key-of-many-letters"]


def test_check_reads_the_admin_key_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, FLEET | {"router": {"admin": {"key_file": str(tmp_path / "none")}}})
    assert main(["check", str(path)]) == 2
    assert "router.admin.key_file" in capsys.readouterr().err


def test_check_names_every_unreadable_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = str(tmp_path / "none")
    router = {
        "admin": {"key_file": none},
        "journal": {"key_file": none},
        "tls": {"cert_file": none, "key_file": none},
    }
    path = written(
        tmp_path, FLEET | {"router": router, "tenants": [{"name": "t", "keys_file": none}]}
    )
    assert main(["check", path]) == 2
    problems = capsys.readouterr().err
    for where in (
        "router.tls.cert_file",
        "tenants[0].keys_file",
        "router.admin.key_file",
        "router.journal.key_file",
    ):
        assert where in problems


def test_check_names_each_problem_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = str(tmp_path / "none")
    tls = {"tls": {"ca_file": none}}
    workers = [{"name": "s0"}, {"name": "w", "role": "any", "url": "https://h:1", **tls}]
    workers.append({"name": "l0", "role": "long", "url": "https://h:2", **tls})
    router = {"drain_s": -1, "tls": {"cert_file": none, "key_file": none}}
    fleet = {"model": "m", "workers": workers, "router": router, "tenants": [{"name": "t"}]}
    path = written(tmp_path, fleet)
    assert main(["check", path]) == 2
    paths = [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert sorted(paths) == [
        "router.drain_s",
        "router.tls.cert_file",
        "tenants[0]",
        "workers[0].url",
        "workers[1].role",
        "workers[1].tls.ca_file",
        "workers[2].tls.ca_file",
    ]


def test_check_names_every_mistake_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake is beside one that might hide it."""
    none = str(tmp_path / "none")
    tls = {"cert_file": none, "key_file": none}
    launch = {"args": ["--port=3"], "policies": {"nosuch": {}}}
    fleet = {
        "model": "m",
        "modle": "m",
        "workers": [
            {"name": "a b", "url": "https://h:1", "tls": {"ca_file": none}},
            {"name": "b", "url": "x", "launch": launch},
            {"name": "b", "url": "http://h:3", "max_requests": 0},
            {"name": "d", "url": "http://h:3", "role": "shrt", "tls": {"cert_file": none}},
            {"name": "e", "url": "http://127.0.0.1:8001"},
        ],
        "discovery": {"pools": [{"name": "c d", "dns": "x", "port": "http"}], "dns_every_s": 0},
        "tenants": [
            {"name": "t u", "keys_file": none},
            {"name": "v", "keys_env": "NO_SUCH_KEYS", "weight": 0},
            {"name": "v", "models": []},
        ],
        "worker_tls": {"ca_file": none},
        "router": {
            "port": 70000,
            "tls": tls,
            "admin": {"port": 8001, "key_file": none, "tls": tls},
            "queue": {"max_bytes": 1000, "max_wait": 5},
            "fairness": {"batch_age_s": 9999},
            "batches": {"path": 5},
            "allow_anonymous": True,
        },
        "routing": {"policy": "fastest"},
        "transfer": {"connector": "nixl", "mode": "pusch", "path": "/kv"},
    }
    assert main(["check", written(tmp_path, fleet)]) == 2
    paths = [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert sorted(paths) == [
        "discovery.dns_every_s",
        "discovery.pools[0].name",
        "discovery.pools[0].port",
        "modle",
        "router.admin.key_file",
        "router.admin.tls.cert_file",
        "router.allow_anonymous",
        "router.batches.path",
        "router.fairness.batch_age_s",
        "router.port",
        "router.queue.max_bytes",
        "router.queue.max_wait",
        "router.tls.cert_file",
        "routing.policy",
        "tenants[0].keys_file",
        "tenants[0].name",
        "tenants[1].keys_env",
        "tenants[1].weight",
        "tenants[2]",
        "tenants[2].models",
        "tenants[2].name",
        "transfer.mode",
        "transfer.path",
        "worker_tls.ca_file",
        "workers[0].name",
        "workers[0].tls.ca_file",
        "workers[1].launch.args[0]",
        "workers[1].launch.policies",
        "workers[1].url",
        "workers[2].max_requests",
        "workers[2].name",
        "workers[3].role",
        "workers[3].tls",
        "workers[3].tls.key_file",
        "workers[3].url",
        "workers[4].url",
    ]


DISCOVERED = {"pools": [{"name": "g", "selector": "a=b"}]}


def test_explain_refuses_a_model_with_discovered_workers_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {"model": "tiny", "discovery": DISCOVERED})
    assert run_explain(path, "--prompt-tokens", "100") == 2
    assert "the workers of tiny are discovered (g)" in capsys.readouterr().err
    assert (
        run_explain(written(tmp_path, FLEET | {"discovery": DISCOVERED}), "--prompt-tokens=9") == 0
    )
    assert "the discovered pools g are left out; ask" in capsys.readouterr().out


@pytest.mark.parametrize("count", ["0", "-5", "x", "1.5"])
def test_explain_refuses_invalid_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    with pytest.raises(SystemExit):
        run_explain(written(tmp_path), "--prompt-tokens", count)
    assert "whole number of at least 1" in capsys.readouterr().err


class Admin(HTTPServer):
    """A fake admin API with the answers that the test sets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AdminHandler)
        self.status = 200
        self.answer: object = {}
        self.balance: object = []
        self.requests: list[tuple[str, object]] = []
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class AdminHandler(BaseHTTPRequestHandler):
    server: Admin

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body)))
        self.server.keys.append(self.headers["Authorization"])
        self._answer(self.server.answer)

    def do_GET(self) -> None:
        self.server.requests.append((self.path, None))
        self._answer(self.server.balance)

    def _answer(self, answer: object) -> None:
        page = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def admin() -> Iterator[Admin]:
    with Admin() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


LIVE = {
    "worker": "l0",
    "reason": "spill_to_long",
    "predicted_ttft_s": 0.25,
    "scores": [
        {"worker": "s0", "total": 0.0, "note": "down"},
        {"worker": "l0", "total": 0.5, "wait_s": 0.125, "prefill_s": 0.125, "harm_s": 0.25},
        {"worker": "l1", "total": 0.75, "cached_tokens": 12_000, "cached_reported": True},
    ],
}


@pytest.mark.parametrize("by", ["option", "file"])
def test_explain_asks_a_running_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admin: Admin, by: str
) -> None:
    admin.answer = LIVE
    fleet = FLEET | {"router": {"admin": {"port": admin.server_port}}} if by == "file" else FLEET
    live = [] if by == "file" else [f"{admin.url}/"]
    assert run_explain(written(tmp_path, fleet), "--prompt-tokens", "9", "--live", *live) == 0
    assert admin.requests == [
        ("/admin/explain", {"prompt_tokens": 9, "max_tokens": None, "model": "tiny"})
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "l0: spill_to_long, first token in about 0.25 s"
    assert lines[2].split() == ["l0", "0.5000", "0.1250", "0.1250", "0.2500", "0", "(estimated)"]
    assert lines[3].endswith(" 12,000 (reported)")
    assert lines[4].split() == ["s0", "-", "-", "-", "-", "-", "down"]
    assert len(lines) == 5


def test_explain_names_the_turn_of_a_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admin: Admin
) -> None:
    admin.answer = LIVE | {"turn": "moved"}
    options = ("--prompt-tokens", "9", "--session", "a", "--tenant", "t", "--live", admin.url)
    assert run_explain(written(tmp_path, FLEET), *options) == 0
    assert (admin.requests[0][1]["session"], admin.requests[0][1]["tenant"]) == ("a", "t")
    assert capsys.readouterr().out.splitlines()[1] == "session: moved"


PAIR = {
    "model": "tiny",
    "transfer": "nixl",
    "workers": [
        {"name": "p0", "role": "prefill", "url": "http://127.0.0.1:9001"},
        {"name": "d0", "role": "decode", "url": "http://127.0.0.1:9002"},
    ],
}
BALANCE = {
    "model": "tiny",
    "prefill": {"workers": 1, "busy": 0.95, "wanted": 1.36, "ahead_s": 2.5},
    "decode": {"workers": 1, "busy": 0.2, "wanted": 0.29, "step_s": 0.0251},
    "short": "prefill",
    "advice": "prefill is short: one more would help",
}


def test_explain_names_both_workers_of_a_hand_over_and_the_short_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admin: Admin
) -> None:
    admin.answer = {
        "worker": "d0",
        "prefill_worker": "p0",
        "reason": "handover",
        "predicted_ttft_s": 1.25,
        "predicted_transfer_s": 0.25,
        "scores": [{"worker": "d0", "total": 1.5, "prefill_by": "p0"}],
    }
    admin.balance = [BALANCE]
    path = written(tmp_path, PAIR)
    assert run_explain(path, "--prompt-tokens", "9", "--live", admin.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "prefill on p0, decode on d0: handover, first token in about 1.25 s "
        "(0.25 s of it the transfer)"
    )
    assert lines[2].endswith("prefill on p0")
    assert lines[4].split() == ["tiny", "prefill", "1", "95%", "1.36", "2.50", "-", "short"]
    assert lines[5].split() == ["tiny", "decode", "1", "20%", "0.29", "0.00", "25.1"]
    assert lines[6] == "tiny: prefill is short: one more would help"
    assert run_explain(path, "--live", admin.url) == 0
    assert capsys.readouterr().out.splitlines() == lines[3:]
    assert admin.requests[1:] == [("/admin/balance", None)] * 2


def test_explain_live_without_prefill_and_decode_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admin: Admin
) -> None:
    assert run_explain(written(tmp_path, PAIR), "--live", admin.url) == 0
    assert capsys.readouterr().out == "this router knows no prefill or decode worker\n"


def test_explain_requires_a_prompt_or_a_running_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_explain(written(tmp_path, PAIR)) == 2
    assert "--prompt-tokens is missing" in capsys.readouterr().err


def test_explain_predicts_a_hand_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = PAIR | {"routing": {"disaggregate_above": 1000}}
    assert run_explain(written(tmp_path, fleet), "--prompt-tokens", "5000") == 0
    assert "prefill on p0, decode on d0: handover" in capsys.readouterr().out


def test_explain_shows_why_nothing_is_handed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admin: Admin
) -> None:
    """With `auto` an idle fleet hands nothing over, because no decode would benefit."""
    path = written(tmp_path, PAIR)
    assert run_explain(path, "--prompt-tokens", "16000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("d0: decode_pool")
    assert lines[2].startswith("handover: not_worth_it: the gain is too small")
    assert "routing.disaggregate_above" in lines[2]
    admin.answer = {"worker": "d0", "reason": "decode_pool", "handover": "samples", "scores": []}
    assert run_explain(path, "--prompt-tokens", "9", "--live", admin.url) == 0
    assert capsys.readouterr().out.splitlines()[1] == "handover: samples"


def test_explain_of_one_pool_shows_no_hand_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [{"name": "g0", "url": "http://127.0.0.1:9001"}]
    path = written(tmp_path, {"model": "tiny", "workers": workers})
    assert run_explain(path, "--prompt-tokens", "16000") == 0
    assert "handover" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (403, {"error": {"message": "not from there"}}, "not from there (status 403)"),
        (404, [], "(status 404); give the URL of a running router's admin API"),
        (404, {"error": {"message": "no such path: /admin/explain"}}, "is router.admin.port, not"),
        (200, {"hello": 1}, "not from a router's admin API"),
    ],
)
def test_unusable_admin_answer_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    admin: Admin,
    status: int,
    answer: object,
    words: str,
) -> None:
    admin.status, admin.answer = status, answer
    assert run_explain(written(tmp_path), "--prompt-tokens", "9", "--live", admin.url) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"vllm-sched explain: {admin.url}: ")
    assert words in err


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:{port}", "file:///etc"])
def test_unreachable_router_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    url = url.format(port=free_port())
    assert run_explain(written(tmp_path), "--prompt-tokens", "9", "--live", url) == 2
    assert "a running router's admin API" in capsys.readouterr().err


def test_check_shows_tenants_or_anonymous_access(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    examples = {path.stem: path for path in EXAMPLES}
    anonymous = tmp_path / "anybody.yaml"
    anonymous.write_text(
        examples["two-gpus"]
        .read_text()
        .replace("host: 127.0.0.1 ", "host: 0.0.0.0\n  allow_anonymous: true ")
    )
    for path, line in (
        (examples["shared"], "tenants chat (interactive), search (standard), nightly (batch)"),
        (examples["two-gpus"], "tenants none: any client on this machine may use it"),
        (anonymous, "tenants none: any client that reaches the router may use it"),
    ):
        assert main(["check", str(path)]) == 0
        assert line in capsys.readouterr().out.splitlines()
