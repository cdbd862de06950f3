"""The pages: a summary on one screen, other systems, quality, limits and growth. Numbers come from `docs/results/`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import paper
from bench.environment import BF16, EXACT, INT8, OURS, SYSTEMS
from bench.plan import AXES, GROWTH_BASE, Sizes, cells_of, growth, peers, quality, work
from bench.report import NOT_MEASURED, Measured, Spread, gigabytes, table, times
from bench.runner import Cell

KINDS = ("ROUGE-1", "ROUGE-2", "ROUGE-L")
# `auto` with fp16 weights against the copied baseline should be so many times as fast.
TARGETS = {
    ("cnndm", "beam"): 2.0, ("xsum", "beam"): 2.0, ("squad", "beam"): 1.5,
    ("cnndm", "greedy"): 1.5, ("xsum", "greedy"): 1.5, ("squad", "greedy"): 1.3,
}  # fmt: skip


def task_title(sizes: Sizes, name: str) -> str:
    task = sizes.task(name)
    assert task
    source = " to ".join(map(str, sorted({min(task.source_lengths), max(task.source_lengths)})))
    out = "" if task.op == "encode" else f", {task.output_length} out"
    return f"{task.model.title} on {task.title} ({source} tokens in{out})"


# ---- other systems


def peer_groups(sizes: Sizes) -> dict[str, list[Cell]]:
    """By task and batch: all of its cells."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells_of(sizes, "peers"):
        groups.setdefault(cell.group.rpartition("/")[0], []).append(cell)
    return groups


@dataclass(frozen=True)
class Row:
    """A system in one of the tables of other systems; what was not measured is None."""

    cell: Cell
    title: str
    seconds: Spread | None
    ratio: float | None  # to fairseq_el in exact mode
    peak: int
    equal: str

    def cells(self, missing: str) -> list[str]:
        if self.seconds is None:
            return [self.title, missing, "", "", ""]
        return [
            self.title,
            str(self.seconds),
            times(self.ratio) if self.ratio else "",
            gigabytes(self.peak),
            self.equal,
        ]


def peer_rows(measured: Measured, cells: list[Cell]) -> list[Row]:
    """fairseq_el takes part in each group of rounds; a system is compared with it in its own group."""
    exact = {cell.group: measured.per_text(cell) for cell in cells if cell.system == EXACT}
    stock = next((measured.of(cell.key) for cell in cells if cell.system == "stock"), [])
    rows = []
    for cell in cells:
        if cell.system == EXACT and cell.group.endswith(("more", "settings")):
            continue
        own, seconds = measured.of(cell.key), measured.per_text(cell)
        peak = max((record["peak_bytes"] for record in own), default=0)
        title, equal = SYSTEMS[cell.system].title, count_equal(own, stock)
        rows.append(Row(cell, title, seconds, paper.ratio(exact.get(cell.group), seconds), peak, equal))
    return rows


