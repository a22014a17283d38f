"""Tenants and their keys, from the fleet file, key files and the environment."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig, parse
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenants
from proxy.errors import ConfigError
from proxy.setup.app import App
from proxy.setup.tenancy import read_keys, take_tenants

KEYS = [f"sk-vs-{letter * 20}" for letter in "abcd"]


def hashed(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def fleet(*tenants: dict[str, Any], **router: Any) -> FleetConfig:
    workers = [{"name": "w", "url": "http://127.0.0.1:9001"}]
    data = {"model": "m", "workers": workers, "tenants": list(tenants), "router": router}
    return parse(yaml.safe_dump(data), "fleet.yaml")


def read(*tenants: dict[str, Any], **environ: str) -> dict[str, str]:
    """Return whose each key is, of those there are."""
    found = read_keys(fleet(*tenants), "fleet.yaml", environ)
    whose = {key: found.get(sha256(key.encode()).digest()) for key in KEYS}
    return {key: name for key, name in whose.items() if name is not None}


def wrong(*tenants: dict[str, Any], **environ: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        read(*tenants, **environ)
    return {problem.path: problem.message for problem in error.value.problems}


def test_keys_come_from_three_places(tmp_path: Path) -> None:
    a, b, c, d = KEYS
    file = tmp_path / "keys"
    file.write_text(f"# of the chat\n\n  {b}\n{hashed(c)}\n")
    chat = {
        "name": "chat",
        "key_hashes": [hashed(a)],
        "keys_file": str(file),
        "keys_env": "CHAT_KEYS",
    }
    assert read(chat, CHAT_KEYS=f"{d} {hashed(a)}") == dict.fromkeys(KEYS, "chat")


def test_each_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS[1])
    tenants = {"name": "a", "key_hashes": [hashed(KEYS[0])]}, {"name": "b", "keys_file": str(file)}
    assert read(*tenants) == {KEYS[0]: "a", KEYS[1]: "b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("short\n", "is neither a key of 16"),
        ("with some spaces in it\n", "is neither a key of 16"),
        (hashed(KEYS[0]).upper(), "nor sha256: with 64 of 0-9a-f"),
        (hashed(KEYS[0])[:-1], "nor sha256: with 64 of 0-9a-f"),
        ("sha256:abc\n", None),
        ("\n# nothing\n", "has no key"),
        (None, "cannot be read"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_will_not_do(tmp_path: Path, text: Any, words: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems = wrong({"name": "a", "keys_file": str(file)})
    if words is not None:
        assert words in str(problems)
    assert "spaces in it" not in str(problems), "what may be a key is not repeated"


def test_a_variable_that_is_not_set() -> None:
    assert wrong({"name": "a", "keys_env": "NONE"}).keys() == {"tenants[0].keys_env"}


def test_every_tenant_without_a_key_is_named_whatever_else_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    found = wrong(
        {"name": "a", "keys_env": "NONE_THERE"}, {"name": "b", "keys_file": str(tmp_path / "keys")}
    )
    assert [*found] == ["tenants[0].keys_env", "tenants[1]"]


def test_a_key_has_one_owner(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS[0])
    tenants = {"name": "a", "key_hashes": [hashed(KEYS[0])]}, {"name": "b", "keys_file": str(file)}
    problems = wrong(*tenants)
    assert "tenant a has too" in problems["tenants[1].keys_file"]
    assert KEYS[0] not in str(problems)


def test_what_the_core_is_told() -> None:
    tenant = {
        "name": "a", "class": "batch", "weight": 2.0, "key_hashes": [hashed(KEYS[0])],
        "models": ["m"], "limits": {"tokens_per_minute": 10, "max_prompt_tokens": 5},
    }  # fmt: skip
    tenants = Tenants()
    config = fleet(tenant)
    take_tenants(tenants, config, read_keys(config, "fleet.yaml", {}))
    (one,) = tenants
    assert (one.spec.rank, one.spec.weight) == (Rank.BATCH, 2.0)
    assert one.spec.limits == Limits(tokens_per_minute=10, max_prompt_tokens=5)
    assert one.spec.models == frozenset(["m"])
    assert not one.spec.salted
    take_tenants(tenants, fleet(tenant, isolate_caches=True), {})
    assert next(iter(tenants)).spec.salted


def write(file: Path, *tenants: dict[str, Any], **router: Any) -> None:
    """Write a fleet file with these tenants."""
    workers = [{"name": "w", "url": "http://127.0.0.1:9001"}]
    data = {"model": "m", "workers": workers, "tenants": [*tenants], "router": router}
    file.write_text(yaml.safe_dump(data))


async def test_a_router_that_listens_everywhere_keeps_its_tenants(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    guarded = [{"name": "a", "key_hashes": [hashed(KEYS[0])]}]
    write(file, *guarded, host="0.0.0.0")  # noqa: S104 - that is the point
    app = App(parse(file.read_text(), str(file)), file)
    write(file, host="127.0.0.1")  # which it would listen on after a restart
    with pytest.raises(ConfigError, match="until a restart"):
        await app.reload()
    assert not app.router.tenants.open
    write(file, host="0.0.0.0", allow_anonymous=True)  # noqa: S104
    await app.reload()
    assert app.router.tenants.open
    await app.stop()


async def test_keys_go_with_their_tenant_not_with_their_file(tmp_path: Path) -> None:
    file, keys = tmp_path / "fleet.yaml", tmp_path / "keys"
    stays, goes = (key.encode() for key in KEYS[:2])
    stayer = {"name": "stays", "key_hashes": [hashed(KEYS[0])]}
    keys.write_text(KEYS[1])
    write(file, stayer, {"name": "goes", "keys_file": str(keys)})
    app = App(parse(file.read_text(), str(file)), file)
    tenants = app.router.tenants
    keys.write_text("")
    with pytest.raises(ConfigError, match="has no key in its file"):
        await app.reload()
    assert tenants.of_key(goes) is not None
    write(file, stayer)
    await app.reload()
    assert tenants.of_key(goes) is None
    assert tenants.of_key(stays) is not None
    await app.stop()


async def test_a_reload_takes_other_tenants_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    file, keys = tmp_path / "fleet.yaml", tmp_path / "keys"
    keys.write_text(KEYS[0])
    write(file, {"name": "a", "keys_file": str(keys)})
    app = App(parse(file.read_text(), str(file)), file)
    tenants = app.router.tenants
    found = tenants.of_key(KEYS[0].encode())
    assert found is not None
    keys.write_text(KEYS[1])
    await app.reload()
    assert tenants.of_key(KEYS[0].encode()) is None
    assert tenants.of_key(KEYS[1].encode()) is found
    keys.write_text("short")
    with pytest.raises(ConfigError):
        await app.reload()
    assert tenants.of_key(KEYS[1].encode()) is found
    keys.write_text(KEYS[2])
    write(file)
    await app.reload()
    assert tenants.open
    await app.stop()
