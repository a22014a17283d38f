"""A fake vLLM server: takes its flags, answers /health and /v1/models, exits on --die."""

from __future__ import annotations

import argparse
import http.server
import json
import sys


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--die", action="store_true")
    given, _ = parser.parse_known_args()
    if given.die:
        sys.exit("no such device")
    card = {"id": given.served_model_name, "object": "model", "max_model_len": 4096}
    pages = {"/health": b"", "/v1/models": json.dumps({"data": [card]}).encode()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Length", str(len(page or b"")))
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    http.server.ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