def count_equal(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Outputs that are the same, of how many."""
    if not own or not other or "outputs" not in own[0]:
        return ""
    pairs = list(zip(own[0]["outputs"], other[0]["outputs"], strict=True))
    return f"{sum(a == b for a, b in pairs):,}/{len(pairs):,}"


def peers_table(measured: Measured, cells: list[Cell]) -> str:
    lines = [row.cells(measured.why_missing(row.cell.key)) for row in peer_rows(measured, cells)]
    return table(["system", "seconds per text", "to fairseq_el", "peak memory", "equal"], lines)


def render_peers(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    parts = [
        "Beam search. `to fairseq_el`: how many times as long as fairseq_el in exact mode takes in the same rounds. "
        "`equal`: best hypotheses that are stock fairseq's, token for token, without the last one, which CTranslate2 "
        "can't be told to be `</s>`; weights are random, which makes for near-ties. Prompts of GPT-2 are scored by "
        "stock fairseq alone. Peak memory is the most that the worker process held while it answered (`VmHWM`).",
        "![Seconds per text by system](peers.svg)",
    ]
    for name, cells in peer_groups(sizes).items():
        task, batch = name.split("/")
        known = peers_table(measured, cells) if any(measured.of(cell.key) for cell in cells) else NOT_MEASURED
        parts += [f"## {task_title(sizes, task)}, batch {batch}", known]
    if measured.results:
        parts += ["## Versions and settings", settings_table(measured)]
    return parts


def settings_table(measured: Measured) -> str:
    """A line for each system and each way that it was driven; commands with their options are in the JSON."""
    assert measured.results
    found = {}
    for record in measured.records:
        own = measured.results["systems"][record["system"]] | record
        versions = ", ".join(f"{name} {version}" for name, version in own.get("versions", {}).items())
        found[record["system"], own.get("settings", "")] = versions
    lines = [[SYSTEMS[name].title, versions, f"`{settings}`" if settings else ""]
             for (name, settings), versions in found.items()]  # fmt: skip
    return table(["system", "versions", "settings"], lines)


# ---- quality


def render_quality(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    records = {cell.system: measured.of(cell.key) for cell in quality(sizes)}
    lines = []
    for cell in quality(sizes):
        own, exact = records[cell.system], SYSTEMS[cell.system].exact
        there = [f"{score:.2f}" for score in paper.TABLE5.get(cell.system, ())] or [""] * 3
        scores = [f"{own[0]['scores'][kind]:.2f}" for kind in KINDS] if own else [""] * 3
        if not own:
            scores[0] = measured.why_missing(cell.key)
        equal = count_equal(own, records[exact]) if exact else ""
        lines.append([SYSTEMS[cell.system].title, *scores, count_equal(own, records["stock"]), equal, *there])
    header = ["system", *KINDS, "equal to stock", "equal to its own float32",
              *(f"paper: {kind}" for kind in KINDS)]  # fmt: skip
    return [
        "Table 5 of the paper, and the quality of other systems: the demo's trained model on its "
        f"{sizes.demo_texts:,} held-out texts, converted for each system. Beam 4, length penalty 1, at most 30 pieces; "
        "rouge-score with stemming. `equal to stock` counts best hypotheses that are stock fairseq's (and our exact "
        "mode's), token for token; `equal to its own float32`, for reduced precisions, those that the same library "
        "gives in single precision. Searches of other systems may end elsewhere. The paper's numbers are of "
        "BART-large on CNN/DailyMail: what compares is that its rows are equal.",
        table(header, lines),
    ]


# ---- limits and growth


BYTES_OF_WEIGHT = {"stock": 4, EXACT: 2, BF16: 2, INT8: 1}
PEAK_OF = {BF16: "bf16", INT8: "int8"}


def render_limits(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    own, found, task = measured.of("limits/machine/peaks"), Measured(folder, "peers"), sizes.task("cnndm")
    assert task
    parts = [
        "Encoder and decoding step inside the whole generations of [other systems](peers.md) on CNN/DailyMail, against "
        "what this machine can do: products in registers alone and reading of memory, by `scripts/bench/peaks.cpp`, "
        "the best of three rounds. FLOPs are those of linear layers and, in the encoder, attention. Bytes of a step "
        "are weights as they are stored, and K and V in single precision, each read once."
    ]
    if len(own) < 3:
        return [*parts, NOT_MEASURED]
    peaks = {name: max(r["peaks"][name] for r in own) for name in own[0]["peaks"]}
    lines = [[name, f"{value:.0f} {'GB/s' if name == 'memory' else 'GFLOP/s'}"] for name, value in peaks.items()]
    rows = []
    key_values = 2 * 4 * task.mean_source * task.model.width * task.model.layers
    for cell in (c for batch in (8, 1) for c in peers(sizes, "cnndm", batch) if c.system in BYTES_OF_WEIGHT):
        encoder, step = (found.spread(cell, name) for name in ("encoder_seconds", "step_seconds"))
        if encoder and step:
            encoder_flops, step_flops = work(task.model, cell.request)
            batch, peak = cell.request.batch, peaks.get(PEAK_OF.get(cell.system, "float32"))
            weights = step_flops / 2 * BYTES_OF_WEIGHT[cell.system]
            rows.append([
                f"{SYSTEMS[cell.system].title}, batch {batch}",
                str(encoder), *achieved(encoder_flops, encoder, peak),
                step.milliseconds(), *achieved(batch * cell.request.beam * step_flops, step, peak),
                *achieved(weights + batch * key_values, step, peaks["memory"]),
            ])  # fmt: skip
    header = ["system", "encoder, s", "GFLOP/s", "of the peak", "step, ms", "GFLOP/s", "of the peak", "GB/s",
              "of the peak"]  # fmt: skip
    return [*parts, "## Peaks", table(["precision", "measured"], lines), "## Achieved",
            table(header, rows) if rows else NOT_MEASURED]  # fmt: skip


def achieved(amount: float, seconds: Spread, peak: float | None) -> list[str]:
    """FLOPs or bytes in 1e9 a second, and their share of the peak."""
    rate = amount / seconds.median / 1e9
    return [f"{rate:.3g}", "" if peak is None else f"{rate / peak:.0%}"]


def render_growth(measured: Measured, sizes: Sizes, folder: Path) -> list[str]:
    """A table in which the lines of an axis follow each other; the point that all share is in each."""
    cells, lines = {cell.label: cell for cell in growth(sizes)}, []
    for axis, values in AXES.items():
        for value in values:
            point = GROWTH_BASE | {axis: value}
            cell = cells["/".join(map(str, point.values()))]
            whole, encoder = measured.spread(cell), measured.spread(cell, "encoder_seconds")
            found = [NOT_MEASURED, "", ""]
            if whole and encoder:
                state = max(r["source_bytes"] + r["beam_bytes"] for r in measured.of(cell.key))
                found = [str(encoder), f"{whole.median - encoder.median:.3g}", f"{state / 1e6:.3g}"]
            lines.append([f"{axis} {value}", *map(str, point.values()), *found])
    return [
        f"fairseq_el with `--el-attention auto`, {sizes.growth_model.title} shapes, whole generations around one "
        "point: source length n, beam, batch and output length grow, one at a time. State is what is kept of sources "
        "and beams at the peak.",
        table(["growing", *GROWTH_BASE, "encoder, s", "decoding, s", "state, MB"], lines),
    ]


# ---- the summary


def main_cells(sizes: Sizes) -> list[Cell]:
    return [cell for part in ("main", "more") for cell in peers(sizes, "cnndm", 8, part)]


def faster_peers(measured: Measured, sizes: Sizes) -> list[str] | None:
    """Where a peer was faster: than exact mode in float, than int8 in reduced precision. None without any pair."""
    found, pairs = [], 0
    for name, cells in peer_groups(sizes).items():
        own = {row.cell.system: row.seconds for row in peer_rows(measured, cells) if row.seconds}
        task, batch = name.split("/")
        for rival, seconds in own.items():
            ours = INT8 if SYSTEMS[rival].exact else EXACT
            if SYSTEMS[rival].is_ours or ours not in own:
                continue
            pairs += 1
            if seconds.median < own[ours].median:
                found.append(f"{SYSTEMS[rival].title} {own[ours].median / seconds.median:.2f} times as fast as "
                             f"{SYSTEMS[ours].title} ({task}, batch {batch})")  # fmt: skip
    return found if pairs else None


def slower_than_stock(measured: Measured, sizes: Sizes) -> list[str]:
    """Rows of Table 2 in which `auto` is."""
    found = []
    for task in sizes.tasks:
        for search, kind in sorted(paper.planned(sizes, task.name)):
            columns = ("stock", "auto-fp32", "auto-fp16")
            stock, *ours = paper.table2_seconds(measured, sizes, task.name, search, kind, columns)
            slow = [gain for own in ours if (gain := paper.ratio(own, stock)) is not None and gain < 1]
            if slow:
                found.append(f"{task.model.title} on {task.title}, {search}, {kind} batch ({times(min(slow))})")
    return found


def targets_table(measured: Measured, sizes: Sizes) -> str:
    lines = []
    for (name, search), target in TARGETS.items():
        task = sizes.task(name)
        if task is None or not (kinds := [k for s, k in sorted(paper.planned(sizes, name)) if s == search]):
            continue
        gains = []
        for kind in kinds:
            ours, theirs = paper.table2_seconds(measured, sizes, name, search, kind, ("auto-fp16", "copied"))
            gains.append(paper.ratio(ours, theirs))
        known = [gain for gain in gains if gain is not None]
        verdict = "" if not known else "yes" if min(known) >= target else "**no**"
        lines.append([f"{task.title}, {search}", *map(times, gains), f"{target:g}x", verdict])
    return table(["`auto` to the copied baseline", "equal batch", "largest batch", "target", "met"], lines)


def missed_sentences(folder: Path, sizes: Sizes) -> list[str]:
    faster = faster_peers(Measured(folder, "peers"), sizes)
    slow = slower_than_stock(Measured(folder, "table2"), sizes)
    parts = []
    if faster is not None:
        words = "; ".join(faster) if faster else "nothing"
        parts.append(f"**Slower than a peer**, exact mode among float32 or int8 among reduced precisions: {words}.")
    if slow:
        parts.append(f"**`auto` slower than stock fairseq**: {'; '.join(slow)}.")
    return parts


def summary(folder: Path, sizes: Sizes) -> list[str]:
    found = Measured(folder, "peers")
    environment = [machine_sentence(found.results["environment"])] if found.results else []
    pages = "\n".join(f"- [{title}](benchmarks/{name}.md)" for name, (title, _) in PAGES.items())
    return [
        "# Benchmarks",
        "Speeds are of whole generations: random weights in the shapes of released checkpoints, sources as long as "
        "real ones, outputs of a forced length; only [quality](benchmarks/quality.md) is measured with a trained "
        "model. Systems run one at a time on the whole machine, in rounds that go over all of them: medians of at "
        "least three, with the least and the most.",
        *environment,
        f"{task_title(sizes, 'cnndm')}, beam 4, batch 8:",
        peers_table(found, main_cells(sizes)),
        "![Seconds per text by system](benchmarks/peers.svg)",
        *missed_sentences(folder, sizes),
        targets_table(Measured(folder, "table2"), sizes),
        pages,
        "## Measure again",
        "With `.venv/bin/python` in front:",
        "    scripts/benchmark.py prepare            # once: other systems, each in an environment of its own\n"
        "    scripts/benchmark.py list               # the groups in their order, and the minutes of each\n"
        "    scripts/benchmark.py run --minutes 60   # the most valuable groups first; again to go on\n"
        "    scripts/benchmark.py publish            # results into docs/results, and these pages from them\n"
        "    scripts/benchmark.py run --quick        # toy sizes, under 3 minutes",
    ]


def minutes_sentence(measured: Measured) -> list[str]:
    seconds = sum(record.get("elapsed", 0.0) for record in measured.records)
    return [f"Measured in {seconds / 60:.0f} minutes, loading included."] if seconds else []


def machine_sentence(facts: dict[str, Any]) -> str:
    return (
        f"{facts['machine']}, {facts['cores']} cores, {gigabytes(facts['memory_bytes'])} of memory, commit "
        f"{facts['commit']}, {facts['date']}."
    )


README_SYSTEMS = (*OURS, "stock", "ctranslate2", "ctranslate2-int8", "openvino", "openvino-f32", "onnxruntime",
                  "transformers")  # fmt: skip


def readme_section(folder: Path, sizes: Sizes) -> str:
    """Systems that are not measured yet are missing here."""
    rows = {row.cell.system: row for row in peer_rows(Measured(folder, "peers"), main_cells(sizes))}
    lines = [[row.title, f"{row.seconds.median:.3g}", "" if name == EXACT else times(row.ratio), gigabytes(row.peak)]
             for name in README_SYSTEMS if (row := rows[name]).seconds]  # fmt: skip
    return table(["", "seconds per text", "relative to fairseq_el", "peak memory"], lines)


Render = Callable[[Measured, Sizes, Path], list[str]]
PAGES: dict[str, tuple[str, Render]] = {
    "peers": ("Other systems", render_peers),
    "table2": ("Table 2: sentences per second under a memory budget", paper.render_table2),
    "table3": ("Table 3: sentences per second by batch size", paper.render_table3),
    "table4": ("Table 4: bytes of source state", paper.render_table4),
    "quality": ("Table 5: quality of the output", render_quality),
    "table1": ("Table 1: operations of attention", paper.render_table1),
    "figure3": ("Figure 3: FLOPs, bytes and time of operations", paper.render_figure3),
    "figure4": ("Figure 4: time of attention", paper.render_figure4),
    "limits": ("Against the limits of the machine", render_limits),
    "growth": ("Growth of time and memory", render_growth),
}
