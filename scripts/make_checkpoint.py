#!/usr/bin/env python3
"""Write a fairseq checkpoint in the format of a released one, with random weights.

    python scripts/make_checkpoint.py --arch bart_large --output build/bart --sentences 8

    python scripts/make_checkpoint.py --release m2m100_418M --output build/m2m100 --sentences 8

makes a folder to try loading, generating and speed on without a download: the checkpoint, its dictionaries, and
binarised data, or features of speech. Keys, shapes and settings are those fairseq itself makes for the architecture.
The weights come from a seed and are exact in half precision.

With --legacy the file is like those released in 2019: the pickle format from before torch 1.6, the settings of fairseq
0.9 as `args`, meters as objects of the module `fairseq.meters`, and no output projection where it is the embedding. The
files of BART-large-CNN and -XSum are of that kind.
"""

import argparse
import ast
import pickle
import random
import shlex
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from fairseq_el.checkpoints.format import (
    atomic_file,
    configuration,
    current_state,
    optimizer_history,
    quiet,
    stock_task,
    training_args,
)
from fairseq_el.resources import USER_DIR
from random_models import TARGET_LENGTH, binarise, check_settings, enliven, random_lines
from released_layouts import RELEASES, make_release, task_words

TASKS = {"bart": "translation", "transformer": "translation", "transformer_lm": "language_modeling"}
# Rows of the embedding: BART's GPT-2 vocabulary, and the shared vocabulary of the WMT models.
VOCABULARIES = {"bart": 50_264, "transformer": 32_768, "transformer_lm": 50_264}
SPECIAL_SYMBOLS = 4  # fairseq's <s> <pad> </s> <unk>, which dictionary files don't list


# The settings fairseq 0.9 knew. --legacy files leave out what today's parser gives beyond them.
LEGACY_SETTINGS = """
    activation_dropout activation_fn adam_betas adam_eps adaptive_input adaptive_input_cutoff
    adaptive_input_factor adaptive_softmax_cutoff adaptive_softmax_dropout adaptive_softmax_factor
    add_bos_token arch attention_dropout best_checkpoint_metric bpe bucket_cap_mb
    character_embeddings clip_norm cpu criterion cross_self_attention curriculum data dataset_impl
    ddp_backend decoder_attention_heads decoder_embed_dim decoder_embed_path decoder_ffn_embed_dim
    decoder_input_dim decoder_layerdrop decoder_layers decoder_layers_to_keep decoder_learned_pos
    decoder_normalize_before decoder_output_dim device_id disable_validation distributed_backend
    distributed_init_method distributed_no_spawn distributed_port distributed_rank
    distributed_world_size dropout empty_cache_freq encoder_attention_heads encoder_embed_dim
    encoder_embed_path encoder_ffn_embed_dim encoder_layerdrop encoder_layers encoder_layers_to_keep
    encoder_learned_pos encoder_normalize_before end_learning_rate eval_bleu eval_bleu_args
    eval_bleu_detok eval_bleu_detok_args eval_bleu_print_samples eval_bleu_remove_bpe
    eval_tokenized_bleu fast_stat_sync find_unused_parameters fix_batches_to_gpus
    fixed_validation_seed force_anneal fp16 fp16_init_scale fp16_scale_tolerance fp16_scale_window
    future_target keep_interval_updates keep_last_epochs label_smoothing layernorm_embedding
    left_pad_source left_pad_target load_alignments log_format log_interval lr lr_scheduler
    max_epoch max_source_positions max_target_positions max_tokens max_tokens_valid max_update
    maximize_best_checkpoint_metric memory_efficient_fp16 min_loss_scale no_cross_attention
    no_epoch_checkpoints no_last_checkpoints no_progress_bar no_save no_save_optimizer_state
    no_scale_embedding no_token_positional_embeddings num_workers optimizer optimizer_overrides
    output_dictionary_size past_target pooler_activation_fn pooler_dropout power relu_dropout
    required_batch_size_multiple reset_dataloader reset_lr_scheduler reset_meters reset_optimizer
    restore_file sample_break_mode save_dir save_interval save_interval_updates seed self_target
    sentence_avg share_all_embeddings share_decoder_input_output_embed
    skip_invalid_size_inputs_valid_test source_lang target_lang task tensorboard_logdir
    threshold_loss_scale tie_adaptive_proj tie_adaptive_weights tokenizer tokens_per_sample
    total_num_update train_subset truncate_source update_freq upsample_primary use_bmuf use_old_adam
    user_dir valid_subset validate_interval warmup_updates weight_decay
""".split()
# Those that 0.9 spelt or typed differently.
LEGACY_VALUES = {
    "adam_betas": "(0.9, 0.999)", "ddp_backend": "no_c10d", "eval_bleu_args": None,
    "eval_bleu_detok_args": None, "lazy_load": False, "left_pad_source": "True",
    "left_pad_target": "False", "max_sentences": None, "max_sentences_valid": None, "min_lr": -1,
    "raw_text": False, "tensorboard_logdir": "", "upsample_primary": 1,
}  # fmt: skip


