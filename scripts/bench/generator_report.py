"""The experiment `generator` in words and tables, made from its results alone."""

from typing import Any

from bench.report import (
    gigabytes,
    in_seconds,
    megabytes,
    milliseconds,
    opening,
    table,
    times,
    title,
)


def render(results: dict[str, Any]) -> str:
    made, settings = results["figures"], results["settings"]
    parts = opening("The generator beside its peers", results)
    parts += ["### Targets", targets_table(results["targets"])]
    sections = {
        "steps": (steps_text, steps_table),
        "whole": (whole_text, whole_table),
        "auto": (auto_text, auto_table),
        "source_state": (source_state_text, source_state_table),
        "loading": (loading_text, loading_table),
    }
    for name, (text, rows_table) in sections.items():
        if made[name]:
            parts += [text(settings), rows_table(made[name])]
    return "\n\n".join(parts)


def targets_table(targets: list[dict]) -> str:
    rows = []
    for target in targets:
        limit = (
            f"at least {target['at_least']:g}x"
            if target["at_most"] is None
            else f"at most {target['at_most']:g}x"
        )
        met = {True: "met", False: "**not met**", None: "open"}[target["met"]]
        rows.append([target["figure"], limit, times(target["value"]), met])
    return table(["figure", "target", "measured", "result"], rows)


def steps_text(settings: dict) -> str:
    lengths = "; ".join(
        f"batch {batch}: {long} tokens" for batch, (_, long) in settings["step_lengths"].items()
    )
    short, long = next(iter(settings["step_lengths"].values()))
    return (
        "### One decoding step\n\n"
        f"n = {settings['source_length']}, beam {settings['beam']}. From one call of the decoder to "
        f"the next, search included: median of all steps of a generation but the first ({lengths}), "
        "then over rounds. CTranslate2 and Transformers don't tell when a step begins: theirs is the "
        f"time for {long} tokens less that for {short}, by the difference, with the encoder's "
        "fluctuation in it. fairseq_el runs its multi-head form (`--el-attention never`): like "
        "stock fairseq's, its K and V are built in the first step."
    )


def steps_table(rows: list[dict]) -> str:
    cells = [
        [
            title(row),
            str(row["batch"]),
            milliseconds(row["seconds"]),
            times(row["speedup_over_stock"]),
        ]
        for row in rows
    ]
    return table(["system", "batch", "ms a step", "speed against stock"], cells)


def whole_text(settings: dict) -> str:
    return (
        "### Whole generation\n\n"
        f"Batch {settings['whole_batch']}, n = {settings['source_length']}, beam "
        f"{settings['beam']}, {settings['whole_length']} output tokens, encoder included; "
        "fairseq_el with `--el-attention auto`. "
        "`equal` counts the best hypotheses that are stock fairseq's token for token: with random "
        "weights, candidates that differ by rounding errors swap places, and CTranslate2 ranks by "
        "a last word where the others have the closing token."
    )


def whole_table(rows: list[dict]) -> str:
    cells = [
        [
            title(row),
            in_seconds(row["seconds"]),
            "" if row["encoder_seconds"] is None else f"{row['encoder_seconds']:.2f}",
            times(row["speedup_of_el"]),
            gigabytes(row["peak_bytes"]),
            "" if row["equal_to_stock"] is None else f"{row['equal_to_stock']}/{row['sentences']}",
        ]
        for row in rows
    ]
    header = [
        "system",
        "seconds",
        "of which encoder",
        "fairseq_el is faster",
        "peak memory",
        "equal",
    ]
    return table(header, cells)


def auto_text(settings: dict) -> str:
    return (
        "### The choice of form\n\n"
        f"Seconds for decoding, without the encoder: batch {settings['auto_batch']}, "
        f"{settings['whole_length']} output tokens. Their number is forced by `--min-len`, "
        "which `auto` takes into account."
    )


def auto_table(rows: list[dict]) -> str:
    cells = [
        [f"n = {row['source_length']}, beam {row['beam']}"]
        + [in_seconds(row[form]) for form in ("always", "never", "auto")]
        + [times(row["auto_to_better"])]
        for row in rows
    ]
    return table(["source and beam", "always", "never", "auto", "auto to better"], cells)


def source_state_text(settings: dict) -> str:
    return (
        "### Cached source state\n\n"
        f"Bytes of the live tensors, batch {settings['whole_batch']}, n = "
        f"{settings['source_length']}, beam {settings['beam']}: keys and values of encoder-decoder "
        "attention in stock fairseq, the encoder's output in fairseq_el (`--el-attention always`)."
    )


def source_state_table(rows: list[dict]) -> str:
    cells = [[title(row), megabytes(row["bytes"]), times(row["times_el"])] for row in rows]
    return table(["system", "cached", "to fairseq_el"], cells)


def loading_text(settings: dict) -> str:
    return (
        "### Loading\n\nFrom the start of the process until it is ready to generate. Transformers "
        "maps its weights into memory and reads them when they are first used."
    )


def loading_table(rows: list[dict]) -> str:
    cells = [[title(row), f"{row['seconds']:.1f}", gigabytes(row["peak"])] for row in rows]
    return table(["system", "seconds", "peak memory"], cells)
