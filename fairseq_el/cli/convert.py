"""Converts checkpoints from and to Hugging Face's format: `fairseq-el convert`."""

import argparse
import logging
import shlex
from pathlib import Path
from typing import Any

import torch

from fairseq_el.checkpoints import loading, packed_file
from fairseq_el.checkpoints.huggingface import HuggingFaceFolder, bart_to_huggingface
from fairseq_el.checkpoints.huggingface.export import storable
from fairseq_el.checkpoints.huggingface.reading import read_json, read_merges
from fairseq_el.checkpoints.huggingface.vocabularies import bart_vocabulary
from fairseq_el.checkpoints.huggingface.weights import precision_of
from fairseq_el.checkpoints.huggingface.writing import write_fairseq, write_huggingface
from fairseq_el.errors import UserError
from fairseq_el.jobs.packed_folder import write_packed
from fairseq_el.kernels.weights import LOW_PRECISION
from fairseq_el.resources import USER_DIR
from fairseq_el.text.vocabulary import load_dictionary

PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}


def convert(source: Path, output: Path, dtype: torch.dtype | None = None) -> Path:
    """Writes the folder `output` from a Hugging Face folder; returns the path of the checkpoint.

    dtype: of the weights (None: half precision if they are stored so, else single).
    """
    folder = HuggingFaceFolder(source)
    return write_fairseq(folder, dict(folder.state(dtype)["model"].items()), output)


def convert_back(source: Path, output: Path, dtype: torch.dtype | None = None) -> Path:
    """Writes a Hugging Face folder from a fairseq BART; returns the path of its weights.

    source: a checkpoint with dict.txt, encoder.json and vocab.bpe in the same folder, or the folder.
    """
    path = source / "model.pt" if source.is_dir() else source
    state = loading.load(path)
    if packed_file.is_packed(state["model"]):
        raise UserError(f"{path} is a packed model: give the model that it was made from")
    weights, config = bart_to_huggingface(state["model"], state["cfg"].model)
    dictionary = read_dictionary(path.parent)
    loading.check_dictionary(state["model"], "encoder", dictionary)
    vocabulary = bart_vocabulary(dictionary.symbols, read_json(path.parent / "encoder.json"))
    merges = read_merges(path.parent / "vocab.bpe")
    dtype = dtype or precision_of(state["model"])
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    weights = storable(weights, config["tie_word_embeddings"], dtype)
    return write_huggingface(output, config, weights, vocabulary, merges)


def read_dictionary(folder: Path) -> Any:
    """The one dictionary of both languages, under any of fairseq's names."""
    paths = sorted(folder.glob("dict*.txt"))
    if not paths:
        raise UserError(f"{folder} has no dict.txt: put the one that belongs to the checkpoint there")
    dictionaries = [load_dictionary(path) for path in paths]
    for path, dictionary in zip(paths, dictionaries, strict=True):
        if dictionary != dictionaries[0]:
            raise UserError(
                f"{paths[0]} and {path} are different, and Transformers' BART has one vocabulary: "
                "leave the one that belongs to the checkpoint"
            )
    return dictionaries[0]


# --- command line --------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    """args: of `options.convert`."""
    logging.basicConfig(format="convert: warning: %(message)s", level="WARNING", force=True)
    print(f"converting {args.source} (a minute for the largest) ...", flush=True)
    if args.packed or args.precision in LOW_PRECISION:
        if args.reverse:
            raise UserError("--packed and --reverse don't go together: Transformers has no packed models")
        path = write_packed(args.source, args.output, args.precision or "auto", args.bpe_dir)
        print(f"wrote {path} ({path.stat().st_size / 1e6:,.1f} MB), its settings and its vocabulary")
        print(f"try: {shlex.join(['fairseq-el', 'summarize', '--model', str(args.output)])}")
        return
    direction = convert_back if args.reverse else convert
    path = direction(args.source, args.output, PRECISIONS.get(args.precision))
    print(f"wrote {path} ({path.stat().st_size / 1e6:,.1f} MB) and its vocabulary")
    if not args.reverse:
        print(f"try: {command_to_try(path)}")


def command_to_try(path: Path) -> str:
    path = path.resolve()
    folder = path.parent
    if not (folder / "encoder.json").exists():
        return shlex.join(["fairseq-el", "translate", "--model", str(folder), "-s", "en", "-t", "de"])
    words = ["fairseq-interactive", folder, "--path", path, "--user-dir", USER_DIR, "--bpe", "gpt2"]
    words += ["--gpt2-encoder-json", folder / "encoder.json", "--gpt2-vocab-bpe", folder / "vocab.bpe"]
    if (folder / "dict.source.txt").exists():
        words += ["-s", "source", "-t", "target", "--beam", "4", "--max-len-b", "100"]
    else:
        words += ["--task", "language_modeling", "--beam", "1", "--max-new-tokens", "30"]
    return shlex.join(str(word) for word in words)
