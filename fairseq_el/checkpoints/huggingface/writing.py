"""Writes the files of a fairseq folder and of a Hugging Face folder, each of them atomically."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fairseq_el.checkpoints.format import atomic_file, current_state
from fairseq_el.checkpoints.huggingface import reading
from fairseq_el.checkpoints.huggingface.export import GENERATION
from fairseq_el.checkpoints.huggingface.folder import HuggingFaceFolder

VERSION_LINE = "#version: 0.2"  # the first of a file of merges


def write_fairseq(folder: HuggingFaceFolder, weights: dict[str, Tensor], output: Path) -> Path:
    """The checkpoint last: without it the folder is not a model."""
    cfg = folder.configuration()  # first, as it may be refused
    write_vocabulary(folder, output)
    path = output / "model.pt"
    with atomic_file(path) as file:
        torch.save(untrained(current_state(cfg, weights)), file)
    return path


def write_vocabulary(folder: HuggingFaceFolder, output: Path) -> None:
    """The dictionaries, and the files of the tokenizer."""
    symbols, cfg = folder.symbols, folder.configuration()
    output.mkdir(parents=True, exist_ok=True)
    sides = [cfg.task.source_lang, cfg.task.target_lang] if folder.task == "translation" else []
    write_dictionaries(output, symbols, filter(None, sides))
    if folder.is_multilingual:
        for tokenizer in folder.tokenizer:
            shutil.copyfile(tokenizer, output / tokenizer.name)
    else:
        encoder, merges = folder.bpe
        write_json(output / "encoder.json", encoder)
        write_merges(output / "vocab.bpe", merges)


def untrained(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint from which training would start anew."""
    state["optimizer_history"][-1]["num_updates"] = 0
    state["extra_state"] = {
        "metrics": OrderedDict(),
        "previous_training_time": 0.0,
        "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
    }
    return state


def write_huggingface(
    output: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    vocabulary: dict[str, int],
    merges: reading.Merges,
) -> Path:
    """The weights last: without them the folder is not a model."""
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "config.json", config)
    write_json(output / "generation_config.json", GENERATION)
    write_json(output / "vocab.json", vocabulary)
    write_merges(output / "merges.txt", merges)
    path = output / "model.safetensors"
    with atomic_file(path) as file:
        save_file(weights, file.name, metadata={"format": "pt"})
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(content, indent=None if len(content) > 100 else 2) + "\n").encode())


def write_merges(path: Path, merges: reading.Merges) -> None:
    lines = [VERSION_LINE, *(" ".join(pair) for pair in merges)]
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


def write_dictionaries(output: Path, symbols: list[str], sides: Iterable[str]) -> None:
    """dict.txt, and one for each side's language. Counts are not known; fairseq reads them but does not use them."""
    content = "".join(f"{symbol} 1\n" for symbol in symbols)
    for name in ("dict.txt", *(f"dict.{side}.txt" for side in sides)):
        with atomic_file(output / name) as file:
            file.write(content.encode())
