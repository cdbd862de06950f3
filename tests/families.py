"""A tiny checkpoint, data and command line for each family of fairseq models that generates with a beam search."""

import random
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask
from fairseq_cli import generate

from fairseq_el.plugin.tasks import ELGeneration

SENTENCES = 13
WORDS = [f"w{n}" for n in range(40)]
SMALL = [
    word
    for side in ("encoder", "decoder")
    for word in (f"--{side}-layers", 2, f"--{side}-embed-dim", 32, f"--{side}-ffn-embed-dim", 48,
                 f"--{side}-attention-heads", 4)
]  # fmt: skip


@dataclass
class Family:
    """`task` and `model` are options of a command line: the first for training and generation, the others for one."""

    name: str
    task: list
    model: list
    search: list = field(default_factory=list)
    languages: tuple[str, str] | None = ("en", "de")
    speech: str | None = None  # what is in the files: "fbank" or "waveform"
    tags: list = field(default_factory=list)  # words of the dictionary beside the usual


FAMILIES = {
    "m2m-100": Family(
        "translation_multi_simple_epoch",
        ["--langs", "en,de,fr", "--lang-pairs", "en-de", "--encoder-langtok", "src", "--decoder-langtok"],
        ["--arch", "transformer_wmt_en_de_big", *SMALL, "--encoder-normalize-before", "--decoder-normalize-before",
         "--share-all-embeddings", "--encoder-layerdrop", 0.05, "--decoder-layerdrop", 0.05],
    ),
    "wmt21": Family(
        "translation_multi_simple_epoch",
        ["--langs", "en,de", "--lang-pairs", "en-de", "--encoder-langtok", "tgt", "--decoder-langtok",
         "--lang-tok-replacing-bos-eos"],
        ["--arch", "transformer", *SMALL, "--share-all-embeddings"],
    ),
    "mbart-50": Family(
        "translation_multi_simple_epoch",
        ["--langs", "en_XX,de_DE", "--lang-pairs", "en_XX-de_DE", "--encoder-langtok", "src", "--decoder-langtok",
         "--lang-tok-style", "mbart"],
        ["--arch", "mbart_large", *SMALL, "--layernorm-embedding"],
        languages=("en_XX", "de_DE"),
    ),
    "mbart-25": Family(
        "translation_from_pretrained_bart",
        ["--langs", "en_XX,de_DE", "--prepend-bos"],
        ["--arch", "mbart_large", *SMALL, "--layernorm-embedding"],
        languages=("en_XX", "de_DE"),
    ),
    "multilingual_translation": Family(
        "multilingual_translation",
        ["--lang-pairs", "en-de,de-en", "--encoder-langtok", "src", "--decoder-langtok"],
        ["--arch", "multilingual_transformer", *SMALL, "--share-encoders"],
    ),
    "semisupervised_translation": Family(
        "semisupervised_translation",
        ["--lang-pairs", "en-de,de-en"],
        ["--arch", "multilingual_transformer", *SMALL, "--share-encoders", "--share-decoders"],
    ),
    "online_backtranslation": Family(
        "online_backtranslation",
        ["--mono-langs", "en,de", "--valid-lang-pairs", "en-de"],
        ["--arch", "transformer", *SMALL, "--share-all-embeddings"],
    ),
    "xlm": Family(
        "translation_from_pretrained_xlm",
        [],
        ["--arch", "transformer_from_pretrained_xlm", *SMALL],
    ),
    "translation_moe": Family(
        "translation_moe",
        ["--method", "hMoEup", "--num-experts", 3],
        ["--arch", "transformer", *SMALL, "--share-all-embeddings"],
        search=["--gen-expert", 2],
    ),
    "denoising": Family(
        "denoising",
        ["--tokens-per-sample", 40, "--sample-break-mode", "eos", "--mask", 0.3, "--mask-length", "subword"],
        ["--arch", "bart_base", *SMALL, "--share-all-embeddings"],
        languages=None,
    ),
    "multilingual_denoising": Family(
        "multilingual_denoising",
        ["--tokens-per-sample", 40, "--sample-break-mode", "eos", "--mask", 0.3, "--langs", "en,de",
         "--add-lang-token"],
        ["--arch", "mbart_base", *SMALL, "--share-all-embeddings"],
        languages=None,
    ),
    "s2t_transformer": Family(
        "speech_to_text", [], ["--arch", "s2t_transformer_xs", *SMALL, "--conv-channels", 24], speech="fbank",
        languages=None,
    ),
    "s2t_conformer": Family(
        "speech_to_text", [], ["--arch", "s2t_conformer", *SMALL, "--conv-channels", 24, "--attn-type", "espnet"],
        speech="fbank", languages=None,
    ),
    "xm_transformer": Family(
        "speech_to_text",
        [],
        ["--arch", "xm_transformer", *SMALL],
        speech="waveform", languages=None,
    ),
}  # fmt: skip


