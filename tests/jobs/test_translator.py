"""Texts in, translations out, with the languages that a user names: what stock fairseq, and Transformers, translate."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask

import fairseq_el
from fairseq_el import Translator
from fairseq_el.cli import translate as cli_translate
from fairseq_el.cli.convert import convert
from fairseq_el.errors import UserError
from fairseq_el.jobs import presets
from fairseq_el.jobs.default_preset import default_preset
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.text.languages import resolve
from families import SMALL, Family, fairseq_generate, save_model, task_words
from helpers import DEMO, exit_of, interrupted_after, read_lines, run_command, write_lines
from hf_models import NLLB_LANGUAGES, save_m2m100, train_sentencepiece

LEARNED_FROM = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[:200]
TEXTS = ["the cat sings", "on the theatre of 12 cats", "a hat", "he sat on a red thing in it", "tea", "read it"]
M2M = ["--arch", "transformer_wmt_en_de_big", *SMALL, "--encoder-normalize-before", "--decoder-normalize-before",
       "--share-all-embeddings"]  # fmt: skip
MBART = ["--arch", "mbart_large", *SMALL, "--layernorm-embedding"]
# As released: settings of the task, the model, and the names of files next to the checkpoint.
RELEASES = {
    "m2m-100": (
        Family("translation_multi_simple_epoch",
               ["--langs", "de,en,fr", "--lang-pairs", "en-de", "--encoder-langtok", "src", "--decoder-langtok"], M2M),
        "model_dict.128k.txt", "spm.128k.model", {"language_pairs.txt": "en-de,de-en,en-fr"},
    ),
    "wmt21": (
        Family("translation_multi_simple_epoch",
               ["--langs", "en,de", "--lang-pairs", "en-de", "--encoder-langtok", "tgt", "--decoder-langtok",
                "--lang-tok-replacing-bos-eos"], M2M),
        "dict.txt", "sentencepiece.model", {},
    ),
    "mbart-50": (
        Family("translation_multi_simple_epoch",
               ["--langs", "en_XX,de_DE,fr_XX", "--lang-pairs", "en_XX-de_DE", "--encoder-langtok", "src",
                "--decoder-langtok", "--lang-tok-style", "mbart"], MBART, languages=("en_XX", "de_DE")),
        "dict.{lang}.txt", "sentence.bpe.model", {"ML50_langs.txt": "en_XX\nde_DE\nfr_XX\n"},
    ),
    "mbart-25": (
        Family("translation_from_pretrained_bart", ["--langs", "en_XX,de_DE"], MBART, languages=("en_XX", "de_DE")),
        "dict.txt", "sentence.bpe.model", {},
    ),
}  # fmt: skip


def write_release(name: str, folder: Path) -> Path:
    """A model folder with random weights, and below it data that fairseq-generate reads."""
    family, dictionary, sentencepiece, lists = RELEASES[name]
    data = folder / "data"
    data.mkdir(parents=True)
    pieces = train_sentencepiece(folder / sentencepiece, LEARNED_FROM)[3:]
    random.Random(1).shuffle(pieces)
    for language in family.languages:
        write_lines(data / f"dict.{language}.txt", (f"{piece} 1" for piece in pieces))
        (folder / dictionary.format(lang=language)).write_text((data / f"dict.{language}.txt").read_text())
    for path, content in lists.items():
        (folder / path).write_text(content)
    save_model(task_words(family, data) + family.model, folder / "model.pt")
    return folder


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_release(name, tmp_path_factory.mktemp("release") / "model")
        return made[name]

    return make


@pytest.fixture(scope="module")
def m2m100(tmp_path_factory) -> Path:
    return save_m2m100(tmp_path_factory.mktemp("hf") / "m2m100", LEARNED_FROM, lambda model: model)


def stock_translations(name: str, folder: Path, results: Path, monkeypatch) -> list[str]:
    """By fairseq-generate of stock fairseq, on the same pieces."""
    import sentencepiece

    family, _, model, _ = RELEASES[name]
    data, (source, target) = folder / "data", family.languages
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / model))
    encoded = [" ".join(pieces.encode(text, out_type=str)) for text in TEXTS]
    for language in family.languages:
        write_lines(results.parent / f"test.{language}", encoded)
    done = run_command(
        "fairseq-preprocess", "-s", source, "-t", target, "--testpref", results.parent / "test",
        "--destdir", data / "bin", "--srcdict", data / f"dict.{source}.txt", "--tgtdict", data / f"dict.{target}.txt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = task_words(family, data / "bin") + ["--path", folder / "model.pt", "--beam", 5,
        "--max-len-b", 20, "--batch-size", 4, "--required-batch-size-multiple", 1, "--remove-bpe", "sentencepiece",
        "--cpu"]  # fmt: skip
    with monkeypatch.context() as patch:  # this release looks for settings under a name that is gone
        patch.setattr(TranslationFromPretrainedBARTTask, "args", property(lambda task: task.cfg), raising=False)
        found = fairseq_generate(words, results, patch, stock=True)
    return [" ".join(found[number][0][0].split()) for number in range(len(TEXTS))]


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_of_fairseq_translates_as_fairseq_generate_does(name, releases, tmp_path, monkeypatch):
    folder = releases(name)
    theirs = stock_translations(name, folder, tmp_path / "stock", monkeypatch)
    for stock in (False, True):
        translate = Translator.load(folder, source_lang="en", target_lang="de", max_len_b=20, stock=stock)
        assert translate(TEXTS) == theirs
    assert len(set(theirs)) > 2 and not any("en" in text and "_" in text for text in theirs)


# --- languages -----------------------------------------------------------------------------------

MBART_CODES = ["en_XX", "pt_XX", "zh_CN", "de_DE"]


@pytest.mark.parametrize(
    "given, known, expected",
    [
        ("en", ["en", "de"], "en"),
        ("en", MBART_CODES, "en_XX"),
        ("pt-BR", MBART_CODES, "pt_XX"),
        ("de_DE", ["en", "de"], "de"),
        ("de", NLLB_LANGUAGES, "deu_Latn"),
        ("ar", NLLB_LANGUAGES, "arb_Arab"),
        ("zh_hant", NLLB_LANGUAGES, "zho_Hant"),
        ("swh", NLLB_LANGUAGES, "swh_Latn"),
        ("eng_Latn", ["en", "de"], "en"),
    ],
)
def test_a_short_code_is_the_model_s_where_only_one_fits(given, known, expected):
    assert resolve(given, known, "source_lang") == expected


@pytest.mark.parametrize(
    "given, message",
    [
        ("zh", "several languages 'zh': name one with target_lang .--target-lang., one of zho_Hans, zho_Hant$"),
        ("xx", "no language 'xx': name one with target_lang .--target-lang., one of ace_Arab, ace_Latn, .*, zul_Latn$"),
        ("", "is for several languages: name one with target_lang"),
    ],
)
def test_others_are_refused_with_the_candidates(given, message):
    with pytest.raises(UserError, match=message):
        resolve(given, NLLB_LANGUAGES, "target_lang")


def test_a_release_without_a_list_of_its_languages_asks_for_it(releases, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in releases("mbart-25").iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    state = torch.load(folder / "model.pt", weights_only=True)
    state["args"].langs = None
    torch.save(state, folder / "model.pt")
    with pytest.raises(UserError, match="names no languages: put the model's list"):
        Translator.load(folder, source_lang="en", target_lang="de")
    (folder / "langs.txt").write_text("en_XX\nde_DE\n")
    named = {"source_lang": "en", "target_lang": "de", "max_len_b": 20}
    assert Translator.load(folder, **named)(TEXTS) == Translator.load(releases("mbart-25"), **named)(TEXTS)


def test_a_model_for_two_languages_refuses_others():
    with pytest.raises(UserError, match="translates from source to target, not de: leave out target_lang"):
        Translator.load(DEMO, target_lang="de")


# --- the command ---------------------------------------------------------------------------------


def translate(folder: Path, *words, cwd: Path) -> str:
    done = run_command(
        sys.executable, "-m", "fairseq_el", "translate", "--model", folder, "-s", "en", "-t", "de", "--cpu",
        "--max-len-b", "20", *words, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_command_translates_lines_and_json_lines_and_shards(m2m100, tmp_path):
    expected = Translator.load(m2m100, source_lang="en", target_lang="de", max_len_b=20)(TEXTS)
    assert len(set(expected)) > 2
    write_lines(tmp_path / "en.txt", TEXTS)
    write_lines(tmp_path / "en.jsonl", (json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)))
    translate(m2m100, "--input", "en.txt", "--output", "de.txt", cwd=tmp_path)
    assert read_lines(tmp_path / "de.txt") == expected
    assert not (tmp_path / "de.txt.journal").exists() and (tmp_path / "de.txt.job").exists()
    for part in ("1/2", "2/2"):
        words = ["--shard", part, "--window", "2", "--nbest", "2", "--output", f"part.{part[0]}.jsonl"]
        translate(m2m100, "--input", "en.jsonl", *words, cwd=tmp_path)
    merge = ["merge", "part.1.jsonl", "part.2.jsonl", "--output", "de.jsonl"]
    done = run_command(sys.executable, "-m", "fairseq_el", *merge, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in read_lines(tmp_path / "de.jsonl")]
    assert [record["translation"] for record in records] == expected
    assert all(set(record) == {"id", "text", "translation", "score", "alternatives"} for record in records)
    assert all(set(other) == {"translation", "score"} for record in records for other in record["alternatives"])


def test_an_interrupted_translation_goes_on_with_the_same_languages(m2m100, tmp_path, monkeypatch):
    def run(output: str, target: str, *words):
        files = ["--input", tmp_path / "en.txt", "--output", tmp_path / output]
        options = ["--model", m2m100, "-s", "en", "-t", target, "--cpu", "--max-len-b", 20, "--batch-size", 2]
        return exit_of(cli_translate, [*options, *files, *words], monkeypatch)

    write_lines(tmp_path / "en.txt", TEXTS)
    assert run("whole.txt", "de") is None
    with monkeypatch.context() as patch:
        interrupted_after(1, patch)
        assert run("de.txt", "de") == "\nInterrupted: continue with --resume."
    assert not (tmp_path / "de.txt").exists()
    assert "another set of options" in run("de.txt", "ro", "--resume")
    assert run("de.txt", "de", "--resume") is None
    assert read_lines(tmp_path / "de.txt") == read_lines(tmp_path / "whole.txt")


def test_workers_of_ray_translate_as_a_single_process_does(m2m100, tmp_path):
    pytest.importorskip("ray")
    expected = Translator.load(m2m100, source_lang="en", target_lang="de", max_len_b=20)(TEXTS)
    write_lines(tmp_path / "en.txt", TEXTS)
    words = ["--engine", "ray", "--workers", "1", "--batch-size", "2"]
    translate(m2m100, "--input", "en.txt", "--output", "de.txt", *words, cwd=tmp_path)
    assert read_lines(tmp_path / "de.txt") == expected


def test_a_mistake_in_a_language_is_one_line(m2m100, tmp_path):
    write_lines(tmp_path / "in", TEXTS)
    command = [sys.executable, "-m", "fairseq_el", "translate", "--model", m2m100, "--input", "in", "--output", "out"]
    done = run_command(*command, "--source-lang", "en", "--target-lang", "xx", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("translate: error: the model has no language 'xx': name one with ")


# --- models --------------------------------------------------------------------------------------


def test_models_with_many_languages_have_the_preset_translation(m2m100, releases):
    assert fairseq_el.Translator is Translator
    for folder in (m2m100, releases("m2m-100"), releases("mbart-25")):
        assert default_preset(ModelFiles.find(folder)) == "translation"
    assert Translator.load("demo").preset.name == "translation"
    assert presets.load("translation").options["beam"] == 5


def test_a_converted_model_translates_with_stock_fairseq_generate(m2m100, tmp_path, monkeypatch):
    """As a release of M2M-100 does: the languages are in its dictionary."""
    import sentencepiece

    expected = Translator.load(m2m100, source_lang="en", target_lang="de", max_len_b=20, lenpen=0)(TEXTS)
    folder = convert(m2m100, tmp_path / "converted").parent
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    for language in ("en", "de"):
        write_lines(tmp_path / f"test.{language}", (" ".join(pieces.encode(text, out_type=str)) for text in TEXTS))
    done = run_command(
        "fairseq-preprocess", "-s", "en", "-t", "de", "--testpref", tmp_path / "test", "--destdir", tmp_path / "bin",
        "--srcdict", folder / "dict.txt", "--joined-dictionary",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = [tmp_path / "bin", "--task", "translation_multi_simple_epoch", "--langs", "en,de", "--lang-pairs", "en-de",
             "--encoder-langtok", "src", "--decoder-langtok", "-s", "en", "-t", "de", "--path", folder / "model.pt",
             "--beam", 5, "--lenpen", 0, "--max-len-b", 20, "--remove-bpe", "sentencepiece",
             "--batch-size", 1, "--required-batch-size-multiple", 1, "--cpu"]  # fmt: skip
    found = fairseq_generate(words, tmp_path / "stock", monkeypatch, stock=True)
    assert [" ".join(found[number][0][0].split()) for number in range(len(TEXTS))] == expected


def test_nllb_with_experts_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nllb-moe"}')
    with pytest.raises(UserError, match="type 'nllb-moe', which fairseq has no counterpart for: use one of") as refused:
        Translator.load(tmp_path, source_lang="en", target_lang="de")
    assert "\n" not in str(refused.value)
