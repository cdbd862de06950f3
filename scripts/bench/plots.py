"""What the plots share: colours, a plain style, and files that don't change unless their contents do."""

import logging
from pathlib import Path

from fairseq_el.errors import UserError

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of every font it looks at
try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator
except ImportError as error:
    raise UserError("plots need matplotlib, which is not installed: run `make install`") from error

# Colours that are told apart without red and green.
COLOURS = {
    "no-cache": "#999999",
    "copied": "#D55E00",
    "shared": "#E69F00",
    "shared-kernel": "#009E73",
    "el": "#0072B2",
}
matplotlib.rcParams |= {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fairseq_el",
}


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """In inches. The axes of a row share their vertical scale; they come row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, sharey="row", squeeze=False).flat)


def save_plot(figure: Figure, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    figure.savefig(files[0], dpi=150, metadata={"Software": None})
    figure.savefig(files[1], metadata={"Date": None})
    return files


def plain_number(value: float) -> str:
    return f"{value:g}"


def plain_log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, 20 and so on."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: plain_number(value))
    axis.set_minor_locator(NullLocator())
