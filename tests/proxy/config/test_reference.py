"""The generated reference of the fleet file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.config import reference
from proxy.config.reference import FILE, anchor, main, places


def test_reference_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "run `python -m proxy.config.reference`"


def test_every_key_has_a_described_row() -> None:
    parts = FILE.read_text().split("\n## ")[1:]
    sections = {heading: text for heading, _, text in (part.partition("\n") for part in parts)}
    assert len(sections) == len(places())
    for path, block in places():
        text = sections[f"`{path}`" if path else "The file itself"]
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| `" in line[:3]]
        assert len(rows) == len(block.model_fields), path
        for name, kind, default, description in rows:
            assert all((name, kind, default)), name
            assert description.strip(" |"), f"{path}.{name} has no description"
            assert kind != "anything", f"{path}.{name}"


def test_links_have_a_heading() -> None:
    text = FILE.read_text()
    headings = {anchor(heading) for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\(#([\w-]*)\)", text)) <= headings


def test_check_reports_an_outdated_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "configuration.md")
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "configuration.md").write_text("otherwise")
    assert main(["--check"]) == 1
    assert "python -m proxy.config.reference" in capsys.readouterr().err
