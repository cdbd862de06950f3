"""The experiment `growth`: how our time and memory grow with source, beam, batch and output, one at a time."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import estimates
from bench.experiment import Experiment, Loaded
from bench.generator import Record, spread, unique
from bench.plots import COLOURS, Figure, new_figure, plain_log_ticks
from bench.pool import Pool, Timetable, tiny, why_missing
from bench.protocol import Request
from bench.report import in_seconds, megabytes, opening, table
from bench.systems import SYSTEMS
from bench.tasks import BART, TINY_BART, Model

TITLES = {"source_length": "source length n", "beam": "beam", "batch": "batch", "length": "output length"}
FORMS = ("auto", "always")
QUANTITIES = {
    "encoder_seconds": "encoder",
    "decoding_seconds": "decoding",
    "state_bytes": "state",
    "working_bytes": "memory above rest",
}
# What the formulas lead to expect of a generation that is large in the one thing that grows.
EXPECTED = {
    "source_length": "encoder n to n² (linear layers, then attention), decoding at most n, source state n",
    "beam": "nothing in the encoder, decoding and beam state at most x, no source state",
    "batch": "everything in proportion, where a small batch does not leave the weights' reading to pay for",
    "length": "steps, in proportion; attention to ever more own tokens adds a square",
}


@dataclass(frozen=True)
class Settings:
    model: Model = BART
    base: dict[str, int] = field(
        default_factory=lambda: {"batch": 4, "source_length": 512, "beam": 4, "length": 32}, hash=False
    )
    axes: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "source_length": (128, 256, 512, 1024),
            "beam": (1, 2, 4, 8),
            "batch": (1, 2, 4, 8),
            "length": (8, 16, 32, 64),
        },
        hash=False,
    )
    seconds_per_point: float = 6.0
    minutes: float = 5.0

    def points(self) -> list[dict[str, int]]:
        """Each once; the base is on every axis."""
        every = [self.base | {axis: value} for axis, values in self.axes.items() for value in values]
        return [dict(point) for point in unique(tuple(point.items()) for point in every)]


QUICK = Settings(
    model=TINY_BART,
    base={"batch": 2, "source_length": 32, "beam": 2, "length": 6},
    axes={"source_length": (16, 32, 64), "beam": (1, 2), "batch": (1, 2), "length": (3, 6)},
    seconds_per_point=0.0,
)


def requests(settings: Settings) -> list[Request]:
    """First `always`, decoding alone, in an order in which encoder outputs can be used again; then `auto`, whole."""
    points = sorted(settings.points(), key=lambda point: (point["source_length"], point["batch"]))
    return [
        *(Request("decode", **point, attention="always") for point in points),
        *(Request("generate", **point, attention="auto") for point in settings.points()),
    ]


def time_plan(settings: Settings, repeats: int) -> list[tuple[str, float]]:
    plan = [(f"loading {settings.model.title}", estimates.loading_seconds(settings.model))]
    encoded = None
    for request in requests(settings):
        seconds = request_seconds(settings, request)
        total = seconds * rounds(settings, seconds, repeats)
        if request.op == "decode" and encoded != (request.source_length, request.batch):
            encoded = (request.source_length, request.batch)
            total += min(8, request.batch) * estimates.source_seconds(settings.model, request.source_length)
        plan.append((name_of(request), total))
    return plan


def name_of(request: Request) -> str:
    shape = ", ".join(f"{title} {getattr(request, axis)}" for axis, title in TITLES.items())
    return f"{request.attention}: {shape}"


def request_seconds(settings: Settings, request: Request) -> float:
    return estimates.request_seconds(settings.model, request, is_stock=False)


def rounds(settings: Settings, seconds: float, repeats: int) -> int:
    return max(1, min(repeats, int(settings.seconds_per_point / seconds)))


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    planned = sum(seconds for _, seconds in time_plan(settings, repeats))
    beams = unique(point["beam"] for point in settings.points())
    warm_up = {"el": [tiny(beam, attention="auto") for beam in beams]}
    records = []
    with (
        Timetable(planned, 60 * settings.minutes) as timetable,
        Pool([SYSTEMS["el"]], settings.model.checkpoint, logs, warm_up) as pool,
    ):
        for request in requests(settings):
            seconds = request_seconds(settings, request)
            timetable.begin(name_of(request))
            for repeat in range(rounds(settings, seconds, repeats)):
                if timetable.has_time_for(seconds):
                    records.append(pool.ask("el", request, {"repeat": repeat}))
                timetable.end(seconds)
        at_rest = pool.loaded["el"]["memory"]["resident"] if pool.loaded else None
    return pool.loaded, [record | {"at_rest_bytes": at_rest} for record in records]


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    axes = {
        axis: [{"value": value} | point_figures(settings.base | {axis: value}, records) for value in values]
        for axis, values in settings.axes.items()
    }
    fitted = {
        axis: {
            form: {quantity: exponent(rows, form, quantity) for quantity in QUANTITIES} for form in FORMS
        }
        for axis, rows in axes.items()
    }
    return {"axes": axes, "exponents": fitted}


def point_figures(point: dict[str, int], records: list[Record]) -> dict[str, Any]:
    found = {}
    for form in FORMS:
        wanted = point | {"attention": form}
        own = [r for r in records if wanted.items() <= r.items() and why_missing(r) is None]
        found[form] = form_figures(own) if own else None
    return found


def form_figures(own: list[Record]) -> dict[str, Any]:
    """Seconds are spreads; encoder and memory are those of whole generations alone."""
    whole = own[0]["op"] == "generate"
    encoders = [r["encoder_seconds"] if whole else 0.0 for r in own]
    return {
        "encoder_seconds": spread(encoders) if whole else None,
        "decoding_seconds": spread([r["seconds"] - encoder for r, encoder in zip(own, encoders)]),
        "state_bytes": max(r["state_bytes"] for r in own),
        "working_bytes": max(r["memory"]["peak"] - r["at_rest_bytes"] for r in own) if whole else None,
    }


def exponent(rows: list[dict[str, Any]], form: str, quantity: str) -> float | None:
    """p of the power law value^p that is nearest to the measurements: least squares of logarithms."""
    points = []
    for row in rows:
        value = row[form][quantity] if row[form] else None
        value = value["median"] if isinstance(value, dict) else value
        if value is not None and value > 0:
            points.append((math.log(row["value"]), math.log(value)))
    return slope(points) if len(points) > 1 else None


def slope(points: list[tuple[float, float]]) -> float:
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread_x


def render(results: dict[str, Any]) -> str:
    settings, made = results["settings"], results["figures"]
    base = ", ".join(f"{TITLES[axis]} {value}" for axis, value in settings["base"].items())
    parts = [
        *opening("Growth: time and memory against everything", results),
        "![Seconds and bytes against source length, beam, batch and output length, axes logarithmic](growth.png)",
        f"fairseq_el, {settings['model']['title']} shapes, around {base}: one of these grows, the others stay. Whole "
        "generations with `--el-attention auto`, all of them run to the end; with `always`, decoding from the same "
        "encoder output. State is what is kept of sources and beams at the peak; memory above rest is the process's "
        "peak less what it takes when it is loaded. Also as [SVG](growth.svg).",
        "### Fitted exponents\n\nThe p for which value^p is nearest, by least squares of logarithms: 1 is in "
        "proportion, 0 is no growth.",
        exponents_table(made["exponents"]),
        "; ".join(f"{TITLES[axis]}: {words}" for axis, words in EXPECTED.items()).capitalize() + ".",
    ]
    for axis, rows in made["axes"].items():
        parts += [f"### Against {TITLES[axis]}", axis_table(axis, rows)]
    return "\n\n".join(parts)


def exponents_table(exponents: dict[str, Any]) -> str:
    header = ["what grows", *(f"{QUANTITIES[q]}, `auto`" for q in QUANTITIES), "decoding, `always`", "state, `always`"]
    cells = []
    for axis, forms in exponents.items():
        auto = [forms["auto"][quantity] for quantity in QUANTITIES]
        always = [forms["always"][quantity] for quantity in ("decoding_seconds", "state_bytes")]
        cells.append([TITLES[axis], *("" if p is None else f"{p:.2f}" for p in auto + always)])
    return table(header, cells)


def axis_table(axis: str, rows: list[dict[str, Any]]) -> str:
    header = [TITLES[axis], "encoder, s", "decoding, s", "decoding `always`, s", "state", "state, `always`",
              "memory above rest"]  # fmt: skip
    cells = []
    for row in rows:
        auto, always = row["auto"], row["always"]
        ours = [in_seconds(auto["encoder_seconds"]), in_seconds(auto["decoding_seconds"])] if auto else ["no time"] * 2
        cells.append(
            [
                str(row["value"]),
                *ours,
                in_seconds(always["decoding_seconds"]) if always else "no time",
                megabytes(auto["state_bytes"]) if auto else "",
                megabytes(always["state_bytes"]) if always else "",
                megabytes(auto["working_bytes"]) if auto else "",
            ]
        )
    return table(header, cells)


LINES = {  # form, quantity, label, colour
    "seconds": (
        ("auto", "encoder_seconds", "encoder", "copied"),
        ("auto", "decoding_seconds", "decoding, auto", "shared-kernel"),
        ("always", "decoding_seconds", "decoding, always", "el"),
    ),
    "MB": (
        ("auto", "working_bytes", "memory above rest, auto", "no-cache"),
        ("auto", "state_bytes", "state, auto", "shared-kernel"),
        ("always", "state_bytes", "state, always", "el"),
    ),
}


def draw(results: dict[str, Any]) -> Figure:
    """Time above, memory below, a column for each thing that grows."""
    made = results["figures"]
    columns = len(made["axes"])
    figure, panels = new_figure(13, 8, columns, rows=len(LINES))
    for number, (unit, lines) in enumerate(LINES.items()):
        row = panels[number * columns : (number + 1) * columns]
        for ax, (axis, points) in zip(row, made["axes"].items()):
            draw_panel(ax, axis, points, lines, made["exponents"][axis])
        row[0].set_ylabel(unit)
        row[-1].legend(loc="upper left", bbox_to_anchor=(1.08, 1))
    figure.suptitle("fairseq_el: time and memory, with fitted exponents", x=0.01, ha="left")
    return figure


def draw_panel(ax: Any, axis: str, rows: list[dict[str, Any]], lines: Any, exponents: dict[str, Any]) -> None:
    for form, quantity, label, colour in lines:
        found = [(row["value"], number_of(row[form][quantity])) for row in rows if row[form]]
        points = [(value, number) for value, number in found if number > 0]  # little memory may be less than at rest
        if not points:
            continue
        ax.plot(*zip(*points), "o-", color=COLOURS[colour], markersize=4, label=label)
        if exponents[form][quantity] is not None:
            is_lower = (form, quantity) == ("auto", "state_bytes")  # of two lines that lie close together
            beside = 4, -12 if is_lower else 4
            ax.annotate(f"{exponents[form][quantity]:.2f}", points[-1], textcoords="offset points", xytext=beside,
                        fontsize=8, color=COLOURS[colour])  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel=TITLES[axis])
    ax.set_xticks([row["value"] for row in rows], [str(row["value"]) for row in rows])
    ax.minorticks_off()
    plain_log_ticks(ax.yaxis)


def number_of(quantity: Any) -> float:
    """The median of seconds; bytes as millions of them."""
    return quantity["median"] if isinstance(quantity, dict) else quantity / 1e6


EXPERIMENT = Experiment("growth", Settings(), QUICK, measure, figures, render, draw, time_plan)
