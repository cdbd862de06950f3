"""What is measured, in groups, the most valuable first, and how long each takes by an estimate."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.checkpoints import Checkpoint
from bench.environment import BUILD, OURS, SYSTEMS
from bench.protocol import Request
from bench.runner import Cell
from bench.tasks import BART, DEMO, ENCODER, QUICK_ENCODER, QUICK_TASKS, TINY_BART, Model, Task, paper_tasks
from fairseq_el.models.costs import Shape

GIB = 2**30
MAIN = ("stock", *OURS, "ctranslate2", "ctranslate2-int8", "openvino")
# In rounds of their own, in which fairseq_el takes part again. The first of each is the one to compare with.
MORE = ("el", "transformers", "transformers-bf16", "openvino-f32", "openvino-int8", "onnxruntime", "onnxruntime-int8")
SETTINGS_TRIED = ("el", "ctranslate2-workers", "ctranslate2-int8-workers", "transformers-compile")
ENCODERS = (*OURS, "openvino", "openvino-f32", "onnxruntime", "onnxruntime-int8", "stock")
PARTS = {"main": MAIN, "more": MORE, "settings": SETTINGS_TRIED, "encoders": ENCODERS}
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
LARGEST_COLUMNS = ("copied", "stock", "auto-fp32", "auto-fp16")
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
    equal: int = 4  # batch of the columns of Table 2 that have all the same
    largest: int = 8  # batch under the budget; two cores gain nothing from more
    prompted: int = 2  # batch of language models, whose prompts are steps to stock fairseq: a batch takes minutes
    table3_batches: tuple[int, ...] = (1, 4, 8)
    table3_length: int = 8  # tokens out: without a cache each takes as long as an encoder
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
    left_out: tuple[str, ...] = ()  # groups

    def demo_texts_file(self) -> Path:
        return BUILD / "demo" / f"tokens-{self.demo_texts}.json"

    def task(self, name: str) -> Task | None:
        return next((task for task in self.tasks if task.name == name), None)


FULL = Sizes((*paper_tasks(), ENCODER))
QUICK = Sizes(
    (*QUICK_TASKS, QUICK_ENCODER), demo_texts=16, budget=GIB, equal=2, largest=3, table3_batches=(2, 3),
    table3_length=4, shape=Shape(2, 4, 32, 4, 64), figure4=((16, 2), (32, 2), (32, 1)), figure4_tokens=128,
    least_seconds=0.002, table4=((2, 16), (3, 32)), table4_decoder=(2, 4, 64, 128), growth_model=TINY_BART,
    growth_scale=8, left_out=("peers/gpt2-small/8/more", "peers/gpt2-small/1/main", "peers/cnndm/8/settings"),
)  # fmt: skip


def plan(sizes: Sizes) -> list[list[Cell]]:
    """Groups in the order of their value; a run takes as many as its time allows."""
    summaries, all_tasks = ("cnndm", "xsum"), ("cnndm", "xsum", "squad")
    first_searches = [(task, search) for search in ("beam", "greedy") for task in all_tasks]
    groups = [
        peers(sizes, "cnndm", 8),
        peers(sizes, "cnndm", 1),
        peers(sizes, "xsum", 8),
        *(table2(sizes, task, search, batch) for task, search in first_searches for batch in ("equal", "largest")),
        peers(sizes, "gpt2-small", 8),
        quality(sizes),
        table4(sizes),
        *operations(sizes),
        peers(sizes, "encoder", 4, "encoders"),
        peers(sizes, "cnndm", 8, "more"),
        peers(sizes, "cnndm", 1, "more"),
        growth(sizes),
        *(table3(sizes, part) for part in ("cached", "no-cache")),
        *(table2(sizes, task, "diverse", "equal") for task in all_tasks),
        *(peers(sizes, task, 8, "more") for task in ("xsum", "gpt2-small")),
        *(table2(sizes, "gpt2-small", search, "equal") for search in ("beam", "greedy")),
        peers(sizes, "gpt2-small", 1),
        *(table2(sizes, "gpt2-medium", search, "equal") for search in ("beam", "greedy")),
        peers(sizes, summaries[0], 8, "settings"),
    ]
    return [group for group in groups if group and f"{group[0].experiment}/{group[0].group}" not in sizes.left_out]


def cells_of(sizes: Sizes, experiment: str) -> list[Cell]:
    return [cell for group in plan(sizes) for cell in group if cell.experiment == experiment]


def peers(sizes: Sizes, name: str, batch: int, part: str = "main") -> list[Cell]:
    """Beam search in other systems, or the encoder alone."""
    task = sizes.task(name)
    if task is None:
        return []
    group = f"{name}/{batch}/{part}"
    request = task.request(batch)
    cells = [Cell("peers", group, s, s, request, task.model.checkpoint) for s in PARTS[part]]
    return [with_estimate(cell, task.model) for cell in cells]


def operations(sizes: Sizes) -> Iterable[list[Cell]]:
    shape = vars(sizes.shape) | {"least_seconds": sizes.least_seconds}
    yield [Cell("table1", "count", "count", "operations", Request("count", options=shape), rounds=1, estimate=10)]
    yield [Cell("figure3", "time", "operations", "operations", Request("time_operations", options=shape), estimate=15)]
    points = []
    for n, beam in sizes.figure4:
        batch = max(1, sizes.figure4_tokens // (n * beam))
        request = Request("time_steps", options=shape | {"batch": batch, "beam": beam, "length": n})
        points.append(Cell("figure4", "time", f"{n}/{beam}", "operations", request, estimate=12))
    yield points
    yield [Cell("limits", "machine", "peaks", "operations", Request("peaks"), estimate=15)]


def quality(sizes: Sizes) -> list[Cell]:
    """ROUGE, and outputs that are stock's, on real texts: one round, as these don't vary."""
    texts = str(sizes.demo_texts_file())
    request = Request("texts", batch=32, beam=DEMO.beam("beam"), length=DEMO.output_length, texts=texts,
                      search={"lenpen": 1.0})  # fmt: skip
    return [Cell("quality", "demo", s, s, request, DEMO.model.checkpoint, rounds=1, estimate=20) for s in QUALITY]


def column_cell(experiment: str, group: str, task: Task, search: str, column: str, budget: int | None = None,
                **options: Any) -> Cell:  # fmt: skip
    """Of Tables 2 and 3. budget: bytes; the batch is then the largest that they hold, of at most the request's."""
    system, form = COLUMNS.get(column, ("stock", "no-cache"))
    of_stock = system == "stock"
    request = task.request(
        options.pop("batch"), search, attention=None if of_stock else form,
        multi_head=form if of_stock and not task.model.is_language_model else None, **options,
    )  # fmt: skip
    cell = Cell(experiment, group, column, system, request, task.model.checkpoint, budget=budget)
    return with_estimate(cell, task.model)


