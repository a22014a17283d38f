"""The configuration for display: with all defaults, without secrets."""

from __future__ import annotations

import re
from typing import Any

from proxy.config.fleet_file import FleetConfig

HIDDEN = "***"
# Flags with secret values. Environment variables have no naming convention, so all of them are
# hidden except the families in PLAIN.
SECRET = re.compile(
    r"secret|pass|auth|(key|token|credentials?)$|^keys?_(hashes|env)$", re.IGNORECASE
)
PLAIN = re.compile(r"(CUDA|NVIDIA|NCCL|VLLM|OMP|MKL|TORCH|UCX|TOKENIZERS|HF_HUB)_\w+$")


USER_AND_PASSWORD = re.compile(r"//[^/]*@")
QUERY = re.compile(r"(?<=[?#])[^\s'\"]+")


def without_password(url: str) -> str:
    """Return a URL without its user, password and query."""
    return QUERY.sub(HIDDEN, USER_AND_PASSWORD.sub(f"//{HIDDEN}@", url))


def is_secret(name: str) -> bool:
    """Return whether a field, flag or variable of this name holds a secret."""
    return SECRET.search(name) is not None


def is_plain(variable: str) -> bool:
    """Return whether an environment variable may be shown."""
    return PLAIN.match(variable) is not None and not is_secret(variable)


def shown(config: FleetConfig) -> dict[str, Any]:
    """Return the whole configuration as plain data, with secrets replaced by `***`."""
    data = config.model_dump(mode="json", by_alias=True)
    pools = data["discovery"]["pools"] if data["discovery"] else []
    for block in (*data["workers"], *pools):
        if block["api_key"] is not None:
            block["api_key"] = HIDDEN
    batches = data["router"]["batches"]
    if batches["database"] is not None:
        batches["database"] = without_password(batches["database"])
    for tenant in data["tenants"]:
        tenant["key_hashes"] = [HIDDEN for _ in tenant["key_hashes"]]
    for worker in data["workers"]:
        if launch := worker["launch"]:
            launch["args"] = _without_secrets(launch["args"])
            launch["env"] = {k: v if is_plain(k) else HIDDEN for k, v in launch["env"].items()}
    return data


def _without_secrets(args: list[str]) -> list[str]:
    kept: list[str] = []
    after_secret = False
    for word in args:
        flag, equals, _ = word.partition("=")
        is_flag = word.startswith("--")
        if is_flag and equals and is_secret(flag):
            kept.append(f"{flag}={HIDDEN}")
        else:
            kept.append(HIDDEN if after_secret and not is_flag else word)
        after_secret = is_flag and not equals and is_secret(flag)
    return kept
