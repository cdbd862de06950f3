"""What is measured, most valuable first: tables and figures of the paper, other systems, quality, limits, growth."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.checkpoints import Checkpoint
from bench.environment import BUILD
from bench.protocol import Request
from bench.runner import Cell
from bench.systems import OURS
from bench.tasks import BART, DEMO, QUICK_TASKS, TINY_BART, Model, Task, paper_tasks
from fairseq_el.models.costs import Shape, bytes_per_sentence

GIB = 2**30
MAIN = ("stock", *OURS, "ctranslate2", "ctranslate2-int8", "openvino")
# In rounds of their own, in which fairseq_el takes part again. The first of each is the one to compare with.
MORE = ("el", "transformers", "transformers-bf16", "openvino-f32", "openvino-int8", "onnxruntime", "onnxruntime-int8")
SETTINGS_TRIED = ("el", "ctranslate2-workers", "ctranslate2-int8-workers", "transformers-compile")
WITHOUT_PEERS = ("stock", *OURS)
QUALITY = ("stock", "stock-fp16", "el-fp32", *OURS, *MAIN[4:], *MORE[1:])
# Columns of Tables 2 and 3: system and form.
COLUMNS: dict[str, tuple[str, str | None]] = {
    "copied": ("stock", "copied"),
    "stock": ("stock", None),
    "always-fp32": ("el-fp32", "always"),
    "auto-fp32": ("el-fp32", "auto"),
    "always-fp16": ("el", "always"),
    "auto-fp16": ("el", "auto"),
}
AXES: dict[str, tuple[int, ...]] = {
    "n": (128, 256, 512, 1024), "beam": (1, 2, 4, 8), "batch": (1, 2, 4, 8), "length": (8, 16, 32, 64),
}  # fmt: skip
GROWTH_BASE = {"n": 512, "beam": 4, "batch": 4, "length": 32}


@dataclass(frozen=True)
class Sizes:
    """What differs between a run and one with --quick."""

    tasks: tuple[Task, ...]
    demo_texts: int = 1000
    budget: int = 4 * GIB
    largest: int = 12  # batch; two cores gain nothing from more
    largest_prompted: int = 4  # of language models, whose prompts are steps to stock fairseq: a batch takes minutes
    table3_batches: tuple[int, ...] = (4, 8, 16, 32)
    table3_length: int = 16  # tokens out: without a cache each takes as long as an encoder
    shape: Shape = Shape(32, 4, 1024, 16, 1024)  # the paper's for its analysis on synthetic data
    figure4: tuple[tuple[int, int], ...] = (
        (64, 4), (128, 4), (256, 4), (512, 4), (1024, 4), (1024, 1), (1024, 2), (1024, 8),
    )  # fmt: skip
    figure4_tokens: int = 65536  # n times beam times batch: the batch shrinks as either grows, as in the paper
    least_seconds: float = 0.1
    table4: tuple[tuple[int, int], ...] = ((32, 256), (32, 1024), (64, 256), (64, 1024), (320, 256), (320, 1024))
    table4_decoder: tuple[int, int, int, int] = (12, 16, 1024, 4096)  # layers, heads, width, width of its feed-forward
    growth_model: Model = BART
    growth_scale: int = 1

    def demo_texts_file(self) -> Path:
        return BUILD / "demo" / f"tokens-{self.demo_texts}.json"

    def task(self, name: str) -> Task | None:
        return next((task for task in self.tasks if task.name == name), None)


FULL = Sizes(paper_tasks())
QUICK = Sizes(
    QUICK_TASKS, demo_texts=16, budget=GIB, largest=3, largest_prompted=2, table3_batches=(2, 3), table3_length=4,
    shape=Shape(2, 4, 32, 4, 64), figure4=((16, 2), (32, 2), (32, 1)), figure4_tokens=128, least_seconds=0.002,
    table4=((2, 16), (3, 32)), table4_decoder=(2, 4, 64, 128), growth_model=TINY_BART, growth_scale=8,
)  # fmt: skip


def plan(sizes: Sizes) -> list[list[Cell]]:
    """Groups in the order of their value; what the time is too short for is at the end."""
    groups = [
        peers(sizes, "cnndm", 8),
        *operations(sizes),
        quality(sizes),
        table2(sizes, "cnndm", "beam"),
        table2(sizes, "xsum", "beam"),
        table2(sizes, "squad", "beam"),
        *(table2(sizes, task, "greedy") for task in ("cnndm", "xsum", "squad")),
        peers(sizes, "xsum", 8),
        peers(sizes, "gpt2-small", 8),
        peers(sizes, "cnndm", 8, "more"),
        growth(sizes),
        table4(sizes),
        table3(sizes, ("copied", "stock", "always-fp16", "auto-fp16")),
        peers(sizes, "cnndm", 1),
        peers(sizes, "squad", 8),
        table2(sizes, "gpt2-small", "beam"),
        *(table2(sizes, task, "diverse") for task in ("cnndm", "xsum", "squad")),
        table2(sizes, "gpt2-small", "greedy"),
        *(peers(sizes, task, 8, "more") for task in ("xsum", "gpt2-small")),
        *(peers(sizes, task, 1) for task in ("xsum", "squad", "gpt2-small")),
        peers(sizes, "cnndm", 8, "settings"),
        table3(sizes, ("no-cache",)),
        peers(sizes, "gpt2-medium", 4),
        *(table2(sizes, "gpt2-medium", search) for search in ("beam", "greedy")),
        *(peers(sizes, task, 1, "more") for task in ("cnndm", "xsum", "gpt2-small")),
        peers(sizes, "gpt2-medium", 4, "more"),
        peers(sizes, "gpt2-medium", 1),
    ]
    return [group for group in groups if group]


def cells_of(sizes: Sizes, experiment: str) -> list[Cell]:
    return [cell for group in plan(sizes) for cell in group if cell.experiment == experiment]


def peers(sizes: Sizes, name: str, batch: int, part: str = "main") -> list[Cell]:
    """Beam search in other systems. The Transformer of SQuAD was converted for none."""
    task = sizes.task(name)
    systems = {"main": MAIN, "more": MORE, "settings": SETTINGS_TRIED}[part]
    if name == "squad":
        systems = WITHOUT_PEERS
    if task is None:
        return []
    group = f"{name}/{batch}/{part}"
    return [Cell("peers", group, s, s, task.request(batch), task.model.checkpoint) for s in systems]


def operations(sizes: Sizes) -> Iterable[list[Cell]]:
    shape = vars(sizes.shape) | {"least_seconds": sizes.least_seconds}
    yield [Cell("limits", "machine", "peaks", "operations", Request("peaks"))]
    yield [Cell("table1", "count", "count", "operations", Request("count", options=shape), rounds=1)]
    yield [Cell("figure3", "time", "operations", "operations", Request("time_operations", options=shape))]
    points = []
    for n, beam in sizes.figure4:
        batch = max(1, sizes.figure4_tokens // (n * beam))
        options = shape | {"batch": batch, "beam": beam, "length": n}
        points.append(Cell("figure4", "time", f"{n}/{beam}", "operations", Request("time_steps", options=options)))
    yield points


def quality(sizes: Sizes) -> list[Cell]:
    """ROUGE, and outputs that are stock's, on real texts: one round, as these don't vary."""
    texts = str(sizes.demo_texts_file())
    request = Request("texts", batch=32, beam=DEMO.beam("beam"), length=DEMO.output_length, texts=texts,
                      search={"lenpen": 1.0})  # fmt: skip
    return [Cell("quality", "demo", s, s, request, DEMO.model.checkpoint, rounds=1) for s in QUALITY]


def column_cell(
    sizes: Sizes, experiment: str, group: str, task: Task, search: str, column: str, **options: Any
) -> Cell:
    """Of Tables 2 and 3: the largest batch that the budget holds, or a given one."""
    system, form = COLUMNS.get(column, ("stock", "no-cache"))
    of_stock = system == "stock"
    largest = sizes.largest_prompted if task.model.is_language_model else sizes.largest
    request = task.request(
        options.pop("batch", largest), search, attention=None if of_stock else form,
        multi_head=form if of_stock and not task.model.is_language_model else None, **options,
    )  # fmt: skip
    sentence = state_bytes(task.model, request.beam, task.longest_source, request.length, column)
    checkpoint = task.model.checkpoint
    return Cell(experiment, group, column, system, request, checkpoint, budget=sizes.budget, sentence_bytes=sentence)


def table2(sizes: Sizes, name: str, search: str) -> list[Cell]:
    """Stock fairseq computes in single precision whatever the checkpoint's weights. Where beams share nothing, or are
    one, its cache is the copied one, and is measured once."""
    task = sizes.task(name)
    if task is None or search not in task.searches:
        return []
    shares = task.model.shares_cache and task.beam(search) > 1
    columns = [column for column in COLUMNS if column != "stock" or shares]
    return [column_cell(sizes, "table2", f"{name}/{search}", task, search, column) for column in columns]


def table3(sizes: Sizes, columns: tuple[str, ...]) -> list[Cell]:
    """BART-large on CNN/DailyMail with short outputs. Without a cache only at the smallest batch: it takes minutes."""
    task = sizes.task("cnndm")
    assert task
    found = []
    for batch in sizes.table3_batches[: 1 if columns == ("no-cache",) else None]:
        options = {"batch": batch, "length": sizes.table3_length}
        group = "no-cache" if columns == ("no-cache",) else "cached"
        cells = [column_cell(sizes, "table3", group, task, "beam", column, **options) for column in columns]
        found += [replace(cell, label=f"{cell.label}/{batch}", budget=None) for cell in cells]
    return found


def state_bytes(model: Model, beam: int, source: int, output: int, column: str) -> float:
    """What is kept of one sentence, by formula."""
    form = column.partition("-")[0]
    of_stock = form in ("copied", "stock", "no")
    shape, options = model.shape(1, beam, source), {}
    if model.is_language_model:
        if of_stock:  # prompts are steps, and every beam keeps them
            shape, output = model.shape(1, beam, 0), source + output
        options = {"layers_with_states": model.layers if form == "always" else 0}
    keeps_states = form in ("always", "no") or (model.is_language_model and of_stock)
    copied = form == "copied" or (form == "stock" and not model.shares_cache)
    kind = "always" if keeps_states else "never"
    return bytes_per_sentence(shape, model.layers, output, form=kind, copied=copied, **options)


TABLE4_FORMS = {"stock-copied": None, "stock": None, "el": "always"}
TABLE4_LIMIT = 7 * GIB  # more takes minutes to fill


def table4_bytes(sizes: Sizes, system: str, batch: int, n: int, element_size: int) -> int:
    layers, heads, width, _ = sizes.table4_decoder
    shape = Shape(batch, 4, n, heads, width, element_size)
    return shape.kept_states() if system == "el" else layers * shape.kept_key_values(copied=system == "stock-copied")


def table4(sizes: Sizes) -> list[Cell]:
    """One step of a decoder alone, which builds what is kept: the encoder has no layers and the vocabulary is small.
    One round, as bytes don't vary."""
    layers, heads, width, ffn = sizes.table4_decoder
    checkpoint = Checkpoint("bart_large", {
        "encoder_layers": 0, "decoder_layers": layers, "encoder_embed_dim": width, "encoder_ffn_embed_dim": ffn,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads}, vocabulary=1000)  # fmt: skip
    found = []
    for batch, n in sizes.table4:
        for system, form in TABLE4_FORMS.items():
            if table4_bytes(sizes, system, batch, n, 4) <= TABLE4_LIMIT:
                request = Request("source_state", batch, (n,), 4, 1, attention=form)
                found.append(Cell("table4", "state", f"{batch}/{n}/{system}", system, request, checkpoint, rounds=1))
    return found


def growth(sizes: Sizes) -> list[Cell]:
    """Whole generations of fairseq_el around a point, of which one thing grows. The point itself is on every axis."""
    points = dict.fromkeys(
        tuple((GROWTH_BASE | {axis: value}).items()) for axis, values in AXES.items() for value in values
    )
    found = []
    for point in map(dict, points):
        n, length = max(8, point["n"] // sizes.growth_scale), max(2, point["length"] // sizes.growth_scale)
        request = Request("generate", point["batch"], (n,) * 8, point["beam"], length, attention="auto")
        label = "/".join(map(str, point.values()))
        found.append(Cell("growth", "around", label, "el", request, sizes.growth_model.checkpoint))
    return found

