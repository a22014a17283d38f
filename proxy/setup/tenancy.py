"""Set the tenants of a fleet file, and read their keys.

The fleet file contains only hashes of keys. Key files and variables may contain plain keys, as
secret stores provide them; they are hashed here and then dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256

from proxy.config import FleetConfig, TenantConfig
from proxy.config.admin import is_loopback
from proxy.config.tenant_checks import has_keys
from proxy.core.tenants.tenants import Tenants
from proxy.errors import ConfigError, Problem
from proxy.setup.settings import tenant_spec
from proxy.text_files import UnreadableFileError, read_text

HASH_PATTERN = re.compile(r"sha256:([0-9a-f]{64})")
KEY_PATTERN = re.compile(r"[!-~]{16,512}")  # shorter keys could be guessed


def apply_tenants(tenants: Tenants, config: FleetConfig, keys: Mapping[bytes, str]) -> None:
    tenants.replace([tenant_spec(tenant, config) for tenant in config.tenants], keys)


def read_keys(
    config: FleetConfig, source: str, environ: Mapping[str, str] = os.environ
) -> dict[bytes, str]:
    """Return the tenant names by key hash; raise `ConfigError` on problems."""
    problems: list[Problem] = []
    keys = _keys(enumerate(config.tenants), environ, problems)
    if problems:
        raise ConfigError(source, problems)
    return keys


def key_problems(config: FleetConfig) -> list[Problem]:
    """Return what is wrong with the keys of tenants that name a source of keys."""
    problems: list[Problem] = []
    with_keys = [pair for pair in enumerate(config.tenants) if has_keys(pair[1])]
    _keys(with_keys, os.environ, problems)
    return problems


def _keys(
    tenants: Iterable[tuple[int, TenantConfig]], environ: Mapping[str, str], problems: list[Problem]
) -> dict[bytes, str]:
    keys: dict[bytes, str] = {}
    for index, tenant in tenants:
        path = f"tenants[{index}]"
        own, before = 0, len(problems)
        for name, text in _key_texts(tenant, path, environ, problems):
            if (digest := _digest(text)) is None:
                why = (
                    "is neither a key of 16 to 512 printable characters nor sha256: with 64 of "
                    "0-9a-f; use what `vllm-sched key` prints"
                )
                problems.append(Problem(f"{path}.{name}", why, tenant.name))
                continue
            own += 1
            if (owner := keys.setdefault(digest, tenant.name)) != tenant.name:
                why = f"has a key that tenant {owner} has too; each key must belong to one tenant"
                problems.append(Problem(f"{path}.{name}", why, tenant.name))
        if not own and len(problems) == before:
            why = "has no key in its file or variable; add a key"
            problems.append(Problem(path, why, tenant.name))
    return keys


def refuse_anonymous_access(config: FleetConfig, host: str, source: str) -> None:
    """Refuse a file without tenants if the router listens on a public address.

    The listening address changes only with a restart.
    """
    if config.tenants or config.router.allow_anonymous or is_loopback(host):
        return
    why = (
        f"no tenant is left, and the router listens on {host} until a restart: any client could "
        "use the fleet; keep a tenant, set router.allow_anonymous: true, or restart"
    )
    raise ConfigError(source, [Problem("tenants", why)])


def _key_texts(
    tenant: TenantConfig, path: str, environ: Mapping[str, str], problems: list[Problem]
) -> Iterator[tuple[str, str]]:
    for key_hash in tenant.key_hashes:
        yield "key_hashes", key_hash
    if (file := tenant.keys_file) is not None:
        try:
            lines = read_text(file).splitlines()
        except UnreadableFileError as error:
            problems.append(Problem(f"{path}.keys_file", f"{str(file)!r}: {error}", tenant.name))
        else:
            for line in lines:
                if (text := line.strip()) and not text.startswith("#"):
                    yield "keys_file", text
    if (variable := tenant.keys_env) is not None:
        if not environ.get(variable):
            why = f"{variable}: not set; set it, or remove keys_env"
            problems.append(Problem(f"{path}.keys_env", why, tenant.name))
        for text in environ.get(variable, "").split():
            yield "keys_env", text


def _digest(text: str) -> bytes | None:
    if match := HASH_PATTERN.fullmatch(text):
        return bytes.fromhex(match[1])
    if text.lower().startswith("sha256:"):
        return None  # a malformed hash; it must not be accepted as a plain key
    return sha256(text.encode()).digest() if KEY_PATTERN.fullmatch(text) else None
