"""Fleet-file changes that need a restart."""

from __future__ import annotations

import pytest

from proxy.config import FleetConfig, parse
from proxy.setup.restart_only import as_started, restart_only_changes

FLEET = "model: m\nworkers: [{name: a, url: 'http://h:1'}]\n"


def fleet(router: str, rest: str = "") -> FleetConfig:
    return parse(f"{FLEET}router: {{{router}}}\n{rest}", "f")


def tls(name: str, *, clients: bool = False) -> str:
    ca = f", client_ca_file: /{name}/ca" if clients else ""
    return f"{{cert_file: /{name}/crt, key_file: /{name}/key{ca}}}"


def test_unchanged_file_needs_no_restart() -> None:
    started = fleet(f"port: 5, tls: {tls('a')}, admin: {{key_file: /k}}, batches: {{path: /b}}")
    assert as_started(started, started) == started
    assert restart_only_changes(started, started) == []


def test_changes_that_need_a_restart_are_named() -> None:
    started = fleet("port: 5, batches: {path: /b}")
    later = fleet(
        "port: 6, processes: 2, drain_s: 3, batches: {path: /c, concurrency: 7}, admin: {port: 7}"
    )
    held = as_started(later, started).router
    assert (held.port, held.processes, held.admin.port) == (5, 1, 8001)
    assert (str(held.batches.path), held.batches.concurrency, held.drain_s) == ("/b", 7, 3)
    late = ["router.port", "router.admin", "router.processes", "router.batches.path"]
    assert restart_only_changes(later, started) == late


@pytest.mark.parametrize(
    ("before", "now", "held"),
    [
        (tls("a"), tls("b"), tls("b")),
        (tls("a", clients=True), tls("b", clients=True), tls("b", clients=True)),
        (tls("a"), "null", tls("a")),
        ("null", tls("b"), "null"),
        # Client certificates are fixed at the start; the certificate shown may change.
        (tls("a"), tls("b", clients=True), tls("b")),
        (
            tls("a", clients=True),
            tls("b"),
            "{cert_file: /b/crt, key_file: /b/key, client_ca_file: /a/ca}",
        ),
    ],
)
def test_certificates_change_at_reload_client_ca_at_restart(
    before: str, now: str, held: str
) -> None:
    for block, name in (("tls: {}", "router.tls"), ("admin: {{tls: {}}}", "router.admin")):
        started, later = fleet(block.format(before)), fleet(block.format(now))
        assert as_started(later, started) == fleet(block.format(held))
        assert restart_only_changes(later, started) == ([] if now == held else [name])


@pytest.mark.parametrize(
    ("before", "now", "held"),
    [
        ("key_file: /a", "key_file: /b", "key_file: /b"),
        ("key_file: /a", "key_env: B", "key_env: B"),
        ("key_file: /a", "", "key_file: /a"),
        ("", "key_file: /b", ""),
    ],
)
def test_admin_key_source_changes_at_reload(before: str, now: str, held: str) -> None:
    started, later = (fleet(f"admin: {{{block}}}") for block in (before, now))
    assert as_started(later, started) == fleet(f"admin: {{{held}}}")
    assert restart_only_changes(later, started) == ([] if now == held else ["router.admin"])


@pytest.mark.parametrize(
    ("change", "field"),
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
def test_launch_settings_of_a_worker_change_at_restart(
    change: dict[str, object], field: str | None
) -> None:
    """The router must not assume that a running worker took new arguments."""

    def fleet_with(**rest: object) -> FleetConfig:
        worker = {"name": "a", "url": "http://127.0.0.1:9001", "launch": {}, "max_model_len": 8192}
        return FleetConfig.model_validate({"model": "m", "workers": [worker | rest]})

    late = [] if field is None else [f"workers[0].{field}"]
    assert restart_only_changes(fleet_with(**change), fleet_with()) == late
