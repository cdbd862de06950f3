"""The experiment `gpt2`: language models with long prompts, beside stock fairseq and other systems.

`plan` says what is measured, `figures` what is made of it, `targets` what it is held against, `render`
how it reads. All are pure, so that a table can be made again from a JSON file.
"""

from dataclasses import dataclass, field
from typing import Any

from bench.checkpoints import Checkpoint
from bench.driver import Cell
from bench.generator import Record, first, select, speedup, spread, target, unique
from bench.generator_report import targets_table
from bench.protocol import Request
from bench.report import gigabytes, in_seconds, megabytes, opening, table, times
from bench.systems import LANGUAGE_SYSTEMS, SystemKind

LIKE_GPT2 = {
    "activation_fn": "gelu_accurate",
    "decoder_learned_pos": True,
    "no_scale_embedding": True,
    "share_decoder_input_output_embed": True,
    "tokens_per_sample": 1024,
    "max_target_positions": 1024,
}


@dataclass(frozen=True)
class Settings:
    """GPT-2's shapes; mind fairseq's names, whose transformer_lm_gpt2_small is GPT-2 medium."""

    checkpoints: dict[str, Checkpoint] = field(
        default_factory=lambda: {
            "GPT-2 small": Checkpoint("transformer_lm_gpt", LIKE_GPT2),
            "GPT-2 medium": Checkpoint("transformer_lm_gpt2_small", LIKE_GPT2),
        }
    )
    most_rounds: dict[str, int] = field(default_factory=lambda: {"GPT-2 medium": 1})  # of minutes each
    batch: int = 8
    prompt_length: int = 512
    length: int = 60
    beams: tuple[int, ...] = (4, 1)

    def rounds(self, model: str, repeats: int) -> int:
        return min(repeats, self.most_rounds.get(model, repeats))


TINY = {
    "decoder_layers": 2,
    "decoder_embed_dim": 64,
    "decoder_input_dim": 64,
    "decoder_output_dim": 64,
    "decoder_ffn_embed_dim": 128,
    "decoder_attention_heads": 4,
}
QUICK = Settings(
    checkpoints={"toy": Checkpoint("transformer_lm_gpt", LIKE_GPT2 | TINY, vocabulary=1000)},
    batch=2,
    prompt_length=24,
    length=6,
)

# By beam: how many times faster than each system; peers leave prompts unscored, and so do we there.
TARGETS = {
    4: {"stock": ("el", 8.0), "transformers": ("el-unscored", 2.0), "ctranslate2-float32": ("el-unscored", 1.0)},
    1: {"stock": ("el", 5.0), "transformers": ("el-unscored", 1.2), "ctranslate2-float32": ("el-unscored", 1.0)},
}


def plan(settings: Settings, kinds: list[SystemKind]) -> list[Cell]:
    """Whole generations, and what is cached of the prompts in each form."""
    cells = []
    for beam in settings.beams:
        shape = (settings.batch, settings.prompt_length, beam)
        requests = [
            (kind.name, Request("generate", *shape, settings.length, attention(kind))) for kind in kinds
        ]
        # Stock fairseq takes longer than all others together: one round of it.
        cells.append(Cell("whole", [pair for pair in requests if pair[0] == "stock"], repeats=1))
        cells.append(Cell("whole", [pair for pair in requests if pair[0] != "stock"]))
        forms = [
            ("el", Request("generate", *shape, 2, form))
            for form in ("always", "never")
            if any(kind.name == "el" for kind in kinds)
        ]
        cells.append(Cell("state", forms, repeats=1))
    return [cell for cell in cells if cell.requests]


def section(model: str) -> str:
    """Of the page, and the name of the file of results."""
    return f"gpt2-{model.split()[-1]}"


def attention(kind: SystemKind) -> str | None:
    return "auto" if kind.name.startswith("el") else None


