"""Reads the files of a Hugging Face folder. Nothing in them is run."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_el import errors
from fairseq_el.errors import UserError

Merges = list[tuple[str, str]]

CONFIG = "config.json"
BPE_FILES = ("vocab.json", "merges.txt")
VOCABULARY = BPE_FILES[0]
SENTENCEPIECE = "sentencepiece.bpe.model"
MULTILINGUAL = ("mbart", "m2m_100")
"""Types of models (`model_type`) with SentencePiece and codes of languages."""
TOKENIZER = "tokenizer.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: copy or download it again")
    return content


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: put the model's {path.name} there") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: copy or download it again") from error


# --- tokenizers ----------------------------------------------------------------------------------


def find_tokenizer(folder: Path, kind: str) -> tuple[Path, ...]:
    """The files that turn text into tokens: those of the slow tokenizer, else tokenizer.json.

    folder: also the one file of a tokenizer. kind: the `model_type` in config.json.
    """
    if folder.is_file():
        return (folder,)
    names = (SENTENCEPIECE,) if kind in MULTILINGUAL else BPE_FILES
    files = tuple(folder / name for name in names)
    if not any(file.is_file() for file in files) and (folder / TOKENIZER).is_file():
        return (folder / TOKENIZER,)
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"{folder / missing[0]} does not exist: put the model's {' and '.join(names)}, or its {TOKENIZER}, there"
        )
    return files


def read_bpe(files: tuple[Path, ...]) -> tuple[dict[str, int], Merges]:
    """Indices of tokens, and the merges that make them. files: vocab.json and merges.txt, or tokenizer.json."""
    if len(files) == 2:
        return checked_vocabulary(read_json(files[0]), files[0]), read_merges(files[1])
    model, added = read_tokenizer(files[0])
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise UserError(f"{files[0]} is not of byte-pair encoding, as those of GPT-2 and BART are: use the model's own")
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ()))
    return checked_vocabulary({**model["vocab"], **added}, files[0]), [as_pair(pair, files[0]) for pair in pairs]


def read_pieces(path: Path) -> dict[str, int]:
    """Indices of the tokens in the tokenizer.json of a SentencePiece model, of either kind: unigram, as mBART's, or
    byte-pair encoding, as NLLB's."""
    model, added = read_tokenizer(path)
    pieces = model.get("vocab")
    if isinstance(pieces, dict):
        return checked_vocabulary(pieces | added, path)
    if not isinstance(pieces, list) or not all(isinstance(piece, list) and len(piece) == 2 for piece in pieces):
        raise UserError(f"{path} is not of SentencePiece, as those of mBART are: use the model's own")
    return checked_vocabulary({piece: index for index, (piece, _) in enumerate(pieces)} | added, path)


def read_tokenizer(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The `model` of a tokenizer.json, and the indices of added tokens."""
    content = read_json(path)
    model, tokens = content.get("model"), content.get("added_tokens") or []
    try:
        return dict(model or {}), {token["content"]: token["id"] for token in tokens}
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer's file: copy or download it again") from error


def checked_vocabulary(vocabulary: dict[str, Any], path: Path) -> dict[str, int]:
    if all(type(index) is int and index >= 0 for index in vocabulary.values()):
        return vocabulary
    raise UserError(f"{path} is not a vocabulary with an index for each token: copy or download it again")


def read_merges(path: Path) -> Merges:
    lines = read_text(path).split("\n")  # not splitlines: pieces hold characters that it splits at
    if lines[0].startswith("#version"):
        del lines[0]
    return [as_pair(line.split(" "), path) for line in lines if line.strip()]


def as_pair(words: Any, path: Path) -> tuple[str, str]:
    if not isinstance(words, list) or len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise UserError(f"{path} has an entry {str(words)[:80]}, where two pieces belong: get it again")
    return words[0], words[1]


# --- weights -------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one or several of safetensors, or a pickled one."""
    single, index, pickled = (
        folder / name for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    )
    if single.exists():
        return [single]
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise UserError(f"{index} has no weight_map of files by weight: copy or download it again")
        files = [folder / name for name in sorted(set(shards.values()))]
        if any(file.parent != folder for file in files):
            raise UserError(f"{index} names files outside its folder: do not use it, get it from its source")
        for file in files:
            if not file.is_file():
                raise UserError(f"{file} does not exist: put the model's {file.name} there")
        return files
    if pickled.exists():
        return [pickled]
    raise UserError(
        f"{folder} has no weights, neither {single.name}, {index.name} nor {pickled.name}: put the model's there"
    )


def open_weights(folder: Path) -> Mapping[str, Tensor]:
    files = weight_files(folder)
    return SafeTensors(files) if files[0].suffix == ".safetensors" else read_pickled(files[0])


class SafeTensors(Mapping[str, Tensor]):
    """The tensors of one or several files, memory-mapped when they are asked for.

    Each has a mapping of its own, which ends with the tensor: pages of a shared one would stay resident, and add up
    to a second copy of the weights.
    """

    def __init__(self, paths: list[Path]):
        self.file_of: dict[str, Path] = {}
        for path in paths:
            with open_safetensors(path) as file:
                self.file_of.update(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> Tensor:
        with open_safetensors(self.file_of[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(errors.unreadable(str(path))) from error


def read_pickled(path: Path) -> Mapping[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise UserError(errors.explain(error) or errors.unreadable(str(path))) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{path} holds other things than named weights: get it from its source")
    return tensors
