"""A fake admin API with the answers that a test sets."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer


class Admin(HTTPServer):
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
