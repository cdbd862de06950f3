"""What checkpoints with random weights are made of, for every task of fairseq: settings as its parser gives them, a
model, weights, binarised sentences, and archives of speech. Shared by scripts and tests."""

import argparse
import io
import math
import random
import zipfile
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from fairseq_el.checkpoints.format import optimizer_history

TARGET_LENGTH = 16

# --- settings ------------------------------------------------------------------------------------


def training_settings(words: Iterable[Any], settings: dict[str, Any] | None = None) -> Namespace:
    """What fairseq-train makes of a command line. `settings` are defaults, since it can't switch booleans off."""
    from fairseq import options

    args = options.parse_args_and_arch(
        options.get_training_parser(),
        [str(word) for word in words],
        modify_parser=lambda parser: parser.set_defaults(**(settings or {})),
    )
    for name in [name for name in vars(args) if name.startswith("el_")]:  # of our plugin, if it is loaded
        delattr(args, name)
    return args


def check_settings(args: Namespace, settings: Iterable[str]) -> None:
    """Complain about misspelt settings, which fairseq would take for an extension's."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY[args.arch].add_args(parser)
    unknown = sorted(set(settings) - set(vars(parser.parse_args([])) | vars(args)))
    if unknown:
        raise ValueError(f"{args.arch} has no setting {', '.join(unknown)}: check the spelling")


# --- models --------------------------------------------------------------------------------------


def stock_task(name: str) -> Any:
    """The class that our plugin derives its own from."""
    from fairseq.tasks import TASK_REGISTRY

    return next(kind for kind in TASK_REGISTRY[name].__mro__ if not kind.__module__.startswith("fairseq_el"))


def build_model(args: Namespace, seed: int) -> nn.Module:
    """As stock fairseq initialises it. The task reads its dictionaries from the folder `args.data`."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    cfg = convert_namespace_to_omegaconf(args)
    task = stock_task(args.task).setup_task(cfg.task)
    torch.manual_seed(seed)
    return task.build_model(cfg.model)


def state_of(args: Namespace, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What fairseq saves, with settings as the releases of these tasks have them."""
    return {
        "args": args, "model": weights, "extra_state": {}, "optimizer_history": optimizer_history(),
        "last_optimizer_state": None,
    }  # fmt: skip


def enliven(model: Any) -> None:
    """Gives a new model weights with which different sources have different outputs.

    A freshly initialised model attends to everything alike and answers every source with one repeated token, which
    hides mistakes and makes beams tie. These weights attend to few positions of the source and prefer some tokens.
    Everything else adds so little to the residual stream that positions stay distinct and rounding errors small
    through many layers, so that two correct implementations agree on the output.
    """
    blocks = [getattr(model, side) for side in ("encoder", "decoder") if hasattr(model, side)]
    context = "encoder_attn" if len(blocks) == 2 else "self_attn"  # what is said depends on this
    for block in blocks:
        layers = block.layers if hasattr(block, "layers") else block.transformer_layers  # of speech
        for name, weight in layers.named_parameters():
            if weight.dim() == 2:
                is_context = context in name and block is model.decoder
                nn.init.xavier_uniform_(weight, gain_of(name, is_context, len(layers)))
    output = getattr(model.decoder, "output_projection", None)
    if not isinstance(output, nn.Linear):  # adaptive softmax
        return
    logit_scale = output.weight.std() * math.sqrt(output.in_features)
    embedded_as_is = model.decoder.embed_scale == 1.0  # else tokens would drown the positions
    if embedded_as_is or output.weight is not getattr(model.decoder.embed_tokens, "weight", None):
        output.weight.mul_(3 / logit_scale)
    elif len(blocks) == 2 and model.decoder.layer_norm is not None:
        # Most of the last position is the embedding of its token, which with other signs doesn't ask for itself.
        norm = model.decoder.layer_norm.weight
        norm.mul_(3 / logit_scale * (2 * torch.randint(2, norm.shape) - 1))
    for block in blocks:
        tables = (getattr(block, "embed_tokens", None), block.embed_positions)
        if all(isinstance(table, nn.Embedding) for table in tables):
            tokens, positions = (table.weight for table in tables)
            positions.mul_(3 * block.embed_scale * tokens.std() / positions.std())


def gain_of(name: str, is_context: bool, layers: int) -> float:
    if "q_proj" in name or "k_proj" in name:
        return 2.0 if is_context else 1.0
    if "out_proj" in name or "fc2" in name:  # what a branch adds to the residual stream
        return (2.4 if is_context else 0.6) / math.sqrt(layers)
    return 1.0


# --- data ----------------------------------------------------------------------------------------


def random_lines(words: list[str], count: int, length: int, picks: random.Random) -> list[str]:
    """length: tokens of each, with the end of sentence."""
    return [" ".join(picks.choices(words, k=length - 1)) for _ in range(count)]


def binarise(dictionary: Any, lines: list[str], prefix: Path) -> None:
    """As fairseq-preprocess does."""
    from fairseq.data import indexed_dataset

    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(dictionary))
    for line in lines:
        builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
    builder.finalize(f"{prefix}.idx")


def write_speech(folder: Path, samples: list[np.ndarray], lines: list[str], config: dict[str, Any]) -> None:
    """A set `test` of features or waveforms, and the config.yaml with which the task finds it and dict.txt."""
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for file, sample, line in zip(write_zip(folder / "audio.zip", samples), samples, lines, strict=True):
        rows.append(f"{file}\t{file}\t{len(sample)}\t{line}\tspk")
    (folder / "test.tsv").write_text("\n".join(rows) + "\n")
    places = {"vocab_filename": "dict.txt", "audio_root": str(folder.resolve())}
    (folder / "config.yaml").write_text(yaml.safe_dump({**places, **config}))


def write_zip(path: Path, samples: list[np.ndarray]) -> list[str]:
    """As fairseq's scripts pack features; returns the name by which it reads each: archive, offset and size."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for number, sample in enumerate(samples):
            buffer = io.BytesIO()
            np.save(buffer, sample.astype(np.float32))
            archive.writestr(f"{number}.npy", buffer.getvalue())
    header = 30  # bytes, before a name
    return [f"{path.name}:{i.header_offset + header + len(i.filename)}:{i.file_size}" for i in archive.infolist()]