def table2(sizes: Sizes, name: str, search: str, kind: str) -> list[Cell]:
    """kind: "equal", one batch for all columns, or "largest", that the budget holds. Stock fairseq computes in single
    precision whatever the checkpoint's weights. Where beams share nothing, or are one, its cache is the copied one,
    and is measured once."""
    task = sizes.task(name)
    if task is None or search not in task.searches:
        return []
    shares = task.model.shares_cache and task.beam(search) > 1
    columns = [c for c in (COLUMNS if kind == "equal" else LARGEST_COLUMNS) if c != "stock" or shares]
    batch = sizes.prompted if task.model.is_language_model else getattr(sizes, kind)
    budget = sizes.budget if kind == "largest" else None
    return [column_cell("table2", f"{name}/{search}/{kind}", task, search, c, budget, batch=batch) for c in columns]


def table3(sizes: Sizes, part: str) -> list[Cell]:
    """BART-large on CNN/DailyMail with short outputs. Without a cache only at the smallest batch: it takes minutes."""
    task, cached = sizes.task("cnndm"), part == "cached"
    assert task
    return [
        replace(
            column_cell("table3", part, task, "beam", column, batch=batch, length=sizes.table3_length),
            label=f"{column}/{batch}",
        )
        for batch in (sizes.table3_batches if cached else sizes.table3_batches[:1])
        for column in (("copied", "stock", "always-fp16", "auto-fp16") if cached else ("no-cache",))
    ]


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
                label = f"{batch}/{n}/{system}"
                found.append(Cell("table4", "state", label, system, request, checkpoint, rounds=1, estimate=15))
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
        cell = Cell("growth", "around", label, "el", request, sizes.growth_model.checkpoint)
        found.append(with_estimate(cell, sizes.growth_model))
    return found