# ---- files


def write_data(family: Family, folder: Path) -> None:
    """A set `test` of raw text, or of features, with its dictionaries."""
    folder.mkdir()
    picks = random.Random(4)
    lines = [" ".join(picks.choices(WORDS, k=picks.randint(1, 12))) for _ in range(SENTENCES)]
    dictionary = "".join(f"{word} 1\n" for word in [*WORDS, *family.tags])
    (folder / "dict.txt").write_text(dictionary)
    if family.speech is not None:
        write_speech(family.speech, folder, lines)
        return
    if family.languages is None:
        (folder / "test").write_text("\n".join(lines) + "\n")
        for language in ("en", "de"):
            (folder / language).mkdir()
            (folder / language / "test").write_text("\n".join(lines[: SENTENCES // 2]) + "\n")
        return
    source, target = family.languages
    for pair in (f"{source}-{target}", f"{target}-{source}"):
        for language in family.languages:
            (folder / f"test.{pair}.{language}").write_text("\n".join(lines) + "\n")
            (folder / f"dict.{language}.txt").write_text(dictionary)


def write_speech(kind: str, folder: Path, lines: list[str]) -> None:
    noise = np.random.default_rng(6)
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for number, line in enumerate(lines):
        shape = (int(noise.integers(30, 90)), 80) if kind == "fbank" else (int(noise.integers(3000, 6000)),)
        np.save(folder / f"{number}.npy", noise.standard_normal(shape).astype(np.float32))
        rows.append(f"{number}\t{number}.npy\t{shape[0]}\t{line}\tspk")
    (folder / "test.tsv").write_text("\n".join(rows) + "\n")
    (folder / "config.yaml").write_text(
        f"vocab_filename: dict.txt\naudio_root: {folder}\n"
        + ("input_channels: 1\ninput_feat_per_channel: 80\n" if kind == "fbank" else "use_audio_input: true\n")
    )


def stock_task(name: str) -> type[FairseqTask]:
    return next(kind for kind in TASK_REGISTRY[name].__mro__ if kind is not ELGeneration and kind.__module__.split(".")[0] != "fairseq_el")


def task_words(family: Family, folder: Path) -> list[str]:
    words = [folder, "--task", family.name, *family.task]
    if family.speech is None:
        words += ["--dataset-impl", "raw"]
    if family.languages is not None:
        words += ["--source-lang", family.languages[0], "--target-lang", family.languages[1]]
    return [str(word) for word in words]


def make_checkpoint(family: Family, folder: Path) -> Path:
    """As fairseq-train saves it, with weights that are random but decided."""
    words = task_words(family, folder) + [str(word) for word in family.model]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(args)
    task = stock_task(family.name).setup_task(cfg.task)
    torch.manual_seed(3)
    model = task.build_model(cfg.model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    state = {
        "args": args, "model": model.state_dict(), "extra_state": {}, "last_optimizer_state": None,
        "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam",
                               "lr_scheduler_state": {}, "num_updates": 1}],
    }  # fmt: skip
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


# ---- fairseq-generate in this process


def fairseq_generate(words: list, results: Path, monkeypatch, stock: bool) -> dict[int, list]:
    """Hypotheses of the command line by sentence, with their scores: [(text, score), ...]."""
    with monkeypatch.context() as patch:
        if stock:
            for name in list(TASK_REGISTRY):
                patch.setitem(TASK_REGISTRY, name, stock_task(name))
        patch.setattr(sys, "argv", ["fairseq-generate", *map(str, words), "--results-path", str(results)])
        generate.cli_main()
    found: dict[int, list] = {}
    for line in next(results.glob("generate-*.txt")).read_text(encoding="utf-8").splitlines():
        if line.startswith("H-"):
            number, score, text = line.split("\t")
            found.setdefault(int(number[2:]), []).append((text, float(score)))
    return found
