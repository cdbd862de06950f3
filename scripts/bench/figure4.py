"""The experiment `figure4`: time of attention against the length of the source, and against the beam size."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiment import Comparison, Experiment, Loaded, loaded_here, time_interleaved
from bench.figure3 import V100_BALANCE, peaks
from bench.forms import FORMS, Layer, Work, whole_costs, whole_steps
from bench.generator import Record, select, spread, unique
from bench.plots import COLOURS, Figure, new_figure, plain_number
from bench.report import milliseconds, opening, table, times
from fairseq_el.models.costs import Shape


@dataclass(frozen=True)
class Settings:
    """The paper's lengths and beams. As there, the batch shrinks as either grows: what is read per step stays
    the same, and larger than a CPU's caches."""

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    beam_of_lengths: int = 4
    beams: tuple[int, ...] = (1, 2, 4, 8)
    length_of_beams: int = 1024
    tokens_times_beams: int = 65536
    heads: int = 16
    width: int = 1024
    least_seconds: float = 0.1  # for one measurement of one form

    def points(self) -> list[tuple[int, int]]:
        """(n, beam) of both halves of the figure, each once."""
        against_length = [(n, self.beam_of_lengths) for n in self.lengths]
        return unique(against_length + [(self.length_of_beams, beam) for beam in self.beams])

    def shape(self, length: int, beam: int) -> Shape:
        batch = max(1, self.tokens_times_beams // (length * beam))
        return Shape(batch, beam, length, self.heads, self.width)


QUICK = Settings(
    lengths=(16, 32),
    beam_of_lengths=2,
    beams=(1, 2),
    length_of_beams=32,
    tokens_times_beams=128,
    heads=4,
    width=64,
    least_seconds=0.002,
)

COLUMNS = {
    "no-cache": "no cache",
    "copied": "copied per beam",
    "shared": "shared by beams",
    "shared-kernel": "shared, our kernel",
    "el": "EL",
}

# What the paper's text gives of its figure: EL against multi-head attention with cache, at both ends.
PAPER_BY_LENGTH = {64: 1.4, 1024: 5.0}
PAPER_BY_BEAM = {1: 2.0, 8: 5.0}
PAPER_NO_CACHE = 36


def plan(settings: Settings) -> list[Comparison]:
    return [comparison(settings.shape(n, beam)) for n, beam in settings.points()]


def comparison(shape: Shape) -> Comparison:
    facts = {"length": shape.length, "beam": shape.beam, "batch": shape.batch}
    costs = whole_costs(shape) | {"build": shape.build_key_value()}
    return Comparison(facts, costs, lambda: whole_steps(shape) | {"build": build(shape)})


def build(shape: Shape) -> Work:
    """What EL-attention saves: K and V of the sentences, shared by their beams."""
    layer = Layer.random(shape)
    return lambda: layer.ours.build_key_values(layer.states)


def measure(settings: Settings, repeats: int, logs: Path) -> tuple[Loaded, list[Record]]:
    records = time_interleaved(plan(settings), repeats, settings.least_seconds)
    return loaded_here(), [*records, peaks(settings.beam_of_lengths)]


def figures(settings: Settings, records: list[Record]) -> dict[str, Any]:
    rows = [row_of(n, beam, select(records, kind="time", length=n, beam=beam)) for n, beam in settings.points()]
    (machine,) = select(records, kind="peaks")
    balance = machine["flops_per_second"] / machine["bytes_per_second"]
    return {"rows": rows, "peaks": machine, "balance": balance}


def row_of(n: int, beam: int, records: list[Record]) -> dict[str, Any]:
    """Seconds for one sentence with all its beams."""
    batch = records[0]["batch"]
    seconds = {
        work: spread([r["seconds"] / batch for r in select(records, work=work)])
        for work in unique(r["work"] for r in records)
    }
    el = seconds["el"]["median"]
    return {
        "length": n,
        "beam": beam,
        "batch": batch,
        "seconds": seconds,
        "el_faster": {form: seconds[form]["median"] / el for form in FORMS if form != "el"},
        "steps_to_pay_for_building": steps_to_pay(seconds),
    }


def steps_to_pay(seconds: dict[str, dict]) -> float | None:
    """After how many steps K and V, shared by beams, have paid for being built; None if they never do."""
    rent = seconds["el"]["median"] - seconds["shared-kernel"]["median"]
    return seconds["build"]["median"] / rent if rent > 0 else None


def halves(results: dict[str, Any]) -> list[tuple[str, list[dict], dict[int, float]]]:
    """Both sides of the figure: what grows, its rows, and the paper's numbers for them."""
    settings, rows = results["settings"], results["figures"]["rows"]
    by_length = [r for r in rows if r["beam"] == settings["beam_of_lengths"] and r["length"] in settings["lengths"]]
    by_beam = [r for r in rows if r["length"] == settings["length_of_beams"] and r["beam"] in settings["beams"]]
    return [
        ("length", sorted(by_length, key=lambda r: r["length"]), PAPER_BY_LENGTH),
        ("beam", sorted(by_beam, key=lambda r: r["beam"]), PAPER_BY_BEAM),
    ]


def render(results: dict[str, Any]) -> str:
    settings = results["settings"]
    (_, by_length, paper_by_length), (_, by_beam, paper_by_beam) = halves(results)
    return "\n\n".join(
        [
            *opening("Figure 4: time of attention", results),
            "![Time of attention for one sample, against the length of the source and against the beam size, "
            "both axes logarithmic](figure4.png)",
            "Milliseconds for one sample (a sentence with all its beams) of one layer's encoder-decoder attention in "
            f"one decoding step: {settings['heads']} heads, d = {settings['width']}, single precision; also as "
            "[SVG](figure4.svg). Multi-head attention is stock fairseq's own class, without cache, with a cache "
            "copied per beam (fairseq 0.9, the paper's baseline), and with one shared by the beams (fairseq 0.12); "
            "our kernel for shared ones is what `--el-attention never` runs, EL what `always` runs. "
            "Following the beams, which copied K and V in fairseq 0.9 at every step, is not in these times.",
            f"### Against the source length, beam {settings['beam_of_lengths']}",
            half_table("n", "length", by_length, paper_by_length),
            f"### Against the beam size, n = {settings['length_of_beams']}",
            half_table("beam", "beam", by_beam, paper_by_beam),
            no_cache_sentence(results["figures"]["rows"]),
            copied_sentence(results),
            shared_sentence(results["figures"]["rows"]),
        ]
    )


def half_table(title: str, name: str, rows: list[dict], paper: dict[int, float]) -> str:
    header = [title, "batch", *COLUMNS.values(), "EL to no cache", "EL to copied", "paper: EL to copied",
              "building K and V once", "which pays after"]  # fmt: skip
    cells = [
        [
            str(row[name]),
            str(row["batch"]),
            *(milliseconds_finely(row["seconds"][form]) for form in COLUMNS),
            times(row["el_faster"]["no-cache"]),
            times(row["el_faster"]["copied"]),
            f"{paper[row[name]]:g}x" if row[name] in paper else "",
            milliseconds(row["seconds"]["build"]),
            steps(row["steps_to_pay_for_building"]),
        ]
        for row in rows
    ]
    return table(header, cells)


def milliseconds_finely(seconds: dict[str, float]) -> str:
    median, least, most = (seconds[name] * 1000 for name in ("median", "least", "most"))
    return f"{median:.3f} ({least:.3f} to {most:.3f})"


def steps(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f} steps"


def no_cache_sentence(rows: list[dict]) -> str:
    faster = [row["el_faster"]["no-cache"] for row in rows]
    return (
        f"Against multi-head attention without cache EL is {min(faster):.1f} to {max(faster):.1f} times as fast here; "
        f"the paper finds up to {PAPER_NO_CACHE} times."
    )


def copied_sentence(results: dict[str, Any]) -> str:
    parts, agrees = [], True
    for name, rows, paper in halves(results):
        first, last = (row["el_faster"]["copied"] for row in (rows[0], rows[-1]))
        low, high = paper.values()
        grows = {"length": "the source", "beam": "the beam"}[name]
        parts.append(f"from {first:.2f} to {last:.2f} times as fast as {grows} grows (paper: {low:g} to {high:g})")
        agrees = agrees and min(row["el_faster"]["copied"] for row in rows) > 1
    found = f"Against the cache copied per beam EL goes {' and '.join(parts)}. "
    if agrees:
        return found + "As in the paper, it is faster everywhere."
    low, high = V100_BALANCE
    balance = results["figures"]["balance"]
    return found + (
        "The paper finds it faster everywhere, and ever more so; here it is not, because EL spends h times the "
        f"arithmetic of attention to read less: this machine does {balance:.1f} FLOPs in the time it reads a byte, "
        f"a V100 {low} to {high}, so that EL is bound by arithmetic from the start and its time grows with n and with "
        "the beam like that of the other forms."
    )


def shared_sentence(rows: list[dict]) -> str:
    stock, kernel = ([row["el_faster"][form] for row in rows] for form in ("shared", "shared-kernel"))
    found = (
        "A cache shared by the beams, which the paper doesn't have, changes the picture: EL is "
        f"{min(stock):.2f} to {max(stock):.2f} times as fast as stock fairseq's and {min(kernel):.2f} to "
        f"{max(kernel):.2f} times as fast as fairseq_el's kernel for it. "
    )
    pays = [row["steps_to_pay_for_building"] for row in rows]
    known = [value for value in pays if value is not None]
    if not known:
        return found + "Building K and V never pays."
    never = "" if len(known) == len(pays) else f" (and never in {len(pays) - len(known)} of {len(pays)} shapes)"
    return found + (
        "But K and V must be built first, which EL never pays for: the cache has earned that back after "
        f"{min(known):.0f} to {max(known):.0f} steps{never}, which is why `--el-attention auto` is a decision and why "
        "short outputs and tight memory are where EL is at home on a CPU."
    )


def draw(results: dict[str, Any]) -> Figure:
    settings = results["settings"]
    figure, axes = new_figure(10, 4.6, columns=2)
    titles = {
        "length": f"source length n (beam {settings['beam_of_lengths']})",
        "beam": f"beam size (n = {settings['length_of_beams']})",
    }
    for ax, (name, rows, _) in zip(axes, halves(results)):
        for form in FORMS:
            draw_form(ax, form, name, rows)
        ax.set(xscale="log", yscale="log", xlabel=titles[name])
        ax.set_xticks([row[name] for row in rows], [str(row[name]) for row in rows])
        ax.minorticks_off()
    axes[0].yaxis.set_major_formatter(lambda value, _: plain_number(value))
    axes[0].set_ylabel("milliseconds per sample")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Attention of one layer in one decoding step", x=0.01, ha="left")
    return figure


def draw_form(ax, form: str, name: str, rows: list[dict]) -> None:
    median, least, most = ([1000 * row["seconds"][form][part] for row in rows] for part in ("median", "least", "most"))
    spread_around = [[m - low for m, low in zip(median, least)], [high - m for m, high in zip(median, most)]]
    ax.errorbar(
        [row[name] for row in rows],
        median,
        yerr=spread_around,
        color=COLOURS[form],
        label=FORMS[form],
        marker="o",
        markersize=4,
        linewidth=2.4 if form == "el" else 1.6,
        linestyle="--" if form == "shared-kernel" else "-",
        capsize=2,
    )


EXPERIMENT = Experiment("figure4", Settings(), QUICK, measure, figures, render, draw)
