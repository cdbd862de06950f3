"""All of fairseq's tasks generate through our plugin, and find what stock fairseq finds."""

import logging
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from fairseq.examples.pointer_generator import pointer_generator_src  # noqa: F401  (registers its model)
from fairseq.examples.translation_moe import translation_moe_src  # noqa: F401  (registers its task)
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_from_pretrained_xlm import TranslationFromPretrainedXLMTask

from fairseq_el.generation.generator import ELSequenceGenerator
from fairseq_el.plugin.compatibility import MaskedLMDictionaries
from fairseq_el.plugin.register import accelerate_tasks
from fairseq_el.plugin.tasks import ELGeneration
from families import (
    FAMILIES,
    SENTENCES,
    SMALL,
    Family,
    SoundFile,
    fairseq_generate,
    make_checkpoint,
    task_words,
    write_data,
)
from helpers import run_command

SEARCH = ["--beam", 3, "--nbest", 2, "--max-len-b", 10, "--batch-size", 5, "--cpu", "--no-progress-bar"]
accelerate_tasks()


@pytest.fixture
def made(tmp_path):
    """Writes data and a checkpoint; returns the words of a command line that generates with them."""

    def make(family: Family) -> list:
        folder = tmp_path / "data"
        write_data(family, folder)
        return [*task_words(family, folder), *family.search, "--path", make_checkpoint(family, folder)]

    return make


