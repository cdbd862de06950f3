"""Converts checkpoints from and to Hugging Face's format: `fairseq-el convert`."""

import argparse
import json
import logging
import shlex
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fairseq_el import errors
from fairseq_el.checkpoints import huggingface, loading
from fairseq_el.checkpoints.format import configuration, current_state, quiet, training_args, whole
from fairseq_el.errors import UserError
from fairseq_el.resources import USER_DIR

PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}
VERSION_LINE = "#version: 0.2"  # the first of a file of merges
Merges = list[tuple[str, str]]


def convert(source: Path, output: Path, dtype: torch.dtype | None = None) -> Path:
    """Writes the folder `output` from a Hugging Face folder; returns the path of the checkpoint.

    dtype: of the weights (None: half precision if they are stored so, else single).
    """
    config = read_json(source / "config.json")
    kind = config.get("model_type")
    if kind not in ("bart", "gpt2"):
        raise UserError(f"{source} holds a model of type {kind!r}: only gpt2 and bart can be converted")
    vocabulary, merges = read_vocabulary(source)
    weights = open_weights(source)
    rows = huggingface.setting(config, "vocab_size")
    if kind == "gpt2":
        state_dict, settings = huggingface.gpt2_from_huggingface(weights, config, dtype)
        end = huggingface.end_of_text({**huggingface.GPT2_DEFAULTS, **config}, rows)
        symbols = huggingface.gpt2_symbols(vocabulary, rows, end)
        encoder = vocabulary
        arch, task = "transformer_lm_gpt", "language_modeling"
    else:
        state_dict, settings = huggingface.bart_from_huggingface(weights, config, dtype)
        symbols = huggingface.bart_symbols(vocabulary, merges, rows)
        encoder = huggingface.gpt2_encoder(merges)
        arch, task = "bart_large", "translation"
    output.mkdir(parents=True, exist_ok=True)
    write_dictionaries(output, symbols, task)
    write_json(output / "encoder.json", encoder)
    write_merges(output / "vocab.bpe", merges)
    path = output / "model.pt"
    with quiet():
        cfg = configuration(training_args(arch, task, seed=1, settings=settings))
    with whole(path) as file:
        torch.save(untrained(current_state(cfg, state_dict)), file)
    return path