def make_checkpoint(
    arch: str,
    output: str | Path,
    *,
    seed: int = 1,
    vocab: int | None = None,
    mask: bool = False,
    dtype: str = "fp16",
    legacy: bool = False,
    settings: dict[str, Any] | None = None,
    sentences: int = 0,
    source_length: int | None = None,
) -> Path:
    """Write model.pt and dictionaries into the folder `output`; return the path of model.pt.

    vocab: rows of the embedding without `<mask>` (None: as in the released models of the family).
    mask: add `<mask>`, as the last entry of the dictionary and row of the embedding.
    dtype: "fp16" or "fp32", of the stored tensors; their values are the same.
    settings: the architecture's settings to change, for example {"encoder_layers": 2}.
    sentences, source_length: if sentences > 0, also binarised test data of random tokens; the
    length includes the end of sentence (None: as long as the model takes, at most 1,024).
    """
    output, settings = Path(output), settings or {}
    with quiet():
        family = family_of(arch)
        task = TASKS[family]
        check_settings(training_args(arch, task, 1, {}), settings)
        output.mkdir(parents=True, exist_ok=True)
        dictionary = write_dictionaries(output, task, vocab or VOCABULARIES[family], mask)
        args = training_args(arch, task, seed, settings)
        cfg = configuration(args)
        model = build_model(cfg, dictionary, seed)
    model.half()  # in place, so that tied weights stay tied; values that half precision can hold
    state_dict = model.state_dict() if dtype == "fp16" else model.float().state_dict()
    path = output / "model.pt"
    with atomic_file(path) as file:
        if legacy:
            save_legacy(legacy_state(args, state_dict, settings), file)
        else:
            torch.save(current_state(cfg, state_dict), file)
    if sentences > 0:
        with quiet():
            length = source_length or longest_source(args)
            words = dictionary.symbols[SPECIAL_SYMBOLS : len(dictionary) - mask]
            write_data(output, task, dictionary, words, sentences, length, seed)
    return path


def family_of(arch: str) -> str:
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    for family in TASKS:
        if arch in ARCH_MODEL_INV_REGISTRY[family]:
            return family
    known = ", ".join(sorted(name for family in TASKS for name in ARCH_MODEL_INV_REGISTRY[family]))
    raise ValueError(f"{arch} is not an architecture this script can make: use one of {known}")


def longest_source(args: argparse.Namespace) -> int:
    positions = (
        args.tokens_per_sample if args.task == "language_modeling" else args.max_source_positions
    )
    return min(1024, positions)


def write_dictionaries(output: Path, task: str, rows: int, mask: bool) -> Any:
    """A dictionary like BART's, whose entries are numbers of GPT-2 tokens, frequent ones first."""
    from fairseq.data import Dictionary

    entries = rows - SPECIAL_SYMBOLS
    if entries < 1:
        raise ValueError(
            f"a vocabulary of {rows} has no room for words: use {SPECIAL_SYMBOLS + 1} or more"
        )
    lines = [f"{number} {entries - number}\n" for number in range(entries)]
    if mask:
        lines.append("<mask> 0\n")
    sides = ("source.", "target.") if task == "translation" else ()
    for name in ("dict.txt", *(f"dict.{side}txt" for side in sides)):
        with atomic_file(output / name) as file:
            file.writelines(line.encode() for line in lines)
    return Dictionary.load(str(output / "dict.txt"))


# --- weights -------------------------------------------------------------------------------------


def build_model(cfg: Any, dictionary: Any, seed: int) -> nn.Module:
    task_class, _ = stock_task(cfg.task._name)
    torch.manual_seed(seed)
    model = task_class(cfg.task, dictionary, dictionary).build_model(cfg.model)
    with torch.no_grad():
        enliven(model)
    return model


# --- file formats --------------------------------------------------------------------------------


