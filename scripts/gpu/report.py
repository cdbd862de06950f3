"""The prediction of `gpu/model.py` in words and tables, for docs/gpu.md."""

from statistics import fmean
from typing import Any

from bench.report import table

TITLES = {"squad": "Transformer, SQuAD 1.1", "xsum": "BART-large, XSum", "cnndm": "BART-large, CNN/DailyMail",
          "gpt2-small": "GPT-2 small, CNN/DailyMail", "gpt2-medium": "GPT-2 medium, CNN/DailyMail"}  # fmt: skip


def render(results: dict[str, Any]) -> str:
    parts = ["## A prediction to test", how_text(results)]
    for dtype, rows in results["table2"].items():
        parts += [f"### Table 2, {dtype}, V100", table2(rows), error_text(dtype, rows)]
    parts += ["### Table 3, fp16, V100", table3(results["table3"]), TABLE3_TEXT]
    parts += ["### Other devices", devices_table(results["devices"]), DEVICES_TEXT]
    return "\n\n".join(parts)


def how_text(results: dict[str, Any]) -> str:
    fitted = "; ".join(
        f"{dtype}: {1e6 * e['launch']:.0f} us per launch, {e['arithmetic']:.0%} of the peak arithmetic, "
        f"{e['bandwidth']:.0%} of the bandwidth, {1e6 * e['beam_loop']:.0f} us per beam and step in GPT-2's loop"
        for dtype, e in results["efficiency"].items()
    )
    peaks = "; ".join(
        f"{d['name']}: {d['flops']['fp16'] / 1e12:.0f} TFLOP/s in fp16, {d['flops']['fp32'] / 1e12:g} in fp32, "
        f"{d['bandwidth'] / 1e9:.0f} GB/s ({d['source']})"
        for d in results["peaks"]
    )
    return (
        "**No GPU was used.** `scripts/gpu_model.py` counts the kernels of whole generations at the paper's "
        "sizes on the simulated device, with their FLOPs and bytes, and times them with a roofline: a kernel takes as "
        "long as its launch, its arithmetic or its memory traffic, whichever is longest.\n\n"
        f"Peaks: {peaks}.\n\n"
        "Four numbers per precision are fitted to the paper's *baseline* column alone, on a V100 with the software of "
        f"2020 ({fitted}). The EL columns are then predictions: no EL figure of the paper entered them.\n\n"
        "Batches are the largest that fit 16 GB by counted memory; for EL at most ten times the baseline's, the ratio "
        "that Table 3 states (320 to 32). The baseline is multi-head attention with a cache for every beam that "
        "follows the beams, as in fairseq 0.9; for GPT-2 the prompts of all beams with logits for every token of them, "
        "as in transformers 3.0. EL is this package's `--el-attention always` by torch's operations, behind the "
        "baseline's encoder or prompt. Sources and outputs have the paper's mean lengths, and outputs spread around it "
        "as those in `scripts/bench/lengths.json` do. These assumptions, unlike the fitted numbers, were made knowing "
        "the paper's EL column."
    )


def table2(rows: list[dict[str, Any]]) -> str:
    header = ["model, task, search", "batch", "baseline", "paper", "EL", "paper", "speed-up", "paper", "error"]
    return table(header, [
        [f"{TITLES[r['task']]}, {r['search']}", f"{r['batch'][0]} / {r['batch'][1]}", f"{r['baseline']:.1f}",
         f"{r['paper'][0]:.1f}", f"{r['el']:.1f}", f"{r['paper'][1]:.1f}", f"{r['speed_up']:.2f}x",
         f"{r['paper'][1] / r['paper'][0]:.2f}x", f"{r['error']:+.0%}"]
        for r in rows
    ])  # fmt: skip


def error_text(dtype: str, rows: list[dict[str, Any]]) -> str:
    mean = fmean(abs(row["error"]) for row in rows)
    words = "Sentences per second; batches of baseline and EL."
    return f"{words} The speed-ups in {dtype} have a mean error of {mean:.0%}."


def table3(rows: list[dict[str, Any]]) -> str:
    def cell(speed: float | None, memory: float) -> str:
        return f"{'does not fit' if speed is None else f'{speed:.1f}'} ({memory / 1e9:.1f} GB)"

    def paper(speed: float | None) -> str:
        return "OOM" if speed is None else f"{speed:g}"

    return table(["batch", "cache", "paper: cache", "EL", "paper: EL"], [
        [str(row["batch"]), cell(row["baseline"], row["baseline_bytes"]), paper(row["paper"]["copied"]),
         cell(row["el"], row["el_bytes"]), paper(row["paper"]["always"])]
        for row in rows
    ])  # fmt: skip


TABLE3_TEXT = (
    "BART-large on CNN/DailyMail, beam 4. In brackets the counted peak of memory with sources of 1,024 tokens, for EL "
    "with this package's encoder; what needs more than 93% of 16 GB does not fit."
)


def devices_table(rows: list[dict[str, Any]]) -> str:
    return table(["device", "batch", "baseline", "EL, torch", "EL, Triton", "speed-up"], [
        [row["device"], f"{row['batch'][0]} / {row['batch'][1]}", f"{row['baseline']:.1f}", f"{row['el']:.1f}",
         "not used" if row["triton"] is None else f"{row['triton']:.1f}",
         f"{(row['triton'] or row['el']) / row['baseline']:.1f}x"]
        for row in rows
    ])  # fmt: skip


DEVICES_TEXT = (
    "BART-large on CNN/DailyMail, fp16, beam 4, sentences per second, at the largest batch that fits each system, with "
    "this package's encoder for EL. Triton's EL-attention needs tensor cores that it supports, of an A100 or later. "
    "The "
    "efficiencies are the V100's, fitted to software of 2020: newer software launches faster and reaches more of the "
    "peaks. Read the ratios, and take them for a guess until somebody measures them."
)
