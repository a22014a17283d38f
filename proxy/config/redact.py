"""A fleet file as it may be shown to people: defaults filled in, secrets hidden."""

from __future__ import annotations

import re
from typing import Any

from proxy.config.models import FleetConfig

HIDDEN = "***"
# Flags whose value is nobody's business. Variables have names of all kinds: of those, all but a few
# families are hidden.
SECRET = re.compile(
    r"secret|pass|auth|(key|token|credentials?)$|^keys?_(hashes|env)$", re.IGNORECASE
)
PLAIN = re.compile(r"(CUDA|NVIDIA|NCCL|VLLM|OMP|MKL|TORCH|UCX|TOKENIZERS|HF_HUB)_\w+$")


def is_secret(name: str) -> bool:
    """Whether a variable or flag of that name holds a secret."""
    return SECRET.search(name) is not None


def is_plain(variable: str) -> bool:
    """Whether a variable may be shown."""
    return PLAIN.match(variable) is not None and not is_secret(variable)


def shown(config: FleetConfig) -> dict[str, Any]:
    """Return the whole configuration as plain data."""
    data = config.model_dump(mode="json", by_alias=True)
    pools = data["discovery"]["pools"] if data["discovery"] else []
    for each in (*data["workers"], *pools):
        if each["api_key"] is not None:
            each["api_key"] = HIDDEN
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
