"""The reference of the fleet file is what the models say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.config import reference
from proxy.config.reference import FILE, anchor, main, places


def test_it_is_written_as_the_models_are() -> None:
    assert main(["--check"]) == 0, "run `python -m proxy.config.reference`"


def test_every_key_has_a_line_that_says_what_it_is() -> None:
    parts = FILE.read_text().split("\n## ")[1:]
    sections = {heading: text for heading, _, text in (part.partition("\n") for part in parts)}
    assert len(sections) == len(places())
    for path, block in places():
        text = sections[f"`{path}`" if path else "The file itself"]
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| `" in line[:3]]
        assert len(rows) == len(block.model_fields), path
        for name, what, default, said in rows:
            assert all((name, what, default)), name
            assert said.strip(" |"), f"{path}.{name} has no description"
            assert what != "anything", f"{path}.{name}"


def test_links_lead_somewhere() -> None:
    text = FILE.read_text()
    headings = {anchor(each) for each in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\(#([\w-]*)\)", text)) <= headings


def test_a_page_that_is_not_so_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "configuration.md")
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "configuration.md").write_text("otherwise")
    assert main(["--check"]) == 1
    assert "python -m proxy.config.reference" in capsys.readouterr().err
