"""The common style of all pictures, readable in black and white.

Lines differ by dashes, markers and lightness; the colours (Okabe and Ito) are for colour-blind
readers too. An SVG keeps its text as text, in the reader's own font.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from vllm_sched.errors import UsageError
from vllm_sched.files import write_whole

INCHES: Final = (7.2, 4.3)
DPI: Final = 150
SUFFIXES: Final = (".svg", ".png")
MAX_LABELLED_RATIO: Final = 3000  # an axis with a larger range shows only powers of ten
MUTED: Final = "#666666"
COLOURS: Final = ("#0072b2", "#b24a00", "#007a5a", "#a0527f", "#1a1a1a", "#8a7000", "#3d9bd0")
DASHES: Final = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (3, 1.5)))
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<")
SETTINGS: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vllm-sched",  # makes files reproducible
    "text.parse_math": False,  # names of classes and tenants may contain "$"
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.constrained_layout.use": True,
}


def check_available() -> None:
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot: pictures need matplotlib; install it with: pip install 'vllm-sched[plots]'"
        )


def line_styles(count: int) -> list[dict[str, Any]]:
    """Return `count` different line styles: dashes, marker, colour."""
    styles = zip(cycle(DASHES), cycle(MARKERS), cycle(COLOURS), strict=False)
    return [
        {"linestyle": dash, "marker": marker, "color": colour}
        for dash, marker, colour in islice(styles, count)
    ]


@contextmanager
def picture(
    stem: Path,
    title: str,
    x: str,
    y: str,
    *,
    inches: tuple[float, float] = INCHES,
    suffixes: Sequence[str] = SUFFIXES,
) -> Iterator[Any]:
    """Yield axes to draw on; the files are written at the end of the block."""
    check_available()
    import matplotlib as mpl

    # Not pyplot, which keeps figures in memory and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=inches)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        yield axes
        stem.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # The font may lack characters of a class name; the PNG then shows boxes.
            warnings.filterwarnings("ignore", "Glyph .* missing from")
            for path in files(stem, suffixes):
                dated = {"Date": None} if path.suffix == ".svg" else {}
                drawn = BytesIO()
                figure.savefig(
                    drawn, format=path.suffix[1:], dpi=DPI,
                    metadata={"Creator": "vllm-sched", **dated},
                )  # fmt: skip
                write_whole(path, drawn.getvalue())


def files(stem: Path, suffixes: Sequence[str] = SUFFIXES) -> Sequence[Path]:
    return [stem.with_name(f"{stem.name}{suffix}") for suffix in suffixes]


def label(name: str) -> str:
    """Return a line's label; matplotlib hides labels that begin with an underscore."""
    return f" {name}" if name.startswith("_") else name


def legend(axes: Any, lines: int) -> None:
    if lines > 1:
        axes.legend(loc="best", handlelength=3.2)


def limit(
    axes: Any, at: float, text: str, *, upright: bool, row: int = 0, left: bool = False
) -> None:
    """Draw a target as a thin line with a label.

    Labels of several upright lines go in rows, to the right or left of their line.
    """
    style = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2)), "gid": "target"}
    if upright:
        axes.axvline(at, **style)
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"),
            xytext=(-3 if left else 3, -2 - 12 * row), textcoords="offset points",
            ha="right" if left else "left", va="top", color=MUTED,
        )  # fmt: skip
    else:
        axes.axhline(at, **style)
        axes.annotate(
            text, (1, at), xycoords=("axes fraction", "data"), xytext=(-2, 3),
            textcoords="offset points", ha="right", color=MUTED,
        )  # fmt: skip


def in_full(axis: Any) -> None:
    """Write an axis's numbers in full: 2,000,000, not 2.0 and 1e6 in a corner."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def plain_log(axis: Any, unit: str = "", factor: float = 1.0) -> None:
    """Label a logarithmic axis with plain numbers: 20, 50, 100."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    narrow = low > 0 and high / low < MAX_LABELLED_RATIO
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:,.10g}{unit}"))
    axis.set_minor_formatter(NullFormatter())
