"""make_checkpoint.py --release: the command that it prints finds what stock fairseq finds on the same files."""

import os
import shlex
import sys

import pytest
import torch
from fairseq.data import Dictionary

from helpers import run_command
from make_checkpoint import main
from released_layouts import RELEASES

TINY = [
    word
    for side in ("encoder", "decoder")
    for setting in ("layers=2", "embed_dim=32", "ffn_embed_dim=64", "attention_heads=4")
    for word in ("--set", f"{side}_{setting}")
]


@pytest.fixture
def make(monkeypatch, capsys):
    """Runs the script in this process; returns the words of the command that it suggests."""

    def run(*words) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", *map(str, words), *TINY])
        main()
        return shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("try: "))

    return run


def hypotheses(words: list[str]) -> dict[str, tuple[str, float]]:
    """Of a command line. Stock fairseq can't load its own settings since torch 2.6, unless torch is told so."""
    done = run_command(*words, env=os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line[2:].split("\t") for line in done.stdout.splitlines() if line.startswith("H-")]
    return {number: (text, float(score)) for number, score, text in lines}


@pytest.mark.parametrize("release", ["m2m100_418M", "nllb200_600M", "mbart50", "s2t_transformer_s"])
def test_the_suggested_command_finds_what_stock_finds(release, make, tmp_path):
    suggested = make(
        "--release", release, "--output", tmp_path / "a folder", "--vocab", 300, "--sentences", 5, "--source-length", 20
    )
    ours = hypotheses(suggested)
    user_dir = suggested.index("--user-dir")
    whole_set = ["--required-batch-size-multiple", "1"]  # else stock leaves out the sentences beyond a multiple of 8
    theirs = hypotheses(suggested[:user_dir] + suggested[user_dir + 2 :] + whole_set)
    assert len(theirs) == 5 == len({text for text, _ in theirs.values()})
    assert {number: text for number, (text, _) in ours.items()} == {n: text for n, (text, _) in theirs.items()}
    for number, (_, score) in theirs.items():
        assert ours[number][1] == pytest.approx(score, abs=1e-3)


def test_the_dictionary_of_a_release_is_as_long_as_its_embedding(make, tmp_path):
    make("--release", "m2m100_418M", "--output", tmp_path)
    weights = torch.load(tmp_path / "model.pt", weights_only=False)["model"]
    rows = weights["decoder.embed_tokens.weight"].size(0)
    assert rows == RELEASES["m2m100_418M"].rows == len(Dictionary.load(str(tmp_path / "model_dict.128k.txt")))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--vocab 112", "a vocabulary of 112 has no room for words: use 113 or more"),
        ("--set encoder_layer=2", "transformer_wmt_en_de_big has no setting encoder_layer: check the spelling"),
        ("--legacy", "--mask and --legacy go with --arch"),
    ],
)
def test_a_mistake_is_answered_in_one_line(wrong, message, make, tmp_path):
    with pytest.raises(SystemExit) as ended:
        make("--release", "m2m100_418M", "--output", tmp_path, *wrong.split())
    assert str(ended.value).startswith(f"make_checkpoint: error: {message}") and "\n" not in str(ended.value)
