"""`vllm-sched explain`: from the fleet file, and from a running router."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.fleet.admin import Admin
from tests.cli.fleet.conftest import Explain
from vllm_sched.workers.launch import free_port

SHORT_PROMPT = ("--prompt-tokens", "9")


@pytest.mark.parametrize(
    ("tokens", "first", "last", "note"),
    [
        (100, "s0: short_pool, first token in about", "l0", ""),
        (4000, "l0: long_pool, first token in about", "s0", "too small: holds 2048 tokens"),
    ],
)
def test_worker_reason_and_scores_are_named(
    explain: Explain, tokens: int, first: str, last: str, note: str
) -> None:
    lines = explain("--prompt-tokens", tokens, "--max-tokens", "50").out.splitlines()
    assert lines[0].startswith(first)
    assert lines[1].split()[:2] == ["worker", "cost"]
    assert lines[3].split()[0] == last
    assert note in lines[3]
    assert lines[4].startswith("these times are assumptions")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-tokens", "20000"], ["too_long (status 400)", "too small: holds 16384"]),
        ([*SHORT_PROMPT, "--model", "b"], ["unknown_model (status 404)", "tiny"]),
    ],
)
def test_reason_of_a_refusal_is_shown(
    explain: Explain, options: list[str], words: list[str]
) -> None:
    printed = explain(*options, status=1).out
    assert printed.startswith("no worker: ")
    assert [word for word in words if word not in printed] == []


def test_assumed_contexts_are_named(explain: Explain) -> None:
    workers = [{"name": "a", "launch": {}}]
    printed = explain("--prompt-tokens", "100000", workers=workers).out
    assert "no max_model_len is given, so no limit is assumed: a\n" in printed
    assert "handover" not in printed


def test_model_with_discovered_workers_only_is_refused(explain: Explain) -> None:
    discovery = {"pools": [{"name": "g", "selector": "a=b"}]}
    refused = explain(*SHORT_PROMPT, workers=[], discovery=discovery, status=2)
    assert "the workers of tiny are discovered (g)" in refused.err
    printed = explain(*SHORT_PROMPT, discovery=discovery)
    assert "the discovered pools g are left out; ask" in printed.out


@pytest.mark.parametrize("count", ["0", "-5", "x", "1.5"])
def test_invalid_count_is_refused(
    explain: Explain, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        explain("--prompt-tokens", count)
    assert "whole number of at least 1" in capsys.readouterr().err


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
def test_running_router_is_asked(explain: Explain, admin: Admin, by: str, tmp_path: Path) -> None:
    admin.answer = LIVE
    (tmp_path / "key").write_text("a-key-of-many-letters")
    key = {"port": admin.server_port, "key_file": str(tmp_path / "key")}
    router = {"admin": key} if by == "file" else {}
    live = [] if by == "file" else [f"{admin.url}/"]
    lines = explain(*SHORT_PROMPT, "--live", *live, router=router).out.splitlines()
    assert admin.requests == [
        ("/admin/explain", {"prompt_tokens": 9, "max_tokens": None, "model": "tiny"})
    ]
    assert admin.keys == ["Bearer a-key-of-many-letters" if by == "file" else None]
    assert lines[0] == "l0: spill_to_long, first token in about 0.25 s"
    assert lines[2].split() == ["l0", "0.5000", "0.1250", "0.1250", "0.2500", "0", "(estimated)"]
    assert lines[3].endswith(" 12,000 (reported)")
    assert lines[4].split() == ["s0", "-", "-", "-", "-", "-", "down"]
    assert len(lines) == 5


def test_turn_of_a_session_is_named(explain: Explain, admin: Admin) -> None:
    admin.answer = LIVE | {"turn": "moved"}
    printed = explain(*SHORT_PROMPT, "--session", "a", "--tenant", "t", "--live", admin.url)
    [(_, sent)] = admin.requests
    assert isinstance(sent, dict)
    assert (sent["session"], sent["tenant"]) == ("a", "t")
    assert printed.out.splitlines()[1] == "session: moved"
    refused = explain(*SHORT_PROMPT, "--session", "a", status=2).err
    assert "--session: only a running router knows sessions; add --live" in refused
    refused = explain(*SHORT_PROMPT, "--tenant", "t", "--live", admin.url, status=2).err
    assert "--tenant: is the tenant of a --session" in refused


PAIR = {
    "transfer": "nixl",
    "workers": [
        {"name": "p0", "role": "prefill", "url": "http://127.0.0.1:9001"},
        {"name": "d0", "role": "decode", "url": "http://127.0.0.1:9002"},
    ],
    "routing": {},
}
BALANCE = {
    "model": "tiny",
    "prefill": {"workers": 1, "busy": 0.95, "wanted": 1.36, "ahead_s": 2.5},
    "decode": {"workers": 1, "busy": 0.2, "wanted": 0.29, "step_s": 0.0251},
    "short": "prefill",
    "advice": "prefill is short: one more would help",
}


def test_both_workers_of_a_hand_over_and_the_short_role_are_named(
    explain: Explain, admin: Admin
) -> None:
    printed = explain("--live", admin.url, **PAIR).out
    assert printed == "this router knows no prefill or decode worker\n"
    admin.answer = {
        "worker": "d0",
        "prefill_worker": "p0",
        "reason": "handover",
        "predicted_ttft_s": 1.25,
        "predicted_transfer_s": 0.25,
        "scores": [{"worker": "d0", "total": 1.5, "prefill_by": "p0"}],
    }
    admin.balance = [BALANCE]
    lines = explain(*SHORT_PROMPT, "--live", admin.url, **PAIR).out.splitlines()
    assert lines[0] == (
        "prefill on p0, decode on d0: handover, first token in about 1.25 s "
        "(0.25 s of it the transfer)"
    )
    assert lines[2].endswith("prefill on p0")
    assert lines[4].split() == ["tiny", "prefill", "1", "95%", "1.36", "2.50", "-", "short"]
    assert lines[5].split() == ["tiny", "decode", "1", "20%", "0.29", "0.00", "25.1"]
    assert lines[6] == "tiny: prefill is short: one more would help"
    assert explain("--live", admin.url, **PAIR).out.splitlines() == lines[3:]
    assert admin.requests[-2:] == [("/admin/balance", None)] * 2
    assert "--prompt-tokens is missing" in explain(status=2, **PAIR).err


def test_hand_over_is_predicted_or_the_reason_against_it_shown(
    explain: Explain, admin: Admin
) -> None:
    """With `auto` an idle fleet hands nothing over, because no decode would benefit."""
    above = PAIR | {"routing": {"disaggregate_above": 1000}}
    printed = explain("--prompt-tokens", "5000", **above).out
    assert "prefill on p0, decode on d0: handover" in printed
    lines = explain("--prompt-tokens", "16000", **PAIR).out.splitlines()
    assert lines[1].startswith("d0: decode_pool")
    assert lines[2].startswith("handover: not_worth_it: the gain is too small")
    assert "routing.disaggregate_above" in lines[2]
    admin.answer = {"worker": "d0", "reason": "decode_pool", "handover": "samples", "scores": []}
    printed = explain(*SHORT_PROMPT, "--live", admin.url, **PAIR).out
    assert printed.splitlines()[1] == "handover: samples"


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (403, {"error": {"message": "not from there"}}, "not from there (status 403)"),
        (404, [], "(status 404); give the URL of a running router's admin API"),
        (404, {"error": {"message": "no such path: /admin/explain"}}, "is router.admin.port, not"),
        (401, {"error": {"message": "Incorrect API key provided."}}, "router.admin.port, not"),
        (200, {"hello": 1}, "not from a router's admin API"),
    ],
)
def test_unusable_admin_answer_is_reported(
    explain: Explain, admin: Admin, status: int, answer: object, words: str
) -> None:
    admin.status, admin.answer = status, answer
    error = explain(*SHORT_PROMPT, "--live", admin.url, status=2).err
    assert error.startswith(f"vllm-sched explain: {admin.url}: ")
    assert words in error


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:{port}", "file:///etc"])
def test_unreachable_router_is_reported(explain: Explain, url: str) -> None:
    refused = explain(*SHORT_PROMPT, "--live", url.format(port=free_port()), status=2)
    assert "a running router's admin API" in refused.err
