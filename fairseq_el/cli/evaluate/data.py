"""Finds the data to evaluate on: fairseq's binarised pairs, or texts that become prompts."""

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq.data import data_utils, indexed_dataset
from tqdm import tqdm

from fairseq_el.cli import score
from fairseq_el.errors import UserError
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.text.sentences import read_lines


@dataclass
class Data:
    folder: Path  # what fairseq-generate reads
    subset: str
    sentences: int
    references: list[str] | None  # None: the targets in the folder


def find_data(place: Path, subset: str, reference: Path | None) -> Data:
    """Binarised pairs, and their references if these are text."""
    indices = sorted(place.glob(f"{subset}.*-*.*.idx"))
    if not indices:
        raise UserError(
            f"{place} has no binarised {subset} set (no file like {subset}.source-target.source.idx): make "
            "it with fairseq-el prepare, or name another with --gen-subset"
        )
    sentences = len(data_utils.load_indexed_dataset(str(indices[0].with_suffix("")), None))
    beside = place.parent / f"{subset}.references"
    reference = reference or (beside if beside.is_file() else None)
    return Data(place, subset, sentences, read_references(reference, sentences) if reference else None)


def make_prompts(args: argparse.Namespace, preset: Preset, build: Path) -> Data:
    """The texts of a data set as prompts for a language model, in fairseq's binarised form."""
    place = args.data if (args.data / f"{args.gen_subset}.source").is_file() else args.data.parent
    path = place / f"{args.gen_subset}.source"
    if not path.is_file():
        raise UserError(f"{args.data} has no {path.name}: give the folder that fairseq-el prepare wrote")
    summarizer = Summarizer.load(args.model, preset, bpe_dir=args.bpe_dir, cpu=True)
    dictionary = summarizer.task.source_dictionary
    builder = indexed_dataset.make_builder(str(build / "test.bin"), "mmap", len(dictionary))
    sentences = 0
    for sentences, text in enumerate(tqdm(read_lines(path), desc="prompts", unit=" texts", delay=2), start=1):
        tokens = summarizer.batcher.encode(text).tokens
        if not tokens:
            raise UserError(f"line {sentences} of {path} is blank: leave out such pairs")
        builder.add_item(torch.tensor([*tokens, dictionary.eos()]))
    builder.finalize(str(build / "test.idx"))
    shutil.copyfile(ModelFiles.find(args.model, args.bpe_dir).dictionary("source"), build / "dict.txt")
    beside = (place / f"{args.gen_subset}.{kind}" for kind in ("references", "target"))
    reference = args.reference or next(filter(Path.is_file, beside), place / f"{args.gen_subset}.target")
    return Data(build, "test", sentences, read_references(reference, sentences))


def read_references(path: Path, sentences: int) -> list[str]:
    references = score.read_texts(path)
    if len(references) != sentences:
        raise UserError(
            f"{path} has {len(references):,} references, but there are {sentences:,} sentences: give its own"
        )
    return references
