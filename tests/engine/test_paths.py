"""Every path that vLLM serves is a route of the router or listed here.

Read from vLLM's sources, so that additions of a new release fail here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from proxy.core.model.route_table import ROUTES, PromptFields, Route
from proxy.core.request.route_lookup import find
from proxy.wire.client.local_endpoints import PATHS
from tests.fleet import test_every_route as every_route
from tests.upstream.source import TABLES_OF, differences_from_table, installed_release

SPEC = find_spec("vllm")
SERVED_FROM = Path(SPEC.origin).parent / "entrypoints" if SPEC and SPEC.origin else Path()
# Other servers: a supervisor, and a placeholder during the start.
OTHERS = {"launchers", "cli"}
METHODS = {"get": "GET", "post": "POST", "put": "PUT", "delete": "DELETE", "add_api_route": "POST"}
SOCKET = "websocket"
# Paths for operators, who use the worker's own address.
OPERATORS = {
    "/abort_requests", "/collective_rpc", "/fault_tolerance/apply", "/fault_tolerance/status",
    "/finish_weight_update", "/get_world_size", "/inference/v1/abort_requests",
    "/init_weight_transfer_engine", "/is_paused", "/is_scaling_elastic_ep", "/is_sleeping",
    "/kv_event_sources", "/load", "/pause", "/release_kv_cache_memory", "/reset_encoder_cache",
    "/reset_mm_cache", "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/server_info",
    "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update", "/start_profile",
    "/start_weight_update", "/stop_profile", "/tokenizer_info", "/update_weight_version",
    "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/version", "/wake_up",
    "/weight_checker", "/weight_info",
}  # fmt: skip
# Aliases of other paths.
ALIASES = {"/docs", "/invocations", "/ping"}
SOCKETS = {"/v1/realtime"}
# Paths for clients of later releases, for which the router has no route.
NO_ROUTE = {"/v1/decisions"} if installed_release() >= (0, 33) else set[str]()


def served() -> Iterator[tuple[str, str]]:
    """Yield every method and path in vLLM's sources."""
    for path in sorted(SERVED_FROM.rglob("*.py")):
        if path.relative_to(SERVED_FROM).parts[0] in OTHERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            kind, first = node.func.attr, node.args[0] if node.args else None
            if kind not in (*METHODS, SOCKET) or not isinstance(first, ast.Constant):
                continue
            if isinstance(first.value, str) and first.value.startswith("/"):
                yield METHODS.get(kind, kind), first.value


def test_every_path_is_a_route_or_listed() -> None:
    found = set(served())
    passing = {
        (method, path)
        for method, path in found
        if isinstance(find(method, path.replace("{response_id}", "resp_1")), Route)
    }
    rest = {path for method, path in found - passing if method != SOCKET}
    assert differences_from_table(rest - PATHS, OPERATORS | ALIASES | NO_ROUTE) == {}
    assert {path for method, path in found if method == SOCKET} == SOCKETS


@pytest.mark.skipif(installed_release() < TABLES_OF, reason="the routes are those of vLLM 0.32")
def test_every_route_is_served_by_vllm() -> None:
    assert ROUTES.keys() - {path for method, path in served() if method == "POST"} == set()


def test_every_route_has_a_request_for_real_workers() -> None:
    forms = {path for path, route in ROUTES.items() if route.shape is PromptFields.FORM}
    requests = every_route.BODIES.keys() | every_route.DERENDERED.keys() | forms
    assert ROUTES.keys() ^ requests == set(), "BODIES in tests/fleet/test_every_route.py"
