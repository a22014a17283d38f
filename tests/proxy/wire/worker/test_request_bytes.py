"""The bytes of a request to a worker."""

from __future__ import annotations

from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.http.request import Request, RequestHead
from proxy.wire.settings import WireSettings
from proxy.wire.worker.pool import ConnectionPool
from proxy.wire.worker.request_bytes import to_worker
from proxy.wire.write_batch import WriteBatch


def test_compression_that_the_client_accepts_is_forbidden_to_plain_requests_only() -> None:
    head = RequestHead()
    head.method, head.start = "GET", b"GET /v1/models HTTP/1.1\r\nHost: "
    head.lines = b"Accept-Encoding: gzip\r\nX-Tail: kept\r\n"
    spec = WorkerSpec("w0", "http://127.0.0.1:9", Role.GENERAL, "tiny")
    pool = ConnectionPool(spec, WireSettings(), lambda: 0.0, WriteBatch())
    [usual] = to_worker(Request(head, b""), pool, b"", b"id")
    [plain] = to_worker(Request(head, b""), pool, b"", b"id", plain=True)
    end = b"X-Request-Id: id\r\n\r\n"
    assert usual == head.start + pool.host + head.lines + end
    lines = b"X-Tail: kept\r\nAccept-Encoding: identity\r\n"
    assert plain == head.start + pool.host + lines + end
