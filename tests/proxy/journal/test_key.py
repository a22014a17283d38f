"""The key that signs the journals."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import JournalConfig
from proxy.errors import ConfigError
from proxy.journal.key import key_of


def test_key_is_the_file_without_the_whitespace_around_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"\n\xff 0123456789abcdef \n")
    assert key_of(JournalConfig(key_file=file), "f") == b"\xff 0123456789abcdef"
    assert key_of(JournalConfig(), "f") is None


def test_short_or_missing_key_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"f: router\.journal\.key_file: .*cannot be read"):
        key_of(JournalConfig(key_file=file), "f")
    file.write_bytes(b"0123456789abcde\n")
    with pytest.raises(ConfigError, match="has 15 bytes; a key has 16 or more"):
        key_of(JournalConfig(key_file=file), "f")
