"""A tiny checkpoint, data and command line for each family of fairseq models that generates with a beam search."""

import random
import sys
import wave
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.tasks import TASK_REGISTRY
from fairseq_cli import generate

import fairseq_el
from random_models import binarise, build_model, state_of, stock_task, training_settings, write_speech

SENTENCES = 13
RESULTS = ["--num-workers", "0", "--results-path"]  # workers take longer to start than these sets
WORDS = [f"w{n}" for n in range(40)]
SMALL_ENCODER, SMALL_DECODER = (
    [f"--{side}-layers", 2, f"--{side}-embed-dim", 32, f"--{side}-ffn-embed-dim", 48, f"--{side}-attention-heads", 4]
    for side in ("encoder", "decoder")
)
SMALL = SMALL_ENCODER + SMALL_DECODER
WAV2VEC = [
    "--task", "audio_pretraining", "--arch", "wav2vec2", *SMALL_ENCODER, "--final-dim", 16, "--latent-vars", 4,
    "--conv-feature-layers", "[(16, 10, 5)] + [(16, 3, 2)] * 3", "--conv-pos", 8, "--conv-pos-groups", 4,
]  # fmt: skip


@dataclass
class Family:
    """`task` and `model` are options of a command line: the first for training and generation, the others for one."""

    name: str
    task: list
    model: list
    search: list = field(default_factory=list)
    languages: tuple[str, str] | None = ("en", "de")
    names_languages: bool = True  # on the command line
    speech: str | None = None  # what is in the files: "fbank" or "waveform"
    begins_with_language: bool = False  # speech in several languages: a tag in front of each target
    encoder: list | None = None  # of a pre-trained model of speech, which the model takes for its encoder


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
        ["--langs", "en_XX,de_DE"],
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
        names_languages=False,
    ),
    "xlm": Family(
        "translation_from_pretrained_xlm",
        [],
        ["--arch", "transformer_from_pretrained_xlm", *SMALL, "--init-encoder-only"],
    ),
    "translation_moe": Family(
        "translation_moe",
        ["--method", "hMoEup", "--num-experts", 3],
        ["--arch", "transformer", *SMALL, "--share-all-embeddings"],
        search=["--gen-expert", 2],
    ),
    "denoising": Family(
        "denoising",
        ["--tokens-per-sample", 40, "--sample-break-mode", "eos", "--mask", 0.3],
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
    "s2t_transformer, multilingual": Family(
        "speech_to_text", [], ["--arch", "s2t_transformer_xs", *SMALL, "--conv-channels", 24],
        search=["--prefix-size", 1], speech="fbank", begins_with_language=True, languages=None,
    ),
    "s2t_conformer": Family(
        "speech_to_text", [], ["--arch", "s2t_conformer", *SMALL, "--conv-channels", 24, "--attn-type", "espnet"],
        speech="fbank", languages=None,
    ),
    "xm_transformer": Family(
        "speech_to_text",
        [],
        ["--arch", "xm_transformer", "--encoder-embed-dim", 32, *SMALL_DECODER, "--adaptor-n-layers", 1],
        speech="waveform", languages=None, encoder=WAV2VEC,
    ),
    "wav2vec_seq2seq": Family(
        "audio_finetuning",
        ["--labels", "ltr", "--autoregressive"],
        ["--arch", "wav2vec_seq2seq", *SMALL_DECODER, "--decoder-embed-dim", 512],  # the only width that it works with
        speech="manifest", languages=None, encoder=WAV2VEC,
    ),
}  # fmt: skip


# ---- files


def sentences(count: int = SENTENCES) -> list[str]:
    picks = random.Random(4)
    return [" ".join(picks.choices(WORDS, k=picks.randint(1, 12))) for _ in range(count)]