@pytest.fixture
def working_stock(monkeypatch):
    """Stock fairseq, less three defects of this release that keep it from generating with some families at all."""

    def run(words: list, results: Path) -> dict:
        with monkeypatch.context() as patch:
            patch.setattr(TranslationFromPretrainedXLMTask, "load_dictionary", MaskedLMDictionaries.load_dictionary)
            patch.setattr(TranslationFromPretrainedBARTTask, "args", property(lambda task: task.cfg), raising=False)
            words = [*words, "--required-batch-size-multiple", 1, "--model-overrides", "{'freeze_regex': None}"]
            return fairseq_generate(words, results, patch, stock=True)

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_finds_what_stock_finds(name, made, working_stock, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", SoundFile("soundfile"))
    built = remember_generators(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(TranslationFromPretrainedXLMTask, "load_dictionary", MaskedLMDictionaries.load_dictionary)
        words = made(FAMILIES[name]) + SEARCH
    ours = fairseq_generate(words, tmp_path / "ours", monkeypatch, stock=False)
    assert [generator.model.accelerated for generator, _ in built] == [True]
    theirs = working_stock(words, tmp_path / "stock")
    assert len(built) == 1
    assert sum(map(len, theirs.values())) in (2 * SENTENCES, 2 * (SENTENCES // 2) * 2)  # or of two languages
    assert_same_texts(ours, theirs)


def remember_generators(monkeypatch) -> list[tuple[ELSequenceGenerator, dict]]:
    """Those that are built from now on, with the options they are given."""
    built, init = [], ELSequenceGenerator.__init__

    def remembering(self, *args, **options):
        init(self, *args, **options)
        built.append((self, options))

    monkeypatch.setattr(ELSequenceGenerator, "__init__", remembering)
    return built


def assert_same_texts(ours: dict[int, list], theirs: dict[int, list]) -> None:
    assert {n: [text for text, _ in found] for n, found in ours.items()} == {
        n: [text for text, _ in found] for n, found in theirs.items()
    }
    for number, found in theirs.items():
        assert [score for _, score in ours[number]] == pytest.approx([score for _, score in found], abs=1e-3)


def test_every_registered_task_has_our_options():
    for name, task in TASK_REGISTRY.items():
        if name == "stock_cache_meter":
            continue
        assert issubclass(task, ELGeneration), name
        parser = ArgumentParser()
        task.add_args(parser)
        assert parser.get_default("el_attention") == "auto", name
        if name in TASK_DATACLASS_REGISTRY:
            assert TASK_DATACLASS_REGISTRY[name]().el_attention == "auto"


def test_our_options_reach_the_generator_of_an_older_task(made, tmp_path, monkeypatch):
    """A budget splits batches, and with them the prefix that names the language."""
    words = made(FAMILIES["m2m-100"]) + SEARCH
    expected = fairseq_generate(words, tmp_path / "plain", monkeypatch, stock=False)
    built = remember_generators(monkeypatch)
    options = ["--el-attention", "always", "--el-memory-budget", "60K"]
    assert_same_texts(fairseq_generate([*words, *options], tmp_path / "el", monkeypatch, stock=False), expected)
    [(_, given)] = built
    assert (given["el_attention"], given["el_memory_budget"]) == ("always", 60 * 1024)


@pytest.mark.parametrize(
    "family, says",
    [
        (Family("translation", [], ["--arch", "lstm", "--encoder-layers", 1, "--decoder-layers", 1]), "LSTMModel"),
        (Family("translation", [], ["--arch", "fconv", "--encoder-layers", "[(16, 3)]", "--decoder-layers",
                                    "[(16, 3)]"]), "FConvModel"),
        (Family("translation_lev", [], ["--arch", "levenshtein_transformer", *SMALL, "--share-all-embeddings"]),
         "IterativeRefinementGenerator"),
        (Family("translation", [], ["--arch", "transformer_pointer_generator", *SMALL, "--share-all-embeddings",
                                    "--source-position-markers", 8, "--alignment-layer", 1, "--alignment-heads", 1]),
         "TransformerPointerGeneratorModel"),
    ],
    ids=["lstm", "convolutions", "levenshtein", "pointer-generator"],
)  # fmt: skip
def test_what_has_no_el_form_says_so_in_a_line_and_runs_as_stock(
    family, says, made, working_stock, tmp_path, monkeypatch, caplog
):
    words = made(family) + SEARCH[:2] + SEARCH[4:]
    with caplog.at_level(logging.WARNING):
        ours = fairseq_generate(words, tmp_path / "ours", monkeypatch, stock=False)
    lines = [record.getMessage() for record in caplog.records if "no EL form" in record.getMessage()]
    assert len(lines) == 1 and says in lines[0] and "\n" not in lines[0]
    assert_same_texts(ours, working_stock(words, tmp_path / "stock"))


def test_fairseqs_examples_need_no_other_user_dir(made):
    """Stock fairseq takes `translation_moe` from a folder of its own, and a command line has only one."""
    words = [*made(FAMILIES["translation_moe"]), *SEARCH]
    done = run_command("fairseq-generate", *words, "--user-dir", "fairseq_el")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no EL form" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"fairseq_el | generated {SENTENCES} of {SENTENCES} sentences"


OWN_TASK = """
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

@register_task("own", dataclass=TranslationConfig)
class OwnTask(TranslationTask):
    pass

import fairseq_el
"""


def test_a_task_of_ones_own_comes_from_a_folder_that_imports_fairseq_el(made, tmp_path):
    words = [*made(Family("translation", [], ["--arch", "transformer", *SMALL])), *SEARCH, "--quiet"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text(OWN_TASK)
    done = run_command(
        "fairseq-generate", *words, "--user-dir", tmp_path / "own", "--task", "own", "--el-attention", "always",
        "--el-profile",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"generated {SENTENCES} of {SENTENCES} sentences" in done.stderr
    assert "cross-attention" in done.stderr  # in the profile, which only our generator prints


def test_examples_can_be_a_user_dir_in_a_process_that_has_imported_fairseq_el():
    for folder in ("translation_moe/translation_moe_src", "pointer_generator/pointer_generator_src"):
        user_dir = f"argparse.Namespace(user_dir='examples/{folder}')"
        code = f"import argparse, fairseq_el; from fairseq import utils; utils.import_user_module({user_dir})"
        done = run_command(sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("context", [[], ["--full-context-alignment"]], ids=["", "full context"])
def test_alignments_are_stocks(context, made, working_stock, tmp_path, monkeypatch):
    """`transformer_align` with `--print-alignment hard`."""
    model = ["--arch", "transformer_align", *SMALL, "--alignment-layer", 1, "--alignment-heads", 1, *context]
    words = made(Family("translation", [], model)) + SEARCH + ["--print-alignment", "hard"]
    assert_same_texts(
        fairseq_generate(words, tmp_path / "ours", monkeypatch, stock=False), working_stock(words, tmp_path / "stock")
    )
    ours, theirs = (
        [line for line in sorted((tmp_path / name / "generate-test.txt").read_text().splitlines()) if line[:2] == "A-"]
        for name in ("ours", "stock")
    )
    assert ours == theirs and len(ours) == 2 * SENTENCES
