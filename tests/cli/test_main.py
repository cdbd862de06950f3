"""`fairseq-el`: help at once and complete, mistakes in one line, the same from `python -m`."""

import argparse
import re
import subprocess
import sys

import pytest

from fairseq_el import __version__
from fairseq_el.cli import main as command
from fairseq_el.cli import options, prepare
from fairseq_el.jobs import inputs, presets, summarizer
from helpers import run_command

COMMANDS = ["summarize", "translate", "serve", "evaluate", "score", "prepare", "convert", "merge", "info"]
HEAVY = {"torch", "fairseq", "numpy", "omegaconf", "hydra", "tqdm", "yaml"}
PARSER, PARSERS = options.build_parser()


def started(*words: str, module: bool = False) -> subprocess.CompletedProcess:
    """The command in a process of its own, which ends by printing the heavy libraries that it has imported."""
    start = "sys.argv[0] = 'fairseq-el'; from fairseq_el.cli.main import main; main()"
    code = (
        f"import atexit, sys; sys.argv = ['-c', *{list(words)!r}];"
        f"atexit.register(lambda: print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)); {start}"
    )
    return run_command(sys.executable, *(["-m", "fairseq_el", *words] if module else ["-c", code]))


def test_there_is_one_command_for_all_that_users_run():
    assert list(PARSERS) == COMMANDS


@pytest.mark.parametrize("words", [["--help"], [], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_no_library_that_takes_time(words):
    done = started(*words)
    assert (done.returncode, done.stderr.split()) == (0, ["HEAVY"])
    assert done.stdout.startswith("usage: fairseq-el")
    for name in COMMANDS if words in ([], ["--help"]) else words[:1]:
        assert name in done.stdout


def test_the_module_is_the_command():
    assert started("summarize", "--help", module=True).stdout == started("summarize", "--help").stdout
    code = "import sys; sys.argv = ['-m', 'info']; sys.orig_argv = ['python', '-mfairseq_el', 'info']"
    done = run_command(sys.executable, "-c", f"{code}; import fairseq_el; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_other_programs_get_the_plugin_whatever_their_arguments():
    """`python -m program fairseq_el`, while the packages of the program are imported."""
    code = "import sys; sys.argv = ['-m', 'fairseq_el']; sys.orig_argv = ['python', '-m', 'program', 'fairseq_el']"
    registry = "from fairseq.tasks import TASK_REGISTRY; print('el_translation' in TASK_REGISTRY)"
    done = run_command(sys.executable, "-c", f"{code}; import fairseq_el; {registry}")
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_with_its_default(name):
    for action in PARSERS[name]._actions:
        assert action.help, action.option_strings
        if action.default not in (None, False, argparse.SUPPRESS):
            assert f"default: {as_shown(action.default)}" in action.help, action.option_strings
        if action.option_strings and action.nargs != 0 and not action.required:
            assert "(default: " in action.help, action.option_strings


def as_shown(default) -> str:
    return "all that exist" if default == ["train", "valid", "test"] else str(default)


def test_the_parsers_know_what_the_modules_do():
    """Choices are written out in the parsers, which can't import the modules that own them."""
    choices = {
        (name, action.dest): action.choices for name, parser in PARSERS.items() for action in parser._actions
    }
    assert choices["summarize", "on_error"] == summarizer.ON_ERROR
    assert choices["prepare", "dataset"] == tuple(prepare.DATA_SETS)
    assert choices["prepare", "splits"] == tuple(prepare.SPLITS)
    helps = {action.dest: action.help for action in PARSERS["summarize"]._actions}
    assert ", ".join(inputs.TEXT_FIELDS) in helps["text_field"]
    assert ", ".join(presets.names()) in helps["preset"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sumarize"], r"fairseq-el: error: .*invalid choice: 'sumarize' \(choose from '?summarize"),
        (["--beam=2"], "fairseq-el: error: unrecognized arguments: --beam=2"),
        (["merge", "a", "--output", "b", "--best"], "merge: error: unrecognized arguments: --best"),
        (["summarize"], "summarize: error: the following arguments are required: --model "),
        (["summarize", "--model", "m", "--preset", "p", "--nbest", "0"], "--nbest 0 is out of range: at least 1"),
        (["summarize", "--model", "m", "--preset", "p", "--stock", "--el-attention", "auto"], "not allowed with"),
        (["convert", "a", "b", "--precision", "int4"], "convert: error: .*invalid choice: 'int4'"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert re.search(message, said.err) and said.err.count("\n") == 1 and said.out == ""
    assert re.search(r"\(fairseq-el( \w+)? --help lists the options\)$", said.err)


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fairseq_el {__version__}\n")


def test_generation_options_are_passed_on_by_their_names_in_presets():
    words = ["--model", "m", "--preset", "p", "--beam", "2", "--lenpen=1.5", "--el-stock-ngrams", "--min-len", "-1"]
    args = options.parse(["summarize", *words, "--el-attention", "never", "--input", "in"])
    expected = {"beam": "2", "lenpen": "1.5", "el_stock_ngrams": "true", "min_len": "-1", "el_attention": "never"}
    assert args.changes == expected
    assert (args.input, args.stock, args.search) == ("in", False, "beam")


def test_a_command_that_needs_no_model_starts_without_torch(tmp_path):
    done = started("merge", str(tmp_path / "none"), "--output", str(tmp_path / "out"))
    assert done.returncode == 1
    error, imported = done.stderr.splitlines()
    assert error.startswith("merge: error: ") and imported == "HEAVY"