def write_data(family: Family, folder: Path, count: int = SENTENCES) -> None:
    """A set `test` of raw text, or of features, with its dictionaries."""
    folder.mkdir()
    lines = sentences(count)
    symbols = "".join(f"{word} 1\n" for word in WORDS)
    for name in ("dict.txt", "dict.ltr.txt"):
        (folder / name).write_text(symbols)
    if family.speech is not None:
        write_noise(family.speech, folder, lines)
        if family.begins_with_language:
            tag_languages(folder)
        return
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    if family.languages is None:
        binarise(dictionary, lines, folder / "test")
        for language in ("en", "de"):
            (folder / language).mkdir()
            binarise(dictionary, lines[: count // 2], folder / language / "test")
        return
    source, target = family.languages
    for pair in (f"{source}-{target}", f"{target}-{source}"):
        for language in family.languages:
            binarise(dictionary, lines, folder / f"test.{pair}.{language}")
            (folder / f"dict.{language}.txt").write_text(symbols)


def write_noise(kind: str, folder: Path, lines: list[str]) -> None:
    """Features, waveforms in an archive, or files of sound with their letters."""
    noise = np.random.default_rng(6)
    sizes = noise.integers(30, 90, len(lines)) if kind == "fbank" else noise.integers(1500, 3000, len(lines))
    samples = [noise.standard_normal((size, 80) if kind == "fbank" else size) for size in sizes]
    if kind == "fbank":
        write_speech(folder, samples, lines, {"input_channels": 1, "input_feat_per_channel": 80})
    elif kind == "waveform":
        write_speech(folder, samples, lines, {"use_audio_input": True})
    else:
        for number, waveform in enumerate(samples):
            write_wave(folder / f"{number}.wav", waveform)
        rows = [str(folder), *(f"{number}.wav\t{size}" for number, size in enumerate(sizes))]
        (folder / "test.tsv").write_text("\n".join(rows) + "\n")
        (folder / "test.ltr").write_text("\n".join(lines) + "\n")


def tag_languages(folder: Path) -> None:
    header, *rows = (folder / "test.tsv").read_text().splitlines()
    tagged = [f"{row}\t{('de', 'fr')[number % 2]}" for number, row in enumerate(rows)]
    (folder / "test.tsv").write_text("\n".join([f"{header}\ttgt_lang", *tagged]) + "\n")
    for name, more in (("dict.txt", "<lang:de> 1\n<lang:fr> 1\n"), ("config.yaml", "prepend_tgt_lang_tag: true\n")):
        with (folder / name).open("a") as file:
            file.write(more)


def write_wave(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((samples * 5000).astype(np.int16).tobytes())


class SoundFile(ModuleType):
    """Stands for the library with which fairseq reads such files."""

    def read(self, path: str, dtype: str, always_2d: bool = False, **options) -> tuple[np.ndarray, int]:
        with wave.open(path, "rb") as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(dtype) / 32768
            return samples[:, None] if always_2d else samples, file.getframerate()


# ---- checkpoints


def use_stock_tasks(patch) -> None:
    for name in list(TASK_REGISTRY):
        patch.setitem(TASK_REGISTRY, name, stock_task(name))


def task_words(family: Family, folder: Path) -> list[str]:
    words = [folder, "--task", family.name, *family.task]
    if family.languages is not None and family.names_languages:
        words += ["--source-lang", family.languages[0], "--target-lang", family.languages[1]]
    return [str(word) for word in words]


def make_checkpoint(family: Family, folder: Path) -> Path:
    words = task_words(family, folder) + family.model
    if family.encoder is not None:
        words += ["--w2v-path", save_model([folder, *family.encoder], folder / "encoder.pt")]
    if "--init-encoder-only" in words:
        words += ["--pretrained-xlm-checkpoint", save_xlm(folder / "xlm.pt")]
    return save_model(words, folder / "model.pt")


def save_model(words: list, path: Path) -> Path:
    """A checkpoint as fairseq-train saves it, with random weights."""
    args = training_settings(words)
    for_building = {}
    if args.arch == "xm_transformer":  # has the settings of its encoder in its own
        args.w2v_args = fairseq_el.checkpoints.loading.load(args.w2v_path)["args"]
        for_building = {"freeze_regex": None}  # which released checkpoints lack
    model = build_model(Namespace(**{**vars(args), **for_building}), seed=3)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "weight_" not in name:  # of a normalised layer
            torch.nn.init.normal_(parameter, std=0.25)
    torch.save(state_of(args, model.state_dict()), path)
    return path


def save_xlm(path: Path) -> Path:
    """A pre-trained model to start from, of which only names matter: training has replaced its weights."""
    weights = {"decoder.sentence_encoder.layers.0.fc1.bias": torch.zeros(48)}
    torch.save(state_of(Namespace(arch="xlm_base", task="cross_lingual_lm", criterion=None), weights), path)
    return path


# ---- fairseq-generate in this process


def fairseq_generate(words: list, results: Path, monkeypatch, stock: bool) -> dict[int, list]:
    """Hypotheses of the command line by sentence, with their scores: [(text, score), ...]."""
    with monkeypatch.context() as patch:
        if stock:
            use_stock_tasks(patch)
        patch.setattr(sys, "argv", ["fairseq-generate", *map(str, words), *RESULTS, str(results)])
        generate.cli_main()
    found: dict[int, list] = {}
    for line in next(results.glob("generate-*.txt")).read_text(encoding="utf-8").splitlines():
        if line.startswith("H-"):
            number, score, text = line.split("\t")
            found.setdefault(int(number[2:]), []).append((text, float(score)))
    return found
