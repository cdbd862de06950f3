#!/usr/bin/env python3
"""Summarise the demo's texts with stock fairseq and with fairseq_el, and compare.

All systems are the real `fairseq-generate` command on the same checkpoint and data; what differs is
`--user-dir`. fairseq_el runs as it comes (`--el-attention auto`, the faster form of attention on
this machine) and with EL-attention alone, which keeps the least. Each leaves its output in build/demo, in the current
folder.
"""

import argparse
import hashlib
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from fairseq_el.cli.fairseq_command import CommandFailed, fairseq, human_size
from fairseq_el.jobs import presets
from fairseq_el.resources import USER_DIR, resource
from fairseq_el.text import rouge as rouge_scores

EXAMPLES = 5
LEAD_WORDS = 8  # about as long as a synopsis
ROUGE = ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
PRESET = presets.load("demo")
SYSTEMS = {
    "stock fairseq": ["--user-dir", str(USER_DIR), "--task", "stock_cache_meter"],
    "fairseq_el": ["--user-dir", str(USER_DIR), "--el-profile"],
    "fairseq_el, always": ["--user-dir", str(USER_DIR), "--el-profile", "--el-attention", "always"],
}


@dataclass
class Run:
    """What one system wrote, and what it cost."""

    pieces: dict[int, str] = field(default_factory=dict)  # hypotheses as tokens, by line number
    summaries: dict[int, str] = field(default_factory=dict)  # the same as text
    sentences_per_second: float = 0.0
    peak_bytes: int = 0


def prepare(demo: Path, build: Path, limit: int | None) -> Path:
    """Turn the demo's first `limit` texts into fairseq's binary format, unless that is done."""
    data = build / (f"first-{limit}" if limit else "all")
    names = ("sentencepiece.model", "dict.txt", "test.source", "test.target")
    inputs = [demo / name for name in names]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = data / "prepared"
    if stamp.exists() and stamp.read_text() == digest:
        return data

    print("Preparing the data ...", flush=True)
    shutil.rmtree(data, ignore_errors=True)  # fairseq-preprocess overwrites nothing
    data.mkdir(parents=True)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(inputs[0]))
    for side, length in (("source", PRESET.text().longest_source), ("target", None)):
        lines = read_lines(demo / f"test.{side}", limit)
        pieces = [" ".join(piece[:length]) for piece in processor.encode(lines, out_type=str)]
        (data / f"pieces.{side}").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    fairseq(
        ["fairseq-preprocess", "--source-lang", "source", "--target-lang", "target",
         "--testpref", data / "pieces", "--srcdict", demo / "dict.txt", "--joined-dictionary",
         "--destdir", data],
        log=data / "preprocess.log",
        on_line=lambda line: None,
    )  # fmt: skip
    stamp.write_text(digest)
    return data


def read_lines(path: Path, limit: int | None = None) -> list[str]:
    return path.read_text(encoding="utf-8").rstrip("\n").split("\n")[:limit]


def generate(system: str, demo: Path, data: Path, total: int) -> Run:
    """Run `fairseq-generate` as one of SYSTEMS, with a progress bar over the summaries."""
    run = Run()
    log = data / f"{system.replace(' ', '-')}.log"
    layout = "{desc:<20}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}]{postfix}"
    with tqdm(total=total, desc=system, bar_format=layout, mininterval=0.5) as bar:
        bar.set_postfix_str("loading")

        def on_line(line: str) -> None:
            if match := re.match(r"H-(\d+)\t\S+\t(.*)", line):
                run.pieces[int(match[1])] = match[2]
                bar.set_postfix_str("", refresh=False)
                bar.update()
            elif match := re.match(r"D-(\d+)\t\S+\t(.*)", line):
                run.summaries[int(match[1])] = match[2]
            elif match := re.search(r"Translated .* \(([\d.]+) sentences/s", line):
                run.sentences_per_second = float(match[1])
            elif match := re.match(r"(?:stock|fairseq_el) \| peak source state: (\d+) bytes", line):
                run.peak_bytes = int(match[1])

        fairseq(
            ["fairseq-generate", data, "--path", demo / "model.pt", *SYSTEMS[system], *PRESET.arguments(),
             "--bpe", "sentencepiece", "--sentencepiece-model", demo / "sentencepiece.model",
             "--no-progress-bar"],
            log=log,
            on_line=on_line,
        )  # fmt: skip
    if len(run.summaries) != total or not run.sentences_per_second or not run.peak_bytes:
        raise CommandFailed(f"{system} left out summaries, its speed or its peak: see {log}")
    return run


def rouge(references: list[str], summaries: list[str]) -> list[float]:
    """Mean F-measures in per cent, with stemming, in the order of ROUGE."""
    scores = rouge_scores.rouge(references, summaries)
    return [float(scores[kind].mean()) for kind in ROUGE]


def print_examples(texts: list[str], references: list[str], summaries: dict[int, str]) -> None:
    for i, text in enumerate(texts[:EXAMPLES]):
        print(f"\n  text       {textwrap.shorten(text, 160, placeholder=' ...')}")
        print(f"  reference  {references[i]}")
        print(f"  summary    {summaries[i]}")


def print_table(runs: dict[str, Run], references: list[str]) -> None:
    rows = [["", *ROUGE, "sentences/s", "cached source state at the peak"]]
    for system, run in runs.items():
        scores = rouge(references, [run.summaries[i] for i in range(len(references))])
        state = f"{run.peak_bytes:,} bytes ({human_size(run.peak_bytes)})"
        speed = f"{run.sentences_per_second:.1f}"
        rows.append([system, *(f"{score:.2f}" for score in scores), speed, state])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        print("  " + name.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), sep="  ")


def report(runs: dict[str, Run], texts: list[str], references: list[str]) -> None:
    stock, *ours = runs.values()
    print_examples(texts, references, ours[0].summaries)
    print()
    print_table(runs, references)
    identical = sum(
        all(run.pieces[i] == pieces for run in ours) for i, pieces in stock.pieces.items()
    )
    leads = [" ".join(text.split()[:LEAD_WORDS]) for text in texts]
    lead_scores = " / ".join(f"{score:.2f}" for score in rouge(references, leads))
    print(f"\n  {identical:,} of {len(texts):,} hypotheses are identical, token for token.")
    print(f"  For scale, the first {LEAD_WORDS} words of each text score {lead_scores}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N texts (default: all)")
    parser.add_argument("--demo", type=Path, default=resource("demo"), metavar="DIR",
                        help="model and test set, with the files of demo/ (default: those of the package)")  # fmt: skip
    parser.add_argument("--results-path", type=Path, default=Path("build") / "demo", metavar="DIR",
                        help="folder for data and logs (default: build/demo in the current folder)")  # fmt: skip
    args = parser.parse_args()
    demo, build = args.demo.resolve(), args.results_path.resolve()

    texts = read_lines(demo / "test.source", args.limit)
    references = read_lines(demo / "test.target", args.limit)
    try:
        data = prepare(demo, build, args.limit)
        runs = {system: generate(system, demo, data, len(texts)) for system in SYSTEMS}
    except CommandFailed as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit("\nInterrupted.")
    report(runs, texts, references)


if __name__ == "__main__":
    main()
