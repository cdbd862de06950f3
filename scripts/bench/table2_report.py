"""The experiment `table2` in words, tables and a plot, made from its results alone."""

from typing import Any

from bench.generator import select, unique
from bench.generator_report import targets_table
from bench.plots import COLOURS, Figure, new_figure, plain_log_ticks
from bench.report import opening, table, times

GIB = 2**30
COLUMNS = {
    "copied": "multi-head, copied",
    "stock": "stock fairseq",
    "always": "EL `always`",
    "auto": "EL `auto`",
}
COLOUR_OF = {"stock": "shared", "always": "el", "auto": "shared-kernel"}
TITLES = {"beam": "Beam search", "diverse": "Diverse beam search", "greedy": "Greedy search"}

# Samples per second on a V100, multi-head and EL, by task and search: in single and in half precision.
PAPER: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("squad", "beam"): {"fp32": (86.6, 173.6), "fp16": (170.9, 458.1)},
    ("xsum", "beam"): {"fp32": (6.8, 26.3), "fp16": (14.7, 69.4)},
    ("cnndm", "beam"): {"fp32": (3.4, 12.2), "fp16": (5.7, 28.6)},
    ("gpt2-small", "beam"): {"fp32": (1.5, 2.5), "fp16": (2.1, 3.8)},
    ("gpt2-medium", "beam"): {"fp32": (0.6, 1.1), "fp16": (0.9, 2.0)},
    ("squad", "diverse"): {"fp32": (82.1, 171.8), "fp16": (162.3, 454.1)},
    ("xsum", "diverse"): {"fp32": (7.2, 27.5), "fp16": (15.8, 71.9)},
    ("cnndm", "diverse"): {"fp32": (3.2, 12.0), "fp16": (5.4, 28.5)},
    ("squad", "greedy"): {"fp32": (190.3, 260.3), "fp16": (436.4, 699.7)},
    ("xsum", "greedy"): {"fp32": (15.0, 44.9), "fp16": (42.6, 107.8)},
    ("cnndm", "greedy"): {"fp32": (7.0, 19.5), "fp16": (13.0, 40.0)},
    ("gpt2-small", "greedy"): {"fp32": (9.0, 13.6), "fp16": (14.7, 26.2)},
    ("gpt2-medium", "greedy"): {"fp32": (3.6, 5.9), "fp16": (5.9, 10.4)},
}


def render(results: dict[str, Any]) -> str:
    made = results["figures"]
    parts = opening("Table 2: sentences per second", results)
    parts += [how_text(results), extrapolated_text(made["rows"]), half_text(made["half"])]
    parts += ["### Targets of Table 2", targets_table(made["targets"])]
    if any(row["cells"]["largest"]["auto"]["sentences_per_second"] for row in made["rows"]):
        parts.append("![How many times as fast as multi-head attention with a cache for every beam](table2.png)")
    for search in unique(row["search"] for row in made["rows"]):
        rows = select(made["rows"], search=search)
        parts += [f"### {TITLES[search]}, largest batch", largest_table(rows), paper_sentence(rows)]
        parts += [f"### {TITLES[search]}, equal batch", equal_table(rows)]
    return "\n\n".join(part for part in parts if part)


