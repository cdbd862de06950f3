"""The paper's numbers, and the pages of its Tables 1 to 4 and Figures 3 and 4 that put them beside measured ones."""

from collections.abc import Iterable
from pathlib import Path

from bench.plan import GIB, TABLE4_FORMS, TABLE4_LIMIT, Sizes, cells_of, table2, table4_bytes
from bench.report import NOT_MEASURED, Measured, Spread, table, times
from bench.runner import BATCHES, Cell
from bench.tasks import Task

# ---- the numbers, of a V100 with 16 GB

# Table 2: samples per second, multi-head attention and EL, by task and search, in single and in half precision.
TABLE2: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
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

# Table 3: samples per second of BART-large on CNN/DailyMail in half precision, by batch; None did not fit.
TABLE3: dict[int, dict[str, float | None]] = {
    32: {"no-cache": 1.9, "copied": 5.7, "always": 8.0},
    64: {"no-cache": 1.9, "copied": None, "always": 12.6},
    128: {"no-cache": None, "copied": None, "always": 21.3},
    320: {"no-cache": None, "copied": None, "always": 28.6},
}

# Table 4: (multi-head, EL) in GB by (batch, n): BART-large in half precision, a cache for every beam.
TABLE4 = {
    (32, 256): ("1.5", "0.02"),
    (32, 1024): ("6", "0.06"),
    (64, 256): ("3", "0.03"),
    (64, 1024): ("12", "0.13"),
    (320, 256): ("15", "0.15"),
    (320, 1024): ("60", "0.63"),
}

# Table 5: ROUGE-1, ROUGE-2 and ROUGE-L of BART-large on CNN/DailyMail.
TABLE5 = {
    "stock": (44.21, 21.20, 41.03),
    "el-fp32": (44.21, 21.20, 41.03),
    "stock-fp16": (44.22, 21.20, 41.04),
    "el": (44.22, 21.21, 41.05),
}

# Figure 3, from the paper's text, in half precision.
FIGURE3_GFLOP = {"build copied": "more than 500"}
FIGURE3_GB = {"attend copied": "about 0.5", "attend el": "0.15"}

# Figure 4, from the paper's text: EL against multi-head attention with a cache, at both ends.
FIGURE4 = {("n", 64): 1.4, ("n", 1024): 5.0, ("beam", 1): 2.0, ("beam", 8): 5.0}

# ---- Table 1 and Figures 3 and 4

GROUPS = {"build": "1 build K and V", "project": "2 build query, project output", "attend": "3 calculate attention"}
OWNERS = {
    "copied": "multi-head, K and V per beam", "shared": "multi-head, K and V shared by beams",
    "multi-head": "multi-head", "el": "EL",
}  # fmt: skip
FORMS = {
    "no-cache": "multi-head, no cache", "copied": "multi-head, cache copied per beam",
    "shared": "multi-head, cache shared by beams", "shared-kernel": "shared by beams, fairseq_el's kernel",
    "el": "EL-attention",
}  # fmt: skip
PAPER_ORDER = {"build": ("O(n d²)", "0"), "project": ("O(d²)", "O(d²)"), "attend": ("O(x n d)", "O(h x n d)")}


def title_of(operation: str) -> str:
    group, owner = operation.split()
    return f"{GROUPS[group]}: {OWNERS[owner]}"


def shape_text(sizes: Sizes) -> str:
    s = sizes.shape
    step = f"One layer, one decoding step, batch {s.batch}, beam {s.beam}"
    return f"{step}, n = {s.length}, {s.heads} heads, d = {s.width}"


