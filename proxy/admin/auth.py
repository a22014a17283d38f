"""Who may speak to the admin API.

Listening on loopback keeps other machines out, but not web pages: a page whose name resolves to
127.0.0.1 is let in by the browser. Such a page's name stands in the Host header, and a page from
anywhere names itself in Origin. Both must be ours.

A key, where there is one, has to be shown. Then any name will do in Host, as that of a certificate:
to a page of another name no browser shows the key.
"""

from __future__ import annotations

import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.admin.errors import error_response
from proxy.admin.key import AdminKey


class HostCheck:
    """Lets in requests to an address, to `localhost`, or to the `host` of the configuration.

    With a key, to any name.
    """

    def __init__(self, app: ASGIApp, host: str, key: AdminKey | None = None) -> None:
        self._app = app
        self._key = key
        self._names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and (why := self._objection(Headers(scope=scope))):
            await error_response(HTTPStatus.FORBIDDEN, "forbidden", why)(scope, receive, send)
            return
        if scope["type"] == "http" and not self._admits(Headers(scope=scope)):
            why = "the admin API wants its key, as `Authorization: Bearer KEY`"
            refusal = error_response(HTTPStatus.UNAUTHORIZED, "unauthorized", why)
            refusal.headers["WWW-Authenticate"] = 'Basic realm="vllm-sched"'  # a browser will ask
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        said = headers.getlist("authorization")
        return self._key is None or (len(said) < 2 and self._key.admits("".join(said)))

    def _objection(self, headers: Headers) -> str | None:
        hosts = headers.getlist("host")
        by_any_name = self._key is not None and self._key.wanted
        if len(hosts) != 1 or not (by_any_name or self._is_ours(hosts[0])):
            return (
                "the Host header names somebody else; use the address of the admin API, or give it "
                "a key (router.admin.key_file or key_env): then it goes by any name"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return "the admin API takes no requests from other web pages"
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or is_address(name)


def is_address(name: str) -> bool:
    """Whether it is an IP address: those need no resolving, so nobody else can point them here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