# ---- estimates


@dataclass(frozen=True)
class Speed:
    """Of a system on two cores with AVX-512: its encoder, and a decoding step of BART-large."""

    encoder: float  # GFLOP/s
    step: float  # seconds that don't depend on the rows
    row: float  # seconds of each row, a beam of a sentence


SPEEDS = {
    "stock": Speed(125, 0.13, 0.0055), "el": Speed(170, 0.015, 0.0036), "el-fp32": Speed(170, 0.025, 0.0036),
    "el-bf16": Speed(305, 0.012, 0.0022), "el-int8": Speed(560, 0.009, 0.0013),
    "ctranslate2": Speed(110, 0.04, 0.012), "ctranslate2-int8": Speed(300, 0.015, 0.004),
    "transformers-bf16": Speed(200, 0.1, 0.008), "openvino": Speed(200, 0.06, 0.008),
    "onnxruntime-int8": Speed(260, 0.05, 0.01),
}  # fmt: skip
OTHER_SPEED = Speed(105, 0.08, 0.011)
COPYING = 6e9  # bytes/s that are read, and as many written
LIKE_COPIED = 1.35  # times as long as stock fairseq 0.12, whose beams share the cache
BART_STEP = 2 * (12 * 14 * 1024**2 + 50264 * 1024)  # FLOPs of a row


def work(model: Model, request: Request) -> tuple[float, float]:
    """FLOPs of encoding the sources or prompts, and of the linear layers of one row of a decoding step."""
    sources = [request.lengths[i % len(request.lengths)] for i in range(request.batch)]
    linear = 12 if model.is_language_model else 14  # d^2 each: no query and output of cross-attention
    encoder = sum(model.layers * (2 * 12 * model.width**2 * n + 4 * n**2 * model.width) for n in sources)
    return encoder, 2 * (model.layers * linear * model.width**2 + model.vocabulary * model.width)


def with_estimate(cell: Cell, model: Model) -> Cell:
    """Seconds of one answer. What stock fairseq does without a prefill, it does once per token of a prompt."""
    request, speed = cell.request, SPEEDS.get(cell.system, OTHER_SPEED)
    encoder, row = work(model, request)
    steps = request.length
    if model.is_language_model and cell.system == "stock":
        encoder, steps = 0.0, steps + max(request.lengths)
    decoding = steps * (speed.step + speed.row * request.batch * request.beam) * row / BART_STEP
    if model.is_language_model and SYSTEMS[cell.system].environment:  # each beam has the prompt's keys and values
        moved = 2 * 4 * request.batch * request.beam * max(request.lengths) * model.width * model.layers
        decoding += steps * 2 * moved / COPYING
    if request.multi_head == "no-cache":
        decoding += steps * request.beam * encoder / 2 / speed.encoder / 1e9
    if request.multi_head == "copied":
        decoding *= LIKE_COPIED
    return replace(cell, estimate=encoder / speed.encoder / 1e9 + decoding)
