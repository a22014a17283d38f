"""Tenant keys from files and the environment, and the settings passed to the core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from proxy.config import FleetConfig, load
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenants
from proxy.errors import ConfigError
from proxy.setup.app import App
from proxy.setup.tenancy import apply_tenants, read_keys
from tests.proxy.config import fleet_files
from tests.proxy.running import write_fleet

WORKER = {"name": "w", "url": "http://127.0.0.1:9001"}
KEYS = [f"sk-vs-{letter * 20}" for letter in "abcd"]


def hashed(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def hashes(key: str, name: str = "a") -> dict[str, Any]:
    """Return a tenant with the hash of this key."""
    return {"name": name, "key_hashes": [hashed(key)]}


def fleet(*tenants: dict[str, Any], **router: Any) -> FleetConfig:
    return fleet_files.read(tenants=list(tenants), router=router)


def read(*tenants: dict[str, Any], **environ: str) -> dict[str, str]:
    found = read_keys(fleet(*tenants), "fleet.yaml", environ)
    owners = {key: found.get(sha256(key.encode()).digest()) for key in KEYS}
    return {key: name for key, name in owners.items() if name is not None}


def problems_of(*tenants: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        read(*tenants)
    return {problem.path: problem.message for problem in error.value.problems}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a key file, which does not exist yet."""
    return tmp_path / "keys"


def test_keys_are_read_from_hashes_file_and_environment(file: Path) -> None:
    a, b, c, d = KEYS
    file.write_text(f"# of the chat\n\n  {b}\n{hashed(c)}\n")
    chat = hashes(a, "chat") | {"keys_file": str(file), "keys_env": "CHAT_KEYS"}
    assert read(chat, CHAT_KEYS=f"{d} {hashed(a)}") == dict.fromkeys(KEYS, "chat")


@pytest.mark.parametrize("text", [KEYS[0], f"# a comment\n{KEYS[0]}"])
def test_byte_order_mark_is_no_part_of_a_key(file: Path, text: str) -> None:
    """Editors and shells of Windows write one."""
    file.write_text(text, encoding="utf-8-sig")
    assert read({"name": "a", "keys_file": str(file)}) == {KEYS[0]: "a"}


def test_each_tenant_has_its_own_keys(file: Path) -> None:
    file.write_text(KEYS[1])
    tenants = hashes(KEYS[0]), {"name": "b", "keys_file": str(file)}
    assert read(*tenants) == {KEYS[0]: "a", KEYS[1]: "b"}
    file.write_text(KEYS[0])
    problems = problems_of(*tenants)
    assert "tenant a has too" in problems["tenants[1].keys_file"]
    assert KEYS[0] not in str(problems)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("short\n", "is neither a key of 16"),
        ("with some spaces in it\n", "is neither a key of 16"),
        (hashed(KEYS[0]).upper(), "nor sha256: with 64 of 0-9a-f"),
        (hashed(KEYS[0])[:-1], "nor sha256: with 64 of 0-9a-f"),
        ("sha256:abc\n", "nor sha256: with 64 of 0-9a-f"),
        ("\n# nothing\n", "has no key"),
        (None, "can't be read"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_invalid_key_files_are_reported(file: Path, text: Any, words: str) -> None:
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems = str(problems_of({"name": "a", "keys_file": str(file)}))
    assert words in problems
    assert "spaces in it" not in problems, "a possible key is not repeated"


def test_every_tenant_without_a_key_is_reported(file: Path) -> None:
    file.touch()
    found = problems_of(
        {"name": "a", "keys_env": "NONE_THERE"}, {"name": "b", "keys_file": str(file)}
    )
    assert [*found] == ["tenants[0].keys_env", "tenants[1]"]


def test_problems_name_the_tenant(file: Path) -> None:
    file.write_text("short\n")
    silent = {"name": "c", "keys_env": "NONE_THERE"}
    with pytest.raises(ConfigError) as error:
        read(hashes(KEYS[0]), {"name": "b", "keys_file": str(file)}, silent)
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "tenants[1].keys_file (b)", "tenants[2].keys_env (c)",
    ]  # fmt: skip


def test_tenant_settings_reach_the_core() -> None:
    tenant = {
        "name": "a", "class": "batch", "weight": 2.0, "key_hashes": [hashed(KEYS[0])],
        "models": ["m"], "limits": {"tokens_per_minute": 10, "max_prompt_tokens": 5},
    }  # fmt: skip
    tenants = Tenants()
    config = fleet(tenant)
    apply_tenants(tenants, config, read_keys(config, "fleet.yaml", {}))
    (owner,) = tenants
    assert (owner.spec.rank, owner.spec.weight) == (Rank.BATCH, 2.0)
    assert owner.spec.limits == Limits(tokens_per_minute=10, max_prompt_tokens=5)
    assert owner.spec.models == frozenset(["m"])
    assert not owner.spec.salted
    apply_tenants(tenants, fleet(tenant, isolate_caches=True), {})
    assert next(iter(tenants)).spec.salted


@asynccontextmanager
async def router(source: Path) -> AsyncIterator[App]:
    """Return a router that does not run."""
    app = App(load(source), source)
    yield app
    await app.stop()


async def test_router_on_all_interfaces_keeps_its_tenants(tmp_path: Path) -> None:
    everywhere = {"host": "0.0.0.0"}  # noqa: S104 - the test needs all interfaces
    source = write_fleet(tmp_path, WORKER, router=everywhere, tenants=[hashes(KEYS[0])])
    async with router(source) as app:
        write_fleet(tmp_path, WORKER)  # the host applies after a restart only
        with pytest.raises(ConfigError, match="until a restart"):
            await app.reload()
        assert not app.router.tenants.open
        write_fleet(tmp_path, WORKER, router=everywhere | {"allow_anonymous": True})
        await app.reload()
        assert app.router.tenants.open


async def test_reload_replaces_tenants_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    kept, file = hashes(KEYS[0], "stays"), tmp_path / "keys"
    file.write_text(KEYS[1])
    source = write_fleet(tmp_path, WORKER, tenants=[kept, {"name": "b", "keys_file": str(file)}])
    async with router(source) as app:
        tenants = app.router.tenants

        def owners() -> list[str | None]:
            found = (tenants.find_by_key(key.encode()) for key in KEYS)
            return [tenant and tenant.name for tenant in found]

        before = tenants.find_by_key(KEYS[1].encode())
        assert owners() == ["stays", "b", None, None]
        for invalid, message in (("", "has no key in its file"), ("short", "is neither a key")):
            file.write_text(invalid)
            with pytest.raises(ConfigError, match=message):
                await app.reload()
            assert owners() == ["stays", "b", None, None]
        file.write_text(KEYS[2])
        await app.reload()
        assert owners() == ["stays", None, "b", None]
        assert tenants.find_by_key(KEYS[2].encode()) is before
        write_fleet(tmp_path, WORKER, tenants=[kept])
        await app.reload()
        assert owners() == ["stays", None, None, None]
        write_fleet(tmp_path, WORKER)
        await app.reload()
        assert tenants.open
