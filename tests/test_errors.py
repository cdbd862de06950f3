"""Failures a user can do something about end in one line; all others keep their traceback."""

import argparse
import sys

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, LanguagePairDataset, data_utils
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from fairseq_el import errors
from fairseq_el.errors import UserError, explain, install_hook
from helpers import run_command
from make_checkpoint import make_checkpoint

TINY = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 32,
    "max_target_positions": 32,
}  # fmt: skip


def explanation(function, *arguments, **options) -> str:
    """What is said about the failure of a function of fairseq's."""
    with pytest.raises(Exception) as failure:
        function(*arguments, **options)
    message = explain(failure.value)
    assert message is not None, repr(failure.value)
    assert "\n" not in message
    return message


def setup_task(folder, **options) -> TranslationTask:
    config = TranslationConfig(
        data=str(folder),
        train_subset="train",
        dataset_impl=None,
        required_seq_len_multiple=1,
        **options,
    )
    return TranslationTask.setup_task(OmegaConf.structured(config))


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint("bart_base", folder, vocab=50, settings=TINY, sentences=8)


@pytest.fixture
def task(model_file) -> TranslationTask:
    return setup_task(model_file.parent, source_lang="source", target_lang="target")


# --- explanations of what fairseq's own functions raise ----------------------------------------


def test_missing_model_file(task):
    message = explanation(checkpoint_utils.load_model_ensemble, ["nowhere/model.pt"], task=task)
    assert message.startswith("the checkpoint nowhere/model.pt does not exist: ")
    assert "--path" in message


def pairs(*sizes: tuple[int, int]) -> LanguagePairDataset:
    """Sentence pairs of these lengths."""
    dictionary = Dictionary()
    sources, targets = ([torch.full((pair[side],), 4) for pair in sizes] for side in (0, 1))
    lengths = ([pair[side] for pair in sizes] for side in (0, 1))
    source_lengths, target_lengths = lengths
    return LanguagePairDataset(
        sources, source_lengths, dictionary, targets, target_lengths, dictionary
    )


def test_source_longer_than_the_models_positions(task):
    data = pairs((9, 9), (40, 9))
    message = explanation(task.filter_indices_by_size, np.arange(2), data, (32, 32))
    assert message.startswith("sentence 1 has 40 source tokens, the model has positions for 32: ")
    assert "--truncate-source --max-source-positions 32" in message
    assert "--skip-invalid-size-inputs-valid-test" in message


def test_target_longer_than_the_models_positions(task):
    message = explanation(task.filter_indices_by_size, np.arange(1), pairs((9, 40)), (32, 32))
    assert message.startswith("sentence 0 has 40 target tokens, the model has positions for 32: ")
    assert "--truncate-source" not in message


def test_text_longer_than_the_positions_of_a_language_model():
    class Text:
        sizes = np.array([8, 2000])

        def size(self, index):
            return int(self.sizes[index])

    message = explanation(
        data_utils.filter_by_size, np.arange(2), Text(), 1024, raise_exception=True
    )
    assert message.startswith("sentence 1 has 2,000 tokens, the model has positions for 1,024: ")


def test_the_advice_about_long_sources_helps(task, model_file):
    """With the options of the message the sentences do fit."""
    (model_file.parent / "long.source").write_text("7 " * 50)
    (model_file.parent / "long.target").write_text("7 8")
    for side in ("source", "target"):
        raw = (model_file.parent / f"long.{side}").read_text() + "\n"
        (model_file.parent / f"long.source-target.{side}").write_text(raw)
    advised = setup_task(
        model_file.parent, source_lang="source", target_lang="target", truncate_source=True,
        max_source_positions=32,
    )  # fmt: skip
    for each, fits in ((task, False), (advised, True)):
        each.cfg.dataset_impl = "raw"
        each.load_dataset("long")
        _, ignored = each.dataset("long").filter_indices_by_size(np.arange(1), (32, 32))
        assert (len(ignored) == 0) is fits


def test_batches_that_are_too_small_for_a_sentence():
    message = explanation(
        data_utils.batch_by_size,
        np.arange(2),
        lambda index: 500,
        max_tokens=100,
        max_sentences=None,
    )
    assert "with --max-tokens 100: give a larger --max-tokens" in message


def test_no_sentence_left():
    empty = np.array([], dtype=np.int64)
    message = explanation(
        data_utils.batch_by_size, empty, None, num_tokens_vec=empty, required_batch_size_multiple=8
    )
    assert message.startswith("no sentence is left to work on: ")


def test_missing_part_of_the_data(task, model_file):
    message = explanation(task.load_dataset, "dev")
    assert message.startswith(
        f"there is no 'dev' data for this pair of languages in {model_file.parent}"
    )
    assert "--gen-subset" in message


def test_missing_dictionary(tmp_path):
    message = explanation(setup_task, tmp_path, source_lang="en", target_lang="de")
    assert message.startswith(
        f"the dictionary {tmp_path}/dict.en.txt does not exist: put the dict.txt"
    )


def test_missing_data_folder(tmp_path):
    message = explanation(setup_task, tmp_path / "nowhere")
    assert message == f"{tmp_path}/nowhere does not exist: check the path"


def test_languages_that_can_not_be_told(tmp_path):
    message = explanation(setup_task, tmp_path)
    assert "--source-lang and --target-lang" in message


def test_options_that_do_not_go_together(task):
    message = explanation(task.build_generator, [], argparse.Namespace(sampling_topk=5))
    assert "--sampling-topk requires --sampling" in message


