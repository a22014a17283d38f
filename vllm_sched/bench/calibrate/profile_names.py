"""Profiles by name: built in, or live from AIConfigurator."""

from __future__ import annotations

from vllm_sched.bench.calibrate import aiconfigurator
from vllm_sched.cost import profiles
from vllm_sched.errors import UsageError


def find_profile(text: str) -> profiles.Profile:
    """Return a built-in profile, or fit one to the optional source."""
    try:
        return profiles.find(text)
    except profiles.NotBuiltInError as error:
        if not aiconfigurator.installed():
            raise UsageError(f"{error}; for others install {profiles.EXTRA}") from None
        return _live(text, error.key)


def _live(text: str, key: profiles.ProfileKey) -> profiles.Profile:
    try:
        return aiconfigurator.profile_of(key)
    except UsageError as error:
        raise UsageError(f"profile {text}: {error}") from None
