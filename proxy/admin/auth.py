"""Access control of the admin API.

Listening on loopback does not keep web pages out: a browser connects to 127.0.0.1 for a page whose
name resolves to it (DNS rebinding). So Host and Origin must be the admin API's own.

With a key any Host is accepted: a browser does not send the key to a page of another name.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.admin.errors import error_response
from proxy.admin.key import AdminKey
from proxy.net.resolver import is_address


class HostCheck:
    """Middleware that accepts requests for an IP address, `localhost` or the configured `host`.

    With a key, any host name is accepted.
    """

    def __init__(self, app: ASGIApp, host: str, key: AdminKey | None = None) -> None:
        self._app = app
        self._key = key
        self._names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, app = Headers(scope=scope), self._app
        if reason := self._objection(headers):
            app = error_response(HTTPStatus.FORBIDDEN, "forbidden", reason)
        elif not self._admits(headers):
            message = "the admin API needs its key, as `Authorization: Bearer KEY`"
            app = refusal = error_response(HTTPStatus.UNAUTHORIZED, "unauthorized", message)
            # Makes a browser ask for the key.
            refusal.headers["WWW-Authenticate"] = 'Basic realm="vllm-sched"'
        await app(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        values = headers.getlist("authorization")
        return self._key is None or (len(values) < 2 and self._key.admits("".join(values)))

    def _objection(self, headers: Headers) -> str | None:
        hosts = headers.getlist("host")
        any_host = self._key is not None and self._key.wanted
        if len(hosts) != 1 or not (any_host or self._is_ours(hosts[0])):
            return (
                "the Host header is not the admin API's address; use that address, or set a key "
                "(router.admin.key_file or key_env), which allows any host name"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return "the admin API refuses requests from other web pages"
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        # No DNS record can redirect an address to this machine.
        return name in self._names or is_address(name)