def how_text(results: dict[str, Any]) -> str:
    settings, lengths = results["settings"], results["figures"]["lengths"]
    models = {task["name"]: task["model"]["title"] for task in settings["tasks"]}
    rows = unique((row["task"], row["title"]) for row in results["figures"]["rows"])
    tasks = "; ".join(
        f"{models[name]} on {title}: {min(lengths[name]['sources'])} to {max(lengths[name]['sources'])} tokens in, "
        f"{lengths[name]['output']} out"
        for name, title in rows
    )
    return (
        f"Under one budget of {settings['budget'] / GIB:g} GiB for everything, weights included, each column runs at "
        f"the largest batch that fits (at most {settings['largest_batch']}, the paper's largest), and once more at the "
        "batch that fits all of them. The largest batch follows from `costs.largest_batch` and from the memory that "
        "each process takes beyond that, measured on a small batch; the peak that was measured at it stands "
        "beside it, and a batch that turned out too large was made smaller. Sources are as long as the batch of "
        "average length when real ones are sorted by length, as fairseq does; every output is as long as real ones are "
        "on average, which `--min-len` and `--max-len-b` enforce for the whole batch "
        f"({tasks}). Prompts of GPT-2 are articles cut at 512 tokens, of their mean length, and run to the "
        "preset's limit, as a model that was not trained to stop does; only stock fairseq scores them. Searches "
        "are those of `configs/`, without blocking n-grams, which stock fairseq ignores on a CPU. `copied` keeps "
        "K and V for every beam, as fairseq 0.9 did, the paper's baseline; stock fairseq 0.12 shares them between "
        "the beams of BART. In the Transformer, in GPT-2 and in greedy search it has nothing to share: its column "
        "repeats the one before. `auto` gets the largest batch for which K and V fit."
    )


def extrapolated_text(rows: list[dict[str, Any]]) -> str:
    cells = [cell for row in rows for of_batch in row["cells"].values() for cell in of_batch.values()]
    timed = [cell for cell in cells if cell["missing"] is None]
    whole = sum(cell["whole"] for cell in timed)
    return (
        f"Whole runs would take hours. Of {len(timed)} numbers {whole} are whole runs of all decoding steps (marked "
        "`w`); the others are put together from measured parts: the first step, one to three steps after it, and one "
        "to three of the last, with a state as large as it is by then; steps between lie on a straight line between "
        "the two. Always, sources are encoded (prompts read) for one batch of distinct ones, and the time counts for "
        "each sentence: by the median of several rounds over all systems where there is an encoder, which has run "
        "before, as a first call takes longer. Numbers without a range are one round of decoding."
    )


def half_text(half: dict[str, Any] | None) -> str:
    stock = (
        "Rows with fp16 have weights in half precision: fairseq_el keeps them so and computes in single precision. "
        "Stock fairseq turns them into single precision when it loads them, so its columns are those of fp32"
    )
    if half is None:
        return f"{stock}."
    times_as_long = half["seconds"]["stock-half"] / half["seconds"]["stock"]
    return (
        f"{stock}; its own `--fp16` computes in half precision, which took {times_as_long:.1f} times as long here "
        f"({half['task']}, batch {half['batch']})."
    )


def speed(cell: dict[str, Any]) -> str:
    if cell["missing"]:
        return cell["missing"]
    value = f"{cell['sentences_per_second']:.3g}"
    if cell["rounds"] > 1:
        value += f" ({cell['slowest']:.3g} to {cell['fastest']:.3g})"
    return value + (" w" if cell["whole"] else "")


def speed_and_batch(cell: dict[str, Any]) -> str:
    if cell["missing"]:
        return cell["missing"]
    return f"{speed(cell)}, b {cell['batch']}, {cell['peak_bytes'] / GIB:.1f} GiB"


def quotients(row: dict[str, Any], at: str) -> list[str]:
    """`always` to copied, `auto` to copied, `auto` to stock."""
    speeds = {column: cell["sentences_per_second"] for column, cell in row["cells"][at].items()}
    pairs = (("always", "copied"), ("auto", "copied"), ("auto", "stock"))
    return [times(speeds[ours] / speeds[to]) if speeds[ours] and speeds[to] else "" for ours, to in pairs]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['title']}, {row['precision']}"


