"""Multilingual and speech models in the shapes and file layouts they were released in, with random weights. Run by
scripts/make_checkpoint.py --release."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_el.checkpoints.format import atomic_file, quiet
from fairseq_el.checkpoints.huggingface.vocabularies import (
    M2M100_LANGUAGES,
    MBART50_LANGUAGES,
    MBART_LANGUAGES,
    NLLB_LANGUAGES,
    SPECIAL_SYMBOLS,
)
from random_models import (
    TARGET_LENGTH,
    binarise,
    build_model,
    check_settings,
    enliven,
    random_lines,
    state_of,
    training_settings,
    write_speech,
)

FRAMES_PER_TOKEN = 4  # which the convolutions of s2t_transformer make one position of
FEATURES = {"input_channels": 1, "input_feat_per_channel": 80}


@dataclass(frozen=True)
class Release:
    """A released model: `task`, `arch` and `settings` are what it was trained with."""

    arch: str
    rows: int  # of the embedding, `<mask>` aside
    settings: dict[str, Any]
    task: str = "translation_multi_simple_epoch"
    task_options: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    pair: tuple[str, str] = ("", "")
    more_symbols: list[str] = field(default_factory=list)  # after the languages
    fixed_dictionary: str | None = None  # the file with all symbols, if not the task adds languages to the data's
    language_list: str | None = None

    @property
    def is_speech(self) -> bool:
        return self.task == "speech_to_text"


PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
M2M_SETTINGS = {
    **PRE_NORM, "share_all_embeddings": True, "encoder_layers": 12, "decoder_layers": 12,
    "max_source_positions": 1024, "max_target_positions": 1024,
}  # fmt: skip
S2T_SETTINGS = {
    **FEATURES, "share_decoder_input_output_embed": True, "max_source_positions": 6000, "max_target_positions": 1024,
}  # fmt: skip
LANGUAGE_TOKENS = ["--encoder-langtok", "src", "--decoder-langtok"]
RELEASES = {
    "m2m100_418M": Release(
        "transformer_wmt_en_de_big", 128_112, M2M_SETTINGS, task_options=LANGUAGE_TOKENS,
        languages=M2M100_LANGUAGES, pair=("en", "fr"), more_symbols=[f"madeupword{n:04}" for n in range(8)],
        fixed_dictionary="model_dict.128k.txt",
    ),
    "nllb200_600M": Release(
        "transformer_wmt_en_de_big", 256_206, {**M2M_SETTINGS, "max_source_positions": 512,
                                               "max_target_positions": 512},
        task_options=LANGUAGE_TOKENS, languages=NLLB_LANGUAGES, pair=("eng_Latn", "fra_Latn"),
        more_symbols=["<MINED_DATA>", "<MMT_BT_DATA>", "<SMT_BT_DATA>"], fixed_dictionary="dictionary.txt",
        language_list="langs.txt",
    ),
    "mbart50": Release(
        "mbart_large", 250_053, {**PRE_NORM, "layernorm_embedding": True},
        task_options=[*LANGUAGE_TOKENS, "--lang-tok-style", "mbart"],
        languages=MBART_LANGUAGES + MBART50_LANGUAGES, pair=("en_XX", "de_DE"), language_list="ML50_langs.txt",
    ),
    **{
        name: Release(name, 10_000, S2T_SETTINGS, task="speech_to_text")
        for name in ("s2t_transformer_s", "s2t_transformer_m", "s2t_transformer_l")
    },
}  # fmt: skip


def make_release(
    name: str, output: Path, *, seed: int, vocab: int | None, dtype: str, settings: dict[str, Any], sentences: int,
    source_length: int | None,
) -> Path:  # fmt: skip
    """Write model.pt and what generation with it needs into the folder `output`; return the path of model.pt."""
    release = RELEASES[name]
    output.mkdir(parents=True, exist_ok=True)
    with quiet():
        pieces = write_dictionaries(release, output, vocab or release.rows)
        command = [output, "--arch", release.arch, *task_words(release, output)]
        check_settings(training_settings(command, release.settings), settings)
        args = training_settings(command, {**release.settings, **settings})
        longest = (args.max_source_positions - 1) // (FRAMES_PER_TOKEN if release.is_speech else 1)
        write_data(release, output, pieces, sentences, source_length or min(1024, longest), seed)
        model = build_model(args, seed)
    with torch.no_grad():
        enliven(model)
    model.half()  # in place, so that tied weights stay tied; values that half precision can hold
    with atomic_file(output / "model.pt") as file:
        torch.save(state_of(args, (model if dtype == "fp16" else model.float()).state_dict()), file)
    return output / "model.pt"


def task_words(release: Release, folder: Path) -> list[Any]:
    """What the command lines of fairseq-train and fairseq-generate have in common."""
    words: list[Any] = ["--task", release.task, *release.task_options]
    if release.is_speech:
        return words
    words += ["--source-lang", release.pair[0], "--target-lang", release.pair[1]]
    words += ["--lang-pairs", folder / "language_pairs.txt"]
    if release.language_list:
        words += ["--lang-dict", folder / release.language_list]
    if release.fixed_dictionary:
        words += ["--fixed-dictionary", folder / release.fixed_dictionary]
    return words


def write_dictionaries(release: Release, folder: Path, rows: int) -> list[str]:
    """And the lists of languages. Returns the pieces that sentences are made of."""
    taken = len(SPECIAL_SYMBOLS) + len(release.languages) + len(release.more_symbols)
    if rows <= taken:
        raise ValueError(f"a vocabulary of {rows} has no room for words: use {taken + 1} or more")
    pieces = [str(number) for number in range(rows - taken)]
    files = {f"dict.{language}.txt": pieces for language in release.pair} if release.languages else {"dict.txt": pieces}
    if release.fixed_dictionary:
        tokens = [f"__{language}__" for language in release.languages]
        files[release.fixed_dictionary] = pieces + tokens + release.more_symbols
    for name, symbols in files.items():
        (folder / name).write_text("".join(f"{symbol} 1\n" for symbol in symbols))
    if release.languages:
        english = release.pair[0]
        others = [code for code in release.languages if code != english]
        pairs = [f"{english}-{code}" for code in others] + [f"{code}-{english}" for code in others]
        (folder / "language_pairs.txt").write_text(",".join(pairs))
    if release.language_list:
        (folder / release.language_list).write_text("\n".join(release.languages) + "\n")
    return pieces


def write_data(release: Release, folder: Path, pieces: list[str], count: int, length: int, seed: int) -> None:
    """A set `test`: binarised sentences with targets, or features with transcripts."""
    picks = random.Random(seed)
    targets = random_lines(pieces, count, TARGET_LENGTH, picks)
    if release.is_speech:
        noise = np.random.default_rng(seed)
        samples = [noise.standard_normal((length * FRAMES_PER_TOKEN, 80)) for _ in targets]
        write_speech(folder, samples, targets, FEATURES)
        return
    from fairseq.data import Dictionary

    for language, lines in zip(release.pair, (random_lines(pieces, count, length, picks), targets), strict=True):
        dictionary = Dictionary.load(str(folder / f"dict.{language}.txt"))
        binarise(dictionary, lines, folder / f"test.{'-'.join(release.pair)}.{language}")