def legacy_state(
    args: argparse.Namespace, state_dict: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """What fairseq 0.8 and 0.9 saved, the optimiser's state left out as in released files."""
    known = {name: value for name, value in vars(args).items() if name in LEGACY_SETTINGS}
    return {
        "args": argparse.Namespace(**{**known, **LEGACY_VALUES, **settings}),
        "model": legacy_state_dict(state_dict),
        "optimizer_history": optimizer_history(),
        "extra_state": {
            "train_iterator": {"epoch": 6, "iterations_in_epoch": 0},
            "val_loss": 2.0,
            "train_meters": legacy_meters(),
            "best": 2.0,
        },
        "last_optimizer_state": None,
    }


def legacy_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """fairseq 0.9 projected with the embedding itself, or with a parameter `embed_out`."""
    old = OrderedDict(state_dict)
    projection = old.pop("decoder.output_projection.weight", None)
    embedding = old.get("decoder.embed_tokens.weight")
    tied_to = None if embedding is None else embedding.data_ptr()
    if projection is not None and projection.data_ptr() != tied_to:
        old["decoder.embed_out"] = projection
    return old


def legacy_meters() -> "OrderedDict[str, Any]":
    """The objects that fairseq 0.8 put into `extra_state`, with the attributes they had then."""
    from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter

    attributes = {
        AverageMeter: {"val": 2.0, "avg": 2.0, "sum": 40.0, "count": 20},
        TimeMeter: {"init": 0, "start": 0.0, "n": 20},
        StopwatchMeter: {"sum": 3600.0, "n": 20, "start_time": None},
    }
    names = {
        AverageMeter: "train_loss train_nll_loss valid_loss valid_nll_loss wpb bsz gnorm clip oom",
        TimeMeter: "wps ups wall",
        StopwatchMeter: "train_wall",
    }
    meters = OrderedDict()
    for kind, state in attributes.items():
        for name in names[kind].split():
            meters[name] = kind.__new__(kind)
            meters[name].__dict__.update(state)
    return meters


PythonPickler: Any = pickle._Pickler  # unlike the one in C, it lets subclasses write names


class LegacyPickler(PythonPickler):
    """Names the classes of `fairseq.logging.meters` after the module they were in up to 0.9."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__module__", None) == "fairseq.logging.meters":
            self.write(pickle.GLOBAL + f"fairseq.meters\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def save_legacy(state: dict[str, Any], file: IO[bytes]) -> None:
    module = types.SimpleNamespace(__name__="pickle", Pickler=LegacyPickler, dump=pickle.dump)
    torch.save(state, file, pickle_module=module, _use_new_zipfile_serialization=False)


# --- data ----------------------------------------------------------------------------------------


def write_data(output: Path, task: str, dictionary: Any, words: list[str], count: int, length: int, seed: int) -> None:
    """Random sentences of the dictionary's words, and if the task translates, shorter ones as their targets."""
    picks = random.Random(seed)
    if task == "language_modeling":
        binarise(dictionary, random_lines(words, count, length, picks), output / "test")
        return
    for side, tokens in (("source", length), ("target", TARGET_LENGTH)):
        binarise(dictionary, random_lines(words, count, tokens, picks), output / f"test.source-target.{side}")


# --- command line --------------------------------------------------------------------------------


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as encoder_layers=2")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a fairseq checkpoint like a released one, with random weights."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--arch", help="architecture, such as bart_large")
    model.add_argument("--release", choices=RELEASES, help="a multilingual or speech model, in its release's files")
    parser.add_argument("--output", required=True, type=Path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1, help="for the weights and data (default: 1)")
    parser.add_argument("--vocab", type=int, help="rows of the embedding without <mask> (default: as released models)")
    parser.add_argument("--mask", action="store_true", help="add <mask> to dictionary and embedding")
    parser.add_argument(
        "--precision", dest="dtype", choices=("fp16", "fp32"), default="fp16",
        help="of the stored weights (default: fp16)",
    )  # fmt: skip
    parser.add_argument("--legacy", action="store_true", help="write the file format and settings of fairseq 0.9")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", dest="settings",
        help="change a setting of the architecture, such as encoder_layers=2; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--sentences", type=int, default=0, help="also write a test set of this many random sentences (default: 0)"
    )
    parser.add_argument(
        "--source-length", type=int,
        help="tokens of each sentence; of speech, quarters of the frames (default: as many as the model takes, at most "
        "1024)",
    )  # fmt: skip
    return parser


def main() -> None:
    options = vars(command_line().parse_args())
    options["settings"] = dict(options["settings"])
    arch, release = options.pop("arch"), options.pop("release")
    print(f"making {arch or release} (a minute for the largest) ...", flush=True)
    try:
        path = make_released(release, **options) if release else make_checkpoint(arch, **options)
    except (AssertionError, OSError, ValueError) as error:  # fairseq asserts that settings fit
        sys.exit(f"make_checkpoint: error: {error}")
    print(f"wrote {path} ({path.stat().st_size / 1e6:,.1f} MB)")
    if options["sentences"]:
        print(f"try: {command_to_try(path, task_options(arch, release, path))}")


def make_released(release: str, *, mask: bool, legacy: bool, **options: Any) -> Path:
    if mask or legacy:
        raise ValueError("--mask and --legacy go with --arch: a release has its own dictionary and format")
    return make_release(release, **options)


def task_options(arch: str, release: str | None, path: Path) -> list[Any]:
    if release:
        return task_words(RELEASES[release], path.parent.resolve())
    if TASKS[family_of(arch)] == "language_modeling":
        return ["--task", "language_modeling", "--sample-break-mode", "complete", "--prefix-size", "5"]
    return []


def command_to_try(path: Path, options: list[Any]) -> str:
    file = path.resolve()
    words = ["fairseq-generate", file.parent, "--path", file, "--user-dir", USER_DIR, "--beam", "4", *options]
    return shlex.join(map(str, [*words, "--max-len-b", "20", "--batch-size", "8"]))


if __name__ == "__main__":
    main()