def largest_table(rows: list[dict[str, Any]]) -> str:
    header = ["model, task, weights", *COLUMNS.values(), "`always` to copied", "`auto` to copied", "`auto` to stock",
              "paper: multi-head", "paper: EL", "paper: EL to multi-head"]  # fmt: skip
    cells = []
    for row in rows:
        paper = paper_of(row)
        there = [f"{paper[0]:g}", f"{paper[1]:g}", f"{paper[1] / paper[0]:.1f}x"] if paper else ["", "", ""]
        at_largest = row["cells"]["largest"]
        speeds = [speed_and_batch(at_largest[column]) for column in COLUMNS]
        cells.append([name_of(row), *speeds, *quotients(row, "largest"), *there])
    return table(header, cells)


def equal_table(rows: list[dict[str, Any]]) -> str:
    header = ["model, task, weights", "batch", *COLUMNS.values(), "`always` to copied", "`auto` to copied",
              "`auto` to stock"]  # fmt: skip
    cells = []
    for row in rows:
        at_equal = row["cells"]["equal"]
        batches = unique(str(cell["batch"]) for cell in at_equal.values() if not cell["missing"])
        speeds = [speed(at_equal[column]) for column in COLUMNS]
        cells.append([name_of(row), " and ".join(batches), *speeds, *quotients(row, "equal")])
    return table(header, cells)


def paper_sentence(rows: list[dict[str, Any]]) -> str:
    """Where EL alone gains less, or more, than in the paper, and why."""
    less, more = [], []
    for row in rows:
        paper = paper_of(row)
        gain = gain_of(row, "always")
        if paper and gain:
            theirs = paper[1] / paper[0]
            (less if gain < theirs else more).append(f"{name_of(row)} {gain:.2f} (paper {theirs:.1f})")
    parts = []
    if less:
        parts.append(
            f"EL alone gains less over copied multi-head attention than on a V100 in {len(less)} of "
            f"{len(less) + len(more)} rows: {'; '.join(less)}. A GPU gains from large batches, which is what EL's "
            "small state allows; two cores are busy with a small batch already, and EL's h times the arithmetic of "
            "attention, free on a GPU that waits for memory, is not free here. What EL never pays for is building K "
            "and V, which tells in short outputs; the rest of the gain of `auto` is other work on a CPU's terms."
        )
    if more:
        parts.append(f"It gains as much or more in: {'; '.join(more)}.")
    return " ".join(parts)


def draw(results: dict[str, Any]) -> Figure:
    """Speed at the largest batches as multiples of the copied baseline's, beside the paper's."""
    rows = [r for r in results["figures"]["rows"] if r["cells"]["largest"]["copied"]["sentences_per_second"]]
    figure, (ax,) = new_figure(10, 1.4 + 0.4 * len(rows))
    height = 0.2
    for index, (column, colour) in enumerate(COLOUR_OF.items()):
        found = [(y, gain) for y, row in enumerate(rows) if (gain := gain_of(row, column))]
        ax.barh([y + (index - 1) * height for y, _ in found], [gain - 1 for _, gain in found], height, left=1,
                color=COLOURS[colour], label=COLUMNS[column].replace("`", ""))  # fmt: skip
    known = [(y, paper_of(row)) for y, row in enumerate(rows) if paper_of(row)]
    ax.plot([paper[1] / paper[0] for _, paper in known], [y for y, _ in known], "D", color="black", markersize=5,
            label="paper: EL, V100")  # fmt: skip
    ax.axvline(1, color=COLOURS["copied"], linewidth=1.5, label=COLUMNS["copied"])
    ax.set_xscale("log")
    plain_log_ticks(ax.xaxis)
    ax.set_yticks(range(len(rows)), [f"{name_of(row)}, {row['search']}" for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("times the speed of multi-head attention with a cache for every beam, each at its largest batch")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def gain_of(row: dict[str, Any], column: str) -> float | None:
    """Over the copied baseline, at the largest batches."""
    ours, baseline = (row["cells"]["largest"][name]["sentences_per_second"] for name in (column, "copied"))
    return ours / baseline if ours and baseline else None


def paper_of(row: dict[str, Any]) -> tuple[float, float] | None:
    return PAPER.get((row["task"], row["search"]), {}).get(row["precision"])