def untrained(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint from which training would start anew."""
    state["optimizer_history"][-1]["num_updates"] = 0
    state["extra_state"] = {
        "metrics": OrderedDict(),
        "previous_training_time": 0.0,
        "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
    }
    return state


def convert_back(source: Path, output: Path, dtype: torch.dtype | None = None) -> Path:
    """Writes a Hugging Face folder from a fairseq BART; returns the path of its weights.

    source: a checkpoint with dict.txt, encoder.json and vocab.bpe in the same folder, or the folder.
    """
    path = source / "model.pt" if source.is_dir() else source
    state = loading.load(path)
    args = state.get("args") or state["cfg"]["model"]
    args = argparse.Namespace(**args) if isinstance(args, dict) else args
    weights, config = huggingface.bart_to_huggingface(state["model"], args)
    dictionary = read_dictionary(path.parent)
    loading.check_dictionary(state["model"], "encoder", dictionary)
    vocabulary = huggingface.bart_vocabulary(dictionary.symbols, read_json(path.parent / "encoder.json"))
    merges = read_merges(path.parent / "vocab.bpe")
    dtype = dtype or huggingface.precision_of(state["model"])
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    weights = storable(weights, config["tie_word_embeddings"], dtype)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "config.json", config)
    write_json(output / "generation_config.json", huggingface.GENERATION)
    write_json(output / "vocab.json", vocabulary)
    write_merges(output / "merges.txt", merges)
    path = output / "model.safetensors"
    with whole(path) as file:
        save_file(weights, file.name, metadata={"format": "pt"})
    return path


def storable(weights: dict[str, Tensor], is_tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights as safetensors has them: no memory shared, tied tables once."""
    ties = (huggingface.ENCODER_WORDS, huggingface.DECODER_WORDS, "lm_head.weight")
    kept, seen = {}, set()
    for name, tensor in weights.items():
        if is_tied and name.removeprefix("model.") in ties:
            continue
        tensor = huggingface.in_precision(tensor, dtype, name).contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() > tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        kept[name] = tensor
    return kept


# --- reading -------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not what its name says: copy or download it again")
    return content


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: put the model's {path.name} there") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: copy or download it again") from error


def read_merges(path: Path) -> Merges:
    lines = read_text(path).split("\n")  # not splitlines: pieces hold characters that it splits at
    if lines[0].startswith("#version"):
        del lines[0]
    return [as_pair(line.split(" "), path) for line in lines if line.strip()]


def as_pair(words: list[str], path: Path) -> tuple[str, str]:
    if len(words) != 2:
        raise UserError(f"{path} has a line or entry {words}, where two pieces belong: get it again")
    return words[0], words[1]


def read_vocabulary(folder: Path) -> tuple[dict[str, int], Merges]:
    """Numbers of pieces, and the merges they come from; from either form Transformers writes."""
    combined = folder / "tokenizer.json"
    if (folder / "vocab.json").exists() or not combined.exists():
        return read_json(folder / "vocab.json"), read_merges(folder / "merges.txt")
    tokenizer = read_json(combined)
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE":
        raise UserError(f"{combined} is not of byte-pair encoding, as those of GPT-2 and BART are")
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    return {**model["vocab"], **added}, [as_pair(pair, combined) for pair in pairs]


def read_dictionary(folder: Path) -> Any:
    """The one dictionary of both languages, under any of fairseq's names."""
    from fairseq.data import Dictionary

    paths = sorted(folder.glob("dict*.txt"))
    if not paths:
        raise UserError(f"{folder} has no dict.txt: put the one that belongs to the checkpoint there")
    dictionaries = [Dictionary.load(str(path)) for path in paths]
    for path, dictionary in zip(paths, dictionaries, strict=True):
        if dictionary != dictionaries[0]:
            raise UserError(
                f"{paths[0]} and {path} are different, and Transformers' BART has one vocabulary: "
                "leave the one that belongs to the checkpoint"
            )
    return dictionaries[0]


def open_weights(folder: Path) -> Mapping[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    whole, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if whole.exists():
        return SafeTensors([whole])
    if index.exists():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        return SafeTensors([folder / shard for shard in shards])
    if pickled.exists():
        return read_pickled(pickled)
    raise UserError(f"{folder} has no weights: neither {whole.name}, {index.name} nor {pickled.name}")


class SafeTensors(Mapping[str, Tensor]):
    """The tensors of one or several files, which stay on the disk until they are asked for."""

    def __init__(self, paths: list[Path]):
        self.file_of = {}
        for path in paths:
            file = open_safetensors(path)
            self.file_of.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        return self.file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: put the model's {path.name} there") from error
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


# --- writing -------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    with whole(path) as file:
        file.write((json.dumps(content, indent=None if len(content) > 100 else 2) + "\n").encode())


def write_merges(path: Path, merges: Merges) -> None:
    lines = [VERSION_LINE, *(" ".join(pair) for pair in merges)]
    with whole(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


def write_dictionaries(output: Path, symbols: list[str], task: str) -> None:
    """The counts are not known; fairseq reads them, but has no use for them here."""
    content = "".join(f"{symbol} 1\n" for symbol in symbols)
    sides = ("source.", "target.") if task == "translation" else ()
    for side in ("", *sides):
        with whole(output / f"dict.{side}txt") as file:
            file.write(content.encode())


# --- command line --------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    """args: of `options.convert`."""
    logging.basicConfig(format="convert: warning: %(message)s", level="WARNING", force=True)
    print(f"converting {args.source} (a minute for the largest) ...", flush=True)
    direction = convert_back if args.reverse else convert
    path = direction(args.source, args.output, PRECISIONS.get(args.precision))
    print(f"wrote {path} ({path.stat().st_size / 1e6:,.1f} MB) and its vocabulary")
    if not args.reverse:
        print(f"try: {command_to_try(path)}")


def command_to_try(path: Path) -> str:
    path = path.resolve()
    folder = path.parent
    words = ["fairseq-interactive", folder, "--path", path, "--user-dir", USER_DIR, "--bpe", "gpt2"]
    words += ["--gpt2-encoder-json", folder / "encoder.json", "--gpt2-vocab-bpe", folder / "vocab.bpe"]
    if (folder / "dict.source.txt").exists():
        words += ["-s", "source", "-t", "target", "--beam", "4", "--max-len-b", "100"]
    else:
        words += ["--task", "language_modeling", "--beam", "1", "--max-new-tokens", "30"]
    return shlex.join(str(word) for word in words)
