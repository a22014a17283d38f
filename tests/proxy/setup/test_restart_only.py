"""What of a later fleet file holds at once, and what with the next start."""

from __future__ import annotations

import pytest

from proxy.config import FleetConfig, parse
from proxy.setup.restart_only import as_started, takes_a_restart

FLEET = "model: m\nworkers: [{name: a, url: 'http://h:1'}]\n"


def fleet(router: str, more: str = "") -> FleetConfig:
    """Read a fleet file."""
    return parse(f"{FLEET}router: {{{router}}}\n{more}", "f")


def tls(name: str, *, clients: bool = False) -> str:
    """Write a block."""
    ca = f", client_ca_file: /{name}/ca" if clients else ""
    return f"{{cert_file: /{name}/crt, key_file: /{name}/key{ca}}}"


def test_what_was_started_with_is_all_of_itself() -> None:
    started = fleet(f"port: 5, tls: {tls('a')}, admin: {{key_file: /k}}, batches: {{path: /b}}")
    assert as_started(started, started) == started
    assert takes_a_restart(started, started) == []


def test_what_a_later_file_changes() -> None:
    started = fleet("port: 5, batches: {path: /b}")
    later = fleet(
        "port: 6, processes: 2, drain_s: 3, batches: {path: /c, concurrency: 7}, admin: {port: 7}"
    )
    held = as_started(later, started).router
    assert (held.port, held.processes, held.admin.port) == (5, 1, 8001)
    assert (str(held.batches.path), held.batches.concurrency, held.drain_s) == ("/b", 7, 3)
    late = ["router.port", "router.admin", "router.processes", "router.batches.path"]
    assert takes_a_restart(later, started) == late


@pytest.mark.parametrize(
    ("before", "now", "held"),
    [
        (tls("a"), tls("b"), tls("b")),
        (tls("a", clients=True), tls("b", clients=True), tls("b", clients=True)),
        (tls("a"), "null", tls("a")),
        ("null", tls("b"), "null"),
        # Who is let in, the start says; which certificate is shown, the file.
        (tls("a"), tls("b", clients=True), tls("b")),
        (
            tls("a", clients=True),
            tls("b"),
            "{cert_file: /b/crt, key_file: /b/key, client_ca_file: /a/ca}",
        ),
    ],
)
def test_what_is_shown(before: str, now: str, held: str) -> None:
    for block, name in (("tls: {}", "router.tls"), ("admin: {{tls: {}}}", "router.admin")):
        started, later = fleet(block.format(before)), fleet(block.format(now))
        assert as_started(later, started) == fleet(block.format(held))
        assert takes_a_restart(later, started) == ([] if now == held else [name])


@pytest.mark.parametrize(
    ("before", "now", "held"),
    [
        ("key_file: /a", "key_file: /b", "key_file: /b"),
        ("key_file: /a", "key_env: B", "key_env: B"),
        ("key_file: /a", "", "key_file: /a"),
        ("", "key_file: /b", ""),
    ],
)
def test_where_the_operators_key_is(before: str, now: str, held: str) -> None:
    started, later = (fleet(f"admin: {{{each}}}") for each in (before, now))
    assert as_started(later, started) == fleet(f"admin: {{{held}}}")
    assert takes_a_restart(later, started) == ([] if now == held else ["router.admin"])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"max_model_len": 16384}, "max_model_len"),
        ({"model": "other"}, "model"),
        ({"role": "decode"}, "role"),
        ({"api_key": "k"}, "api_key"),
        ({"url": "http://127.0.0.1:9002"}, "url"),
        ({"launch": {"args": ["--seed", "1"]}}, "launch"),
        ({"max_requests": 7}, None),
        ({"url": None}, None),
    ],
)
def test_what_up_gave_a_worker_is_as_it_was_until_it_is_started_again(
    change: dict[str, object], what: str | None
) -> None:
    """The router is not to believe that a worker took what only its command line says."""

    def one(**more: object) -> FleetConfig:
        worker = {"name": "a", "url": "http://127.0.0.1:9001", "launch": {}, "max_model_len": 8192}
        return FleetConfig.model_validate({"model": "m", "workers": [worker | more]})

    late = [] if what is None else [f"workers[0].{what}"]
    assert takes_a_restart(one(**change), one()) == late
