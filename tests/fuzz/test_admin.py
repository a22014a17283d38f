"""The admin API of a running router, checked against its OpenAPI description.

schemathesis makes valid and invalid requests for every operation. No answer may be a 500 or differ
from the description, and the router continues to serve.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis

# Imported before a router runs in a thread: CPython before 3.11.5 may fail to compile while another
# thread compiles (SystemError: AST constructor recursion ...).
import schemathesis.specs.openapi.schemas
import uvloop
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import CHECKS

from proxy.config import load
from proxy.setup.app import App

FLEET = """\
model: tiny
workers:
  - {name: a, url: 'http://127.0.0.1:9', role: general, api_key: sk-worker}
  - {name: b, url: 'http://127.0.0.1:19', role: general}
router: {port: 0, admin: {port: 0}, probe: {interval_s: 60}}
"""
WITHIN_S = 30.0
EXAMPLES = 10
# Not in the description: authorization is checked before anything else; the framework answers
# unknown methods.
EXCLUDED_CHECKS = {
    "unsupported_method",
    "ignored_auth",
    "positive_data_acceptance",
    "missing_required_header",
}


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a router in a thread; return its admin URL."""
    source = tmp_path_factory.mktemp("admin") / "fleet.yaml"
    source.write_text(FLEET)
    ready, stop = threading.Event(), asyncio.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def serve(path: Path) -> None:
        app = App(load(path), path)
        await app.start()
        found.append((app.admin_url, asyncio.get_running_loop()))
        ready.set()
        await stop.wait()
        await app.stop()

    thread = threading.Thread(target=lambda: uvloop.run(serve(source)))
    thread.start()
    assert ready.wait(WITHIN_S)
    [(url, loop)] = found
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def operations(url: str) -> list[schemathesis.APIOperation]:
    """Return the operations of the API, without endless streams."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", wait_for_schema=WITHIN_S)
    listed = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in listed if "/live" not in operation.path]


def test_every_operation_responds_as_described(admin: str) -> None:
    found = operations(admin)
    assert len(found) >= 8
    checks = [check for check in CHECKS.get_all() if check.__name__ not in EXCLUDED_CHECKS]
    assert "response_schema_conformance" in {check.__name__ for check in checks}
    for operation in found:

        @seed(1)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(case=operation.as_strategy())
        def play(case: schemathesis.Case) -> None:
            response = case.call(timeout=WITHIN_S)
            assert response.status_code < 500, response.text
            assert "sk-worker" not in response.text
            assert "Traceback" not in response.text
            case.validate_response(response, checks=checks)

        play()
    assert httpx.get(f"{admin}/admin/workers", timeout=WITHIN_S).status_code == 200


BODIES = (
    b"", b"null", b"[]", b"{", b'{"a":' * 5000, b'"x"', b"\xff\xfe", b"NaN", b'{"name": "\\ud800"}',
    b'{"name": "x", "url": "http://\\u0000:1"}', b'{"name": "x", "url": "http://[::1"}',
    b'{"name": "x", "url": "http://h:1", "max_model_len": 1e999}',
    b'{"name": "x", "url": "http://h:1", "max_model_len": ' + b"9" * 5000 + b"}",
    b'{"name": "x", "url": "http://h:1", "name": "y"}',
    b'{"route": "/v1/chat/completions", "body": {"messages": ' + b"[" * 900 + b"]" * 900 + b"}}",
    b'{"route": 1, "body": 1}', b"x" * 2_000_000,
)  # fmt: skip


@pytest.mark.parametrize("path", ["/admin/workers", "/admin/explain", "/admin/reload", "/nowhere"])
def test_no_body_is_a_500(admin: str, path: str) -> None:
    with httpx.Client(base_url=admin, timeout=WITHIN_S) as client:
        for body in BODIES:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                answer = client.request(
                    method, path, content=body, headers={"content-type": "application/json"}
                )
                assert answer.status_code < 500, (body[:60], answer.text)
                assert "Traceback" not in answer.text
        assert client.get("/admin/workers").status_code == 200


@pytest.mark.parametrize("name", ["..", "%2e%2e", "%00", "a%2Fb", "\u2028", "x" * 5000, "%ff", "*"])
def test_no_name_is_a_500(admin: str, name: str) -> None:
    with httpx.Client(base_url=admin, timeout=WITHIN_S) as client:
        for method, rest in (("DELETE", ""), ("POST", "/drain"), ("GET", ""), ("POST", "/resume")):
            answer = client.request(method, f"/admin/workers/{name}{rest}")
            assert 400 <= answer.status_code < 500