def figures(settings: Settings, model: str, records: list[Record]) -> list[dict[str, Any]]:
    """One row for each beam and system."""
    rows = []
    for beam in settings.beams:
        found = whole_rows(select(records, figure="whole", beam=beam))
        state = {r["attention"]: r["source_state_bytes"] for r in select(records, figure="state", beam=beam)}
        rows += [{"model": model, "beam": beam, **row} for row in found]
        rows += [
            {"model": model, "beam": beam, "system": f"state, {form}", "state_bytes": size}
            for form, size in state.items()
        ]
    return rows


def whole_rows(records: list[Record]) -> list[dict[str, Any]]:
    rows = []
    stock = select(records, system="stock")
    for system in unique(record["system"] for record in records):
        own = select(records, system=system)
        equal = None
        if stock:
            equal = sum(a == b for a, b in zip(own[0]["tokens"], stock[0]["tokens"]))
        rows.append(
            {
                "system": system,
                "seconds": spread([r["seconds"] for r in own]),
                "peak_bytes": max(r["memory"]["peak"] for r in own),
                "state_bytes": own[0]["source_state_bytes"],
                "sentences": own[0]["batch"],
                "equal_to_stock": equal,
            }
        )
    for row in rows:
        row["speedup_over_stock"] = speedup(select(rows, system="stock"), row)
    return rows


def targets(settings: Settings, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for model in unique(row["model"] for row in rows):
        for beam in settings.beams:
            cell = select(rows, model=model, beam=beam)
            for rival, (own, limit) in TARGETS[beam].items():
                name = f"{model}, beam {beam}: {LANGUAGE_SYSTEMS[own].title} against {LANGUAGE_SYSTEMS[rival].title}"
                ours = select(cell, system=own)
                value = speedup(select(cell, system=rival), *ours)
                found.append(target(name, value, at_least=limit))
            found.append(state_target(f"{model}, beam {beam}", cell))
    return found


def state_target(name: str, cell: list[dict[str, Any]]) -> dict[str, Any]:
    always, never = (first(select(cell, system=f"state, {form}"), "state_bytes") for form in ("always", "never"))
    value = None if always is None else always / never
    return target(f"{name}: prompt state, `always` to K and V shared by the beams", value, at_most=0.501)


def render(results: dict[str, Any]) -> str:
    settings, rows = results["settings"], results["figures"]
    texts = [
        *opening(f"Language models: {results['model']}", results),
        "### Targets\n\n" + targets_table(results["targets"]),
        f"### Prompt and output\n\nPrompts of {settings['prompt_length']} tokens, {settings['length']} new "
        f"tokens, batch {settings['batch']}; everything is timed. Single-precision weights, as GPT-2's are, "
        "except in the row that says fp16. Stock fairseq scores every token of the prompt; Transformers and "
        "CTranslate2 do not, so they are compared with fairseq_el leaving prompts unscored "
        "(`--el-unscored-prompts`), which for greedy search changes no token. `prompt state` is what is "
        "cached when the prompt has been read. `equal` counts the best hypotheses that are stock "
        "fairseq's token for token: unscored prompts rank beams by another sum, and random weights make "
        "for near-ties.",
    ]
    texts.append(whole_table(rows))
    return "\n\n".join(texts)


def whole_table(rows: list[dict[str, Any]]) -> str:
    header = ["model and system", "beam", "seconds", "speed against stock", "peak memory", "prompt state", "equal"]
    cells = []
    for row in rows:
        if row["system"].startswith("state, "):
            form = row["system"].removeprefix("state, ")
            cells.append([f"{row['model']}, fairseq_el `{form}`", str(row["beam"]), "", "", "",
                          megabytes(row["state_bytes"]), ""])  # fmt: skip
            continue
        state = "" if row["state_bytes"] is None else megabytes(row["state_bytes"])
        equal = "" if row["equal_to_stock"] is None else f"{row['equal_to_stock']}/{row['sentences']}"
        cells.append(
            [
                f"{row['model']}, {LANGUAGE_SYSTEMS[row['system']].title}",
                str(row["beam"]),
                in_seconds(row["seconds"]),
                times(row["speedup_over_stock"]),
                gigabytes(row["peak_bytes"]),
                state,
                equal,
            ]
        )
    return table(header, cells)