def render_table1(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    from bench.operations import operation_costs

    counted, costs = measured.of("table1/count/count"), operation_costs(sizes.shape)
    lines = [
        [title_of(name), PAPER_ORDER[name.split()[0]][name.endswith("el")], f"{costs[name].flops / 1e9:.4g}",
         f"{flops / 1e9:.4g}", f"{costs[name].bytes / 1e9:.4g}"]
        for name, flops in (counted[0]["flops"] if counted else {}).items()
    ]  # fmt: skip
    return [
        f"{shape_text(sizes)}, single precision. Formulas are those of `fairseq_el/models/costs.py`; FLOPs are counted "
        "by torch while the operations run. `paper` is the order of growth in the paper's Table 1; with beams that "
        "share K and V, group 3 reads O(n d), not O(x n d).",
        table(["operations", "paper: compute", "GFLOP, formula", "GFLOP, counted", "GB, formula"], lines),
    ]


def timed_works(measured: Measured, cell: Cell) -> dict[str, Spread]:
    """Seconds of each piece of work."""
    own = measured.of(cell.key)
    if len(own) < cell.rounds:
        return {}
    return {name: Spread([record["timed"][name] for record in own]) for name in own[0]["timed"]}


def render_figure3(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    from bench.operations import operation_costs

    (cell,), costs, lines = cells_of(sizes, "figure3"), operation_costs(sizes.shape), []
    for name, seconds in timed_works(measured, cell).items():
        gflop, gb = costs[name].flops / 1e9, costs[name].bytes / 1e9
        lines.append([
            title_of(name), f"{gflop:.4g}", FIGURE3_GFLOP.get(name, ""), f"{gb:.4g}", FIGURE3_GB.get(name, ""),
            f"{gflop / gb:.2f}", seconds.milliseconds(), f"{gflop / seconds.median:.1f}", f"{gb / seconds.median:.1f}",
        ])  # fmt: skip
    header = ["operations", "GFLOP", "paper's GFLOP", "GB", "paper's GB", "FLOP per byte", "ms", "GFLOP/s", "GB/s"]
    return [
        "![FLOPs against bytes of each group of operations; areas are times](figure3.svg)",
        f"{shape_text(sizes)}. FLOPs and bytes as in [Table 1](table1.md), in single precision; the paper's numbers, "
        "taken from its text, are for half precision, whose bytes are half of these. Times are of torch's products for "
        "all forms alike; fairseq_el's kernels are in [Figure 4](figure4.md).",
        table(header, lines) if lines else NOT_MEASURED,
    ]


def figure4_rows(measured: Measured, sizes: Sizes) -> list[tuple[int, int, dict[str, Spread]]]:
    """n, beam, and seconds of one sentence with all its beams."""
    rows = []
    for cell in cells_of(sizes, "figure4"):
        n, beam = map(int, cell.label.split("/"))
        batch, own = cell.request.options["batch"], measured.of(cell.key)
        if len(own) >= cell.rounds:
            found = {name: Spread([r["timed"][name] / batch for r in own]) for name in own[0]["timed"]}
            rows.append((n, beam, found))
    return rows


def render_figure4(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    lines = []
    for n, beam, seconds in figure4_rows(measured, sizes):
        no_cache, copied, el = (seconds[form].median for form in ("no-cache", "copied", "el"))
        known = FIGURE4.get(("beam", beam) if n == 1024 and beam != 4 else ("n", n))
        lines.append([str(n), str(beam), *(seconds[form].milliseconds() for form in FORMS),
                      times(no_cache / el), times(copied / el), f"{known:g}x" if known else ""])  # fmt: skip
    header = ["n", "beam", *FORMS.values(), "EL to no cache", "EL to copied", "paper: EL to copied"]
    return [
        "![Time of attention for one sentence, against the source length and against the beam](figure4.svg)",
        f"Milliseconds for one sentence with all its beams, of one layer's encoder-decoder attention in one decoding "
        f"step: {sizes.shape.heads} heads, d = {sizes.shape.width}, single precision. Multi-head attention is stock "
        "fairseq's class. The paper finds EL 36 times as fast as no cache.",
        table(header, lines) if lines else NOT_MEASURED,
    ]


# ---- Tables 2 to 4


def table2_cell(sizes: Sizes, name: str, search: str, kind: str, column: str) -> Cell | None:
    """None where the plan leaves it out. Where beams share nothing, stock fairseq is the copied baseline."""
    cells = {cell.label: cell for cell in table2(sizes, name, search, kind)}
    return cells.get("copied" if column == "stock" and "stock" not in cells else column)


def table2_seconds(
    measured: Measured, sizes: Sizes, name: str, search: str, kind: str, columns: Iterable[str]
) -> list[Spread | None]:
    cells = [table2_cell(sizes, name, search, kind, column) for column in columns]
    return [measured.per_text(cell) if cell else None for cell in cells]


def speed(measured: Measured, cell: Cell | None) -> str:
    """Sentences a second, the batch and the peak of memory."""
    if cell is None:
        return ""
    own, seconds = measured.of(cell.key), measured.per_text(cell)
    if seconds is None:
        return measured.why_missing(cell.key)
    peak = max(r["peak_bytes"] for r in own) / GIB
    speeds = f"{1 / seconds.median:.3g} ({1 / seconds.most:.3g} to {1 / seconds.least:.3g})"
    return f"{speeds}, b {own[0]['batch']}, {peak:.1f} GiB"


def ratio(ours: Spread | None, theirs: Spread | None) -> float | None:
    return theirs.median / ours.median if ours and theirs else None


def table2_row(measured: Measured, sizes: Sizes, task: Task, search: str, kind: str, precision: str) -> list[str]:
    columns = ["copied", "stock", f"always-{precision}", f"auto-{precision}"]
    copied, stock, always, auto = table2_seconds(measured, sizes, task.name, search, kind, columns)
    there = TABLE2.get((task.name, search), {}).get(precision)
    known = [f"{there[0]:g}", f"{there[1]:g}", f"{there[1] / there[0]:.1f}x"] if there else ["", "", ""]
    quotients = [ratio(always, copied), ratio(auto, copied), ratio(auto, stock)]
    cells = [table2_cell(sizes, task.name, search, kind, column) for column in columns]
    return [f"{task.model.title}, {task.title}, {precision}, {kind}", *(speed(measured, cell) for cell in cells),
            *("" if q is None else times(q) for q in quotients), *known]  # fmt: skip


def render_table2(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    sizes_tried = [batch for batch in reversed(BATCHES) if batch <= sizes.largest]
    parts = [
        f"Sentences per second. `equal`: all columns at the same batch. `largest`: under one budget of "
        f"{sizes.budget / GIB:g} GiB for everything, weights included, each column at the largest batch (of "
        f"{', '.join(map(str, sizes_tried))}) whose measured peak keeps to it; b is the batch, with the peak. Every "
        "number is a whole generation. `copied` keeps K and V for every beam, as fairseq 0.9, the paper's baseline; "
        "stock fairseq 0.12 shares them between the beams of BART, and has nothing to share elsewhere and in greedy "
        "search. With fp16 weights fairseq_el keeps weights in half precision and computes in single; stock fairseq "
        "turns them into single precision when it loads them, so its columns are those of fp32. Prompts of GPT-2 have "
        "512 tokens at most, and are steps to stock fairseq. Blocking n-grams, which stock fairseq ignores on a CPU, "
        "is left out. The paper's numbers are of a V100 with 16 GB.",
    ]
    for search, heading in (("beam", "Beam search"), ("diverse", "Diverse beam search"), ("greedy", "Greedy search")):
        lines = [
            table2_row(measured, sizes, task, search, kind, precision)
            for task in sizes.tasks for precision in ("fp32", "fp16") for kind in ("equal", "largest")
            if (search, kind) in planned(sizes, task.name)
        ]  # fmt: skip
        header = ["model, task, weights, batch", "copied", "stock 0.12", "EL `always`", "EL `auto`",
                  "`always` to copied", "`auto` to copied", "`auto` to stock", "paper: multi-head", "paper: EL",
                  "paper: EL to multi-head"]  # fmt: skip
        parts += [f"## {heading}", table(header, lines)]
    return parts


def planned(sizes: Sizes, name: str) -> set[tuple[str, str]]:
    """Searches of a task, and the kinds of batches."""
    groups = [cell.group.split("/") for cell in cells_of(sizes, "table2")]
    return {(search, kind) for task, search, kind in groups if task == name}


PAPER_COLUMNS = ("no-cache", "copied", "stock", "always", "auto")


def render_table3(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    columns = {"no-cache": "no cache", "copied": "cache copied per beam", "stock": "cache shared by beams",
               "always-fp16": "EL `always`", "auto-fp16": "EL `auto`"}  # fmt: skip
    cells = {cell.label: cell for cell in cells_of(sizes, "table3")}
    lines = []
    for batch in sizes.table3_batches:
        found = [cells.get(f"{column}/{batch}") for column in columns]
        lines.append([str(batch), *(speed(measured, cell) if cell else "left out" for cell in found)])
    for batch, row in TABLE3.items():
        there = ["" if c not in row else "does not fit" if row[c] is None else f"{row[c]:g}" for c in PAPER_COLUMNS]
        lines.append([f"paper: {batch}", *there])
    return [
        f"Sentences per second by batch, with the peak of memory: BART-large on CNN/DailyMail, beam search, outputs of "
        f"{sizes.table3_length} tokens, so that a generation without a cache, which computes all of K and V anew for "
        "each token, takes minutes and not an hour. Batches are smaller than the paper's: two cores compute at full "
        "speed from a few dozen rows on. The paper's are of a V100, in half precision.",
        table(["batch", *columns.values()], lines),
    ]


def render_table4(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    lines, equal, known = [], 0, 0
    for batch, n in sizes.table4:
        copied, shared, el = (table4_bytes(sizes, system, batch, n, 2) for system in TABLE4_FORMS)
        there = TABLE4.get((batch, n), ("", ""))
        line = [f"batch {batch}, n = {n}", f"{copied / GIB:.4g}", there[0], f"{shared / GIB:.4g}", f"{el / GIB:.4g}",
                there[1]]  # fmt: skip
        for system in TABLE4_FORMS:
            formula, own = table4_bytes(sizes, system, batch, n, 4), measured.of(f"table4/state/{batch}/{n}/{system}")
            equal, known = equal + sum(r["source_bytes"] == formula for r in own), known + len(own)
            missing = f"over {TABLE4_LIMIT / GIB:g}" if formula > TABLE4_LIMIT else NOT_MEASURED
            line.append(f"{own[0]['source_bytes'] / GIB:.4g}" if own else missing)
        lines.append(line)
    layers, _, width, _ = sizes.table4_decoder
    return [
        f"What is kept of the source while a batch is generated, in GiB (the paper's GB): {layers} decoder layers, "
        f"d = {width}, beam 4. First in half precision, by formula, beside the paper. Then in single precision, in "
        "which a CPU computes, summed over the live tensors during a generation: K and V of all layers in stock "
        "fairseq, the encoder's output in fairseq_el (`--el-attention always`). "
        f"{equal} of {known} measured states are the formula's to the byte.",
        table(["batch and source", "fp16: per beam", "paper: multi-head", "fp16: shared", "fp16: EL", "paper: EL",
               "measured: per beam", "measured: stock 0.12", "measured: fairseq_el"], lines),
    ]  # fmt: skip