def load_altered(path, folder, task=None, **settings):
    """Load the checkpoint after changing settings in it, which then don't fit its weights."""
    altered = folder / "altered.pt"
    state = torch.load(path)
    vars(state["cfg"]["model"]).update(settings)
    torch.save(state, altered)
    checkpoint_utils.load_model_ensemble([str(altered)], task=task)


def test_weights_of_another_shape_than_the_settings_say(task, model_file, tmp_path):
    message = explanation(load_altered, model_file, tmp_path, task, encoder_ffn_embed_dim=8)
    assert "the checkpoint's encoder.layers.0.fc1.weight is of shape [16, 16]" in message
    assert "wants [8, 16]" in message


def test_weights_that_are_missing(task, model_file, tmp_path):
    message = explanation(load_altered, model_file, tmp_path, task, encoder_layers=2)
    assert message.startswith("the checkpoint's weights do not fit the architecture named in it: ")


def test_a_dictionary_of_another_size_in_stock_models(model_file, tmp_path):
    for side in ("source", "target"):
        (tmp_path / f"dict.{side}.txt").write_text("".join(f"w{n} 1\n" for n in range(20)))
    small = setup_task(tmp_path, source_lang="source", target_lang="target")
    message = explanation(checkpoint_utils.load_model_ensemble, [str(model_file)], task=small)
    assert "encoder embedding has 50 rows, the source dictionary 24 entries" in message
    assert "put the dict.txt that came with the checkpoint" in message


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"ddp_backend": "simple"},
            "the setting ddp_backend='simple', which this fairseq does not accept",
        ),
        ({"arch": "my_model"}, "was trained with 'my_model', which this fairseq does not know"),
    ],
)
def test_old_or_foreign_settings(task, tmp_path, settings, message):
    folder = tmp_path / "legacy"
    path = make_checkpoint("bart_base", folder, vocab=50, settings=TINY, legacy=True)
    state = torch.load(path)
    vars(state["args"]).update(settings)
    torch.save(state, path)
    said = explanation(checkpoint_utils.load_model_ensemble, [str(path)], task=task)
    assert message in said
    assert str(path) in said


def test_an_old_setting_can_be_replaced_as_the_message_says(task, tmp_path):
    path = make_checkpoint("bart_base", tmp_path, vocab=50, settings=TINY, legacy=True)
    state = torch.load(path)
    state["args"].ddp_backend = "simple"
    torch.save(state, path)
    overrides = {"ddp_backend": "no_c10d"}
    [model], _ = checkpoint_utils.load_model_ensemble(
        [str(path)], arg_overrides=overrides, task=task
    )
    assert model.decoder.embed_tokens.num_embeddings == 50


def test_memory_that_does_not_suffice():
    message = explanation(torch.empty, 2**60)
    assert "smaller --batch-size" in message


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError("x"), IndexError("x")],
)
def test_what_is_not_known_is_not_explained(error):
    assert explain(error) is None


# --- the hook ----------------------------------------------------------------------------------


@pytest.fixture
def hook(monkeypatch):
    """Our hook over one that takes notes, as (hook, notes)."""
    notes = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, exc, trace: notes.append(exc))
    monkeypatch.delenv(errors.TRACEBACK_VARIABLE, raising=False)
    install_hook()
    return sys.excepthook, notes


def raised(error: Exception, file: str) -> tuple:
    """What a hook gets for an error that passed through code of this file."""
    try:
        exec(compile("raise error", file, "exec"), {"error": error})
    except Exception as caught:
        return type(caught), caught, caught.__traceback__


COMMAND = "/site-packages/fairseq_cli/generate.py"


def test_under_a_command_line_an_explained_error_is_one_line(hook, capsys):
    run, notes = hook
    run(*raised(UserError("this is wrong:\n do that"), COMMAND))
    assert capsys.readouterr().err == "fairseq_el: error: this is wrong: do that\n"
    assert notes == []


def test_an_unknown_error_goes_to_the_previous_hook(hook, capsys):
    run, notes = hook
    error = ValueError("a bug")
    run(*raised(error, COMMAND))
    assert notes == [error]
    assert capsys.readouterr().err == ""


def test_a_program_of_the_users_own_keeps_its_tracebacks(hook, capsys):
    run, notes = hook
    for error in (UserError("x"), FileNotFoundError(2, "No such file", "x")):
        run(*raised(error, "/home/user/program.py"))
        assert notes[-1] is error
    assert capsys.readouterr().err == ""


def test_the_traceback_can_be_asked_for(hook, capsys, monkeypatch):
    run, notes = hook
    monkeypatch.setenv("FAIRSEQ_EL_TRACEBACK", "1")
    error = UserError("x")
    run(*raised(error, COMMAND))
    assert notes == [error]
    assert capsys.readouterr().err == "fairseq_el: error: x\n"


def test_installing_twice_changes_nothing(hook):
    install_hook()
    assert sys.excepthook is hook[0]


# --- as users meet them ------------------------------------------------------------------------


def assert_one_line(done, start: str) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"fairseq_el: error: {start}")


def test_fairseq_generate_says_what_is_missing(model_file):
    done = run_command(
        "fairseq-generate", model_file.parent, "--path", "nowhere.pt", "--user-dir", "fairseq_el"
    )
    assert_one_line(done, "the checkpoint nowhere.pt does not exist: ")


def test_fairseq_interactive_says_which_sentence_is_too_long(model_file):
    done = run_command(
        "fairseq-interactive", model_file.parent, "--path", model_file, "--user-dir", "fairseq_el",
        "--source-lang", "source", "--target-lang", "target", input="7 " * 40,
    )  # fmt: skip
    assert_one_line(
        done, "sentence 0 has 41 source tokens, the model has positions for 32: shorten it"
    )
