"""The admin API of a running router."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from proxy.config import FleetConfig, TlsConfig
from proxy.setup.secret_files import admin_key, read_secret
from vllm_sched.errors import UsageError

TIMEOUT_S = 10.0
URL_REMEDY = (
    "give the URL of a running router's admin API, such as http://127.0.0.1:8001; its port is "
    "router.admin.port, not the port for clients"
)
# Messages of the admin API. Others of these statuses are from the port for clients.
OF_ADMIN_API = ("there is no worker", "the admin API")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LiveRouter:
    url: str
    key: str | None = field(default=None, repr=False)
    tls: TlsConfig | None = None

    @classmethod
    def from_config(cls, config: FleetConfig, source: Path, url: str = "") -> LiveRouter:
        from proxy.setup.app import url_of

        admin = config.router.admin
        url = url or url_of(admin.host, admin.port, admin.tls)
        return cls(url, read_secret(admin_key, config.router, str(source)), admin.tls)

    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}

    def opener(self) -> urllib.request.OpenerDirector:
        """Return a URL opener that ignores proxies and trusts the fleet file's certificate.

        The certificate is trusted for any host name.
        """
        context = ssl.create_default_context()
        if self.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(self.tls.cert_file)
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )


def call_router(
    live: LiveRouter, what: str, kind: TypeAdapter[Answer], body: str | None = None
) -> Answer:
    """Return the response to a GET, or to a POST with a body."""
    url = live.url
    try:
        opener = live.opener()
        request = urllib.request.Request(  # noqa: S310 - the user's own URL
            f"{url.rstrip('/')}/admin/{what}",
            data=body.encode() if body is not None else None,
            headers=live.headers(),
        )
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return kind.validate_json(response.read())
    except urllib.error.HTTPError as error:
        with error:
            why = _error_message(error.read()) or error.reason
        ambiguous = error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED)
        elsewhere = f"; {URL_REMEDY}" if ambiguous and not why.startswith(OF_ADMIN_API) else ""
        raise UsageError(f"{url}: {why} (status {error.code}){elsewhere}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, ValidationError):
            why = "the response is not from a router's admin API"
        else:
            why = str(getattr(error, "reason", error))
        raise UsageError(f"{url}: {why}; {URL_REMEDY}") from None


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return ""
