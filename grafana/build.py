"""Write the dashboards into `grafana/dashboards/`, or check that they are up to date.

Also writes the Prometheus operator's rules (`grafana.rules`) and the list of all metrics
(`grafana.reference`).

python -m grafana.build            # write
python -m grafana.build --check    # fail if a file differs or a metric is unknown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from grafana import reference, rules
from grafana.boards import engine, fleet, handover
from grafana.declared import ROOT, all_of_them
from grafana.panels import Board, series, to_json

FOLDER = "grafana/dashboards"
BOARDS: tuple[Board, ...] = (fleet.BOARD, engine.BOARD, handover.BOARD)


def written(board: Board) -> str:
    return json.dumps(to_json(board), indent=2, ensure_ascii=False) + "\n"


def files() -> dict[str, str]:
    """Return the content of all files by path."""
    boards = {f"{FOLDER}/{board.uid}.json": written(board) for board in BOARDS}
    return boards | {rules.FILE: rules.written(), reference.FILE: reference.written()}


def undefined(boards: Iterable[Board], known: set[str]) -> list[str]:
    """Return a message for each expression with an unknown metric."""
    return [
        f"{board.title}: {title}: {name} is not declared; correct the name, or add it to "
        "grafana/vllm-metrics.txt if it is vLLM's"
        for board in boards
        for title, expr in board.expressions()
        for name in sorted(series(expr) - known)
    ]


def differing(root: Path = ROOT) -> list[str]:
    """Return a message for each file that is out of date."""
    wanted = files()
    wrong = [
        f"{name} is out of date; run python -m grafana.build"
        for name, text in wanted.items()
        if not (root / name).exists() or (root / name).read_text(encoding="utf-8") != text
    ]
    boards = {f"{FOLDER}/{path.name}" for path in (root / FOLDER).glob("*.json")}
    return wrong + [f"{name} has no source; remove it" for name in sorted(boards - wanted.keys())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grafana.build", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file differs"
    )
    if not parser.parse_args(arguments).check:
        for name, text in files().items():
            (ROOT / name).write_text(text, encoding="utf-8")
        return 0
    wrong = differing() + undefined(BOARDS, all_of_them())
    for line in wrong:
        sys.stderr.write(line + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
