"""`vllm-sched check` of a file with discovered workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_sched.cli.main import main


def test_check_lists_pools_in_place_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "model: m\ndiscovery:\n  pools:\n"
        "    - {name: s, role: short, selector: a=b, max_model_len: 20000}\n"
        "    - {name: l, role: long, dns: long.llm, model: other}\n"
    )
    assert main(["check", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows[0] == ["s:", "any", "short", "EndpointSlices", "a=b", "m", "20000", "discovered"]
    assert rows[1] == [
        "l:",
        "any",
        "long",
        "dns",
        "long.llm",
        "other",
        "from",
        "worker",
        "discovered",
    ]
