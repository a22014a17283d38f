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
from grafana.declared import all_of_them
from grafana.panels import Board, series, to_json

FOLDER = Path(__file__).parent / "dashboards"
BOARDS: tuple[Board, ...] = (fleet.BOARD, engine.BOARD, handover.BOARD)


def written(board: Board) -> str:
    """Return the JSON file of a dashboard."""
    return json.dumps(to_json(board), indent=2, ensure_ascii=False) + "\n"


def files() -> dict[str, str]:
    """Return all files by name."""
    return {f"{board.uid}.json": written(board) for board in BOARDS}


def undefined(boards: Iterable[Board], known: set[str]) -> list[str]:
    """Return a message for each expression with an unknown metric."""
    return [
        f"{board.title}: {title}: {name} is not declared; correct the name, or add it to "
        "grafana/vllm-metrics.txt if it is vLLM's"
        for board in boards
        for title, expr in board.expressions()
        for name in sorted(series(expr) - known)
    ]


def differing(folder: Path = FOLDER) -> list[str]:
    """Return a message for each file that is out of date."""
    wanted, there = files(), {path.name for path in folder.glob("*.json")}
    wrong = [
        f"grafana/dashboards/{name} is out of date; run python -m grafana.build"
        for name, text in wanted.items()
        if name not in there or (folder / name).read_text(encoding="utf-8") != text
    ]
    return wrong + [
        f"grafana/dashboards/{name} has no source; remove it"
        for name in sorted(there - wanted.keys())
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m grafana.build", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file differs"
    )
    if not parser.parse_args(arguments).check:
        FOLDER.mkdir(exist_ok=True)
        for name, text in files().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        rules.FILE.write_text(rules.written(), encoding="utf-8")
        reference.FILE.write_text(reference.written(), encoding="utf-8")
        return 0
    wrong = (
        differing() + rules.differing() + reference.differing() + undefined(BOARDS, all_of_them())
    )
    for line in wrong:
        sys.stderr.write(line + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
