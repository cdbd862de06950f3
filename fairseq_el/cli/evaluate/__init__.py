"""Runs `fairseq-generate` with a preset, scores its output and adds a row to a table: `fairseq-el evaluate`.

With `--compare` it does so for two systems, and says what differs. `--html` writes all of it as a page.
"""

import argparse
import logging
import re
import sys
from pathlib import Path

from fairseq_el.cli.chosen_preset import load_preset
from fairseq_el.cli.evaluate import comparing, generating, results
from fairseq_el.cli.evaluate.data import Data, find_data, make_prompts
from fairseq_el.cli.evaluate.generating import Output, generate
from fairseq_el.cli.evaluate.statistics import Comparison, System, estimates_of
from fairseq_el.cli.evaluate.variant import Variant
from fairseq_el.cli.fairseq_command import CommandFailed
from fairseq_el.errors import UserError
from fairseq_el.jobs.atomic_file import AtomicFile, check_writable
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.text import rouge
from fairseq_el.text.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> None:
    files = ModelFiles.find(args.model, args.bpe_dir)
    variants = variants_of(args, files)
    folders = make_folders(args.results_path, variants)
    table = args.results_path / "results.jsonl"
    results.check_results(table)
    if args.html:
        check_writable(args.html)
    data = data_of(args, variants, files, folders[0])
    vocabulary = Tokenizer(files.build_encoding())
    outputs = []
    for variant, folder in zip(variants, folders):
        title = f"{variant.name} " if args.compare else ""
        outputs.append(generate(args, variant, files, data, folder / "generate.log", title))
    references = generating.references_of(outputs[0], data, vocabulary)
    systems = []
    for variant, output, folder in zip(variants, outputs, folders):
        summaries = generating.summaries_of(output, variant, vocabulary)
        with AtomicFile(folder / "summaries.txt") as whole:
            whole.file.writelines(f"{summary}\n".encode() for summary in summaries)
        systems.append(system_of(args, variant, files, output, references, summaries))
    comparison = Comparison.of(*systems) if args.compare else None
    if comparison:
        systems[0].row["comparison"] = comparison.as_row()
    for system in systems:
        results.append_result(table, system.row)
    results.print_table(results.read_results(table))
    if comparison:
        comparing.print_comparison(comparison, references)
    if args.html:
        write_page(args.html, generating.texts_of(outputs[0].sources, vocabulary), references, systems, comparison)


def variants_of(args: argparse.Namespace, files: ModelFiles) -> list[Variant]:
    """What to run: the system that the options ask for, and the one to compare it with."""
    variants = [Variant(load_preset(args, files), args.stock, args.fp16)]
    if args.compare:
        variants.append(variants[0].compared_with(args.compare))
        comparing.warn_of_ngrams(variants)
    if any(variant.stock for variant in variants):
        if variants[0].is_language_model:
            raise UserError(
                "stock fairseq can't count tokens from the end of a prompt: leave out "
                + ("--stock" if args.stock else "--compare stock")
            )
        files.load_state()  # refuses a checkpoint whose code stock fairseq would run
    return variants


def make_folders(place: Path, variants: list[Variant]) -> list[Path]:
    folders = [(place / variant.folder).resolve() for variant in variants]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def data_of(args: argparse.Namespace, variants: list[Variant], files: ModelFiles, build: Path) -> Data:
    if variants[0].is_language_model:
        return make_prompts(args, variants[0].preset, build)
    return find_data(args.data, args.gen_subset, args.reference)


def system_of(
    args: argparse.Namespace,
    variant: Variant,
    files: ModelFiles,
    output: Output,
    references: list[str],
    summaries: list[str],
) -> System:
    scores = rouge.rouge(references, summaries, variant.preset.scoring().rouge_lsum)
    with_bleu = variant.preset.options.get("scoring") == "sacrebleu"
    estimates = estimates_of(scores, references, summaries, with_bleu)
    row = results.row_of(args, variant, files, output, estimates)
    return System(variant.name, summaries, scores, estimates, row)


def write_page(
    path: Path, sources: list[str], references: list[str], systems: list[System], comparison: Comparison | None
) -> None:
    from fairseq_el.cli.evaluate.report import render

    with AtomicFile(path) as whole:
        whole.file.write(render(sources, references, systems, comparison).encode("utf-8", "replace"))


def main(args: argparse.Namespace) -> None:
    """args: of `options.evaluate`."""
    logging.basicConfig(format="evaluate: warning: %(message)s", level=logging.WARNING, force=True)
    try:
        run(args)
    except CommandFailed as failure:  # the error line of fairseq-generate if it printed one
        said = re.findall(r"^fairseq_el: (error: .*)$", str(failure), re.MULTILINE)
        sys.exit(f"evaluate: {said[-1]}" if said else str(failure))
