"""From what the fleet file says of tenants to what the core knows of them; reads their keys.

A key stands in the file as its hash alone. In a file or a variable of its own it may stand plain,
as secret stores hand it out; here too it is hashed and forgotten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256

from proxy.config import FleetConfig, PartialConfig, TenantConfig
from proxy.config.admin import is_loopback
from proxy.config.tenant_checks import has_keys
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import RANKS, Rank, Tenants, TenantSpec
from proxy.errors import ConfigError, Problem

HASH = re.compile(r"sha256:([0-9a-f]{64})")
KEY = re.compile(r"[!-~]{16,512}")  # shorter ones could be guessed


def take_tenants(tenants: Tenants, config: FleetConfig, keys: Mapping[bytes, str]) -> None:
    """Take the tenants of a fleet file, and their keys."""
    salted = config.router.isolate_caches
    tenants.replace([_spec(each, salted=salted) for each in config.tenants], keys)


def read_keys(
    config: FleetConfig, source: str, environ: Mapping[str, str] = os.environ
) -> dict[bytes, str]:
    """Read the hashes of all keys, and whose each is."""
    problems: list[Problem] = []
    keys = _keys(enumerate(config.tenants), environ, problems)
    if problems:
        raise ConfigError(source, problems)
    return keys


def key_problems(draft: PartialConfig) -> list[Problem]:
    """Say what is wrong with keys, of those tenants of whom the file says where they are."""
    problems: list[Problem] = []
    known = ((index, each) for index, each in draft.tenants.items() if has_keys(each))
    _keys(known, os.environ, problems)
    return problems


def _keys(
    tenants: Iterable[tuple[int, TenantConfig]], environ: Mapping[str, str], problems: list[Problem]
) -> dict[bytes, str]:
    keys: dict[bytes, str] = {}
    for index, tenant in tenants:
        path = f"tenants[{index}]"
        own, before = 0, len(problems)
        for name, word in _words(tenant, path, environ, problems):
            if (digest := _digest(word)) is None:
                why = (
                    "is not a key of 16 or more letters, digits and signs, nor sha256: and 64 of "
                    "0-9a-f; give what `vllm-sched key` prints"
                )
                problems.append(Problem(f"{path}.{name}", why))
                continue
            own += 1
            if (owner := keys.setdefault(digest, tenant.name)) != tenant.name:
                why = f"has a key that is {owner}'s too; a key has one owner"
                problems.append(Problem(f"{path}.{name}", why))
        if not own and len(problems) == before:
            problems.append(Problem(path, "has no key in its file or variable; put one there"))
    return keys


def keep_strangers_out(config: FleetConfig, host: str, source: str) -> None:
    """Refuse a file that would leave a router to strangers: where it listens takes a restart."""
    if config.tenants or config.router.allow_anonymous or is_loopback(host):
        return
    why = (
        f"none are left, and this router listens on {host} until it is restarted: whoever reaches "
        "it could use the fleet; keep some, or give router.allow_anonymous: true, or restart"
    )
    raise ConfigError(source, [Problem("tenants", why)])


def _words(
    tenant: TenantConfig, path: str, environ: Mapping[str, str], problems: list[Problem]
) -> Iterator[tuple[str, str]]:
    """List keys and hashes, and where each was said."""
    for each in tenant.key_hashes:
        yield "key_hashes", each
    if (file := tenant.keys_file) is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            problems.append(Problem(f"{path}.keys_file", f"{str(file)!r}: is not UTF-8 text"))
        except OSError as error:
            why = f"{str(file)!r}: can't be read: {error.strerror}; check path and permissions"
            problems.append(Problem(f"{path}.keys_file", why))
        else:
            for line in lines:
                if (word := line.strip()) and not word.startswith("#"):
                    yield "keys_file", word
    if (variable := tenant.keys_env) is not None:
        if not environ.get(variable):
            why = f"{variable}: is not set; set it, or leave this out"
            problems.append(Problem(f"{path}.keys_env", why))
        for word in environ.get(variable, "").split():
            yield "keys_env", word


def _digest(word: str) -> bytes | None:
    if found := HASH.fullmatch(word):
        return bytes.fromhex(found[1])
    if word.lower().startswith("sha256:"):
        return None  # a hash, not quite as it should be: taken for a key, it would be one
    return sha256(word.encode()).digest() if KEY.fullmatch(word) else None


def _spec(tenant: TenantConfig, *, salted: bool) -> TenantSpec:
    limits = Limits(**tenant.limits.model_dump())
    models = None if tenant.models is None else frozenset(tenant.models)
    salted = salted or tenant.cache_salt
    return TenantSpec(
        tenant.name,
        RANKS[tenant.class_],
        tenant.weight,
        limits,
        models,
        salted=salted,
        explain=tenant.explain,
    )


def fairness_settings(config: FleetConfig) -> FairnessSettings:
    """Tell the core how turns are taken."""
    return FairnessSettings(**config.router.fairness.model_dump())


def admission_settings(config: FleetConfig) -> AdmissionSettings | None:
    """Tell the core who is refused for coming too late; None if nobody is."""
    said = config.router.admission
    own = {
        Rank.INTERACTIVE: said.interactive_ttft_s,
        Rank.STANDARD: said.standard_ttft_s,
        Rank.BATCH: said.batch_ttft_s,
    }
    targets = {rank: own_s or said.ttft_s for rank, own_s in own.items()}
    known = {rank: target_s for rank, target_s in targets.items() if target_s is not None}
    return AdmissionSettings(known) if known else None
