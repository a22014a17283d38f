"""`python -m benchmarks.fit_profiles` shows why a command of its environment failed."""

from __future__ import annotations

import sys
from pathlib import Path

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
