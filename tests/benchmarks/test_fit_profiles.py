"""`python -m benchmarks.fit_profiles`: errors of its environment, and its check of the files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fit_profiles


def test_error_of_the_environment_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "benchmarks").mkdir()
    source = "import sys; print('a warning', file=sys.stderr); sys.exit('no kernels')"
    (tmp_path / "benchmarks" / "fit_profiles.py").write_text(source)
    monkeypatch.setattr(fit_profiles, "environment", lambda: Path(sys.executable))
    monkeypatch.setattr(fit_profiles, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fit_profiles", "--systems", "h100"])
    assert fit_profiles.main() == 1
    assert capsys.readouterr().err == "a warning\nno kernels\n"


def test_check_names_what_differs_from_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit_profiles", "--inside", "--check", "--systems", "h100"])

    def fitted(system: str, date: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((fit_profiles.DATA / f"{system}.json").read_text())
        assert date == content["date"]
        return content | change

    monkeypatch.setattr(fit_profiles, "fit_system", fitted)
    change: dict[str, Any] = {}
    assert fit_profiles.main() == 0
    assert capsys.readouterr().out == "a new fit is equal to the files\n"
    change = {"version": "9.9.9"}
    assert fit_profiles.main() == 1
    assert capsys.readouterr().out == "h100.json: version\n"
