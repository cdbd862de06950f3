"""Promises about the demo: its data, the script behind `make summarize`, and its recipe."""

import argparse
import importlib
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from rouge_score.rouge_scorer import RougeScorer

import demo  # scripts/demo.py
from helpers import DEMO, ROOT, run_command

sys.path.insert(0, str(DEMO / "recipe"))
LIMIT = 8


def read_words(name: str) -> list[list[str]]:
    return [line.split() for line in (DEMO / name).read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def checkpoint() -> dict:
    return torch.load(DEMO / "model.pt", map_location="cpu", weights_only=True)


# ---- the data


def test_the_test_set_is_whole():
    sources, targets = read_words("test.source"), read_words("test.target")
    assert len(sources) == len(targets) == 1000
    assert all(25 <= len(words) <= 220 for words in sources)
    assert all(3 <= len(words) <= 14 for words in targets)


def test_the_model_is_in_half_precision_and_small(checkpoint):
    assert {tensor.dtype for tensor in checkpoint["model"].values()} == {torch.float16}
    assert checkpoint["last_optimizer_state"] is None
    assert (DEMO / "model.pt").stat().st_size < 8_000_000


def test_pieces_dictionary_and_model_fit_together(checkpoint):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(DEMO / "sentencepiece.model"))
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    entries = [words[0] for words in read_words("dict.txt")]
    assert entries == [piece for piece in pieces if piece != "<unk>"] + ["<mask>"]
    special_symbols = 4
    assert len(checkpoint["model"]["encoder.embed_tokens.weight"]) == len(entries) + special_symbols


# ---- make summarize


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The current folder of the demo, not the checkout."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def build(folder) -> Path:
    return folder / "build" / "demo"


@pytest.fixture(scope="module")
def summarize(folder):
    """A short `make summarize`, end to end."""
    return run_command(sys.executable, ROOT / "scripts" / "demo.py", "--limit", LIMIT, cwd=folder)


def row(output: str, system: str) -> list[str]:
    """The numbers of one system in the printed table."""
    return re.search(rf"^ *{system} +(\S.*) bytes", output, re.MULTILINE)[1].split()


def test_summarize_shows_examples_and_identical_hypotheses(summarize):
    assert summarize.returncode == 0, summarize.stderr
    assert f"{LIMIT} of {LIMIT} hypotheses are identical" in summarize.stdout
    assert len(re.findall(r"^  summary    \S", summarize.stdout, re.MULTILINE)) == 5


def test_summarize_is_clean_and_shows_progress(summarize):
    assert not re.search("warning|debug|deprecat|traceback", summarize.stdout, re.IGNORECASE)
    bars = [line for line in re.split("[\r\n]+", summarize.stderr) if line.strip()]
    assert all(bar.startswith(tuple(demo.SYSTEMS)) for bar in bars)  # and nothing else
    for system in demo.SYSTEMS:
        states = [bar for bar in bars if bar.startswith(system)]
        assert "loading" in " ".join(states) and f"{LIMIT}/{LIMIT}" in states[-1]


@pytest.mark.parametrize("system", demo.SYSTEMS)
def test_printed_rouge_is_that_of_rouge_score(summarize, build, system):
    log = (build / f"first-{LIMIT}" / f"{system.replace(' ', '-')}.log").read_text(encoding="utf-8")
    summaries = {int(i): text for i, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", log, re.MULTILINE)}
    references = (DEMO / "test.target").read_text(encoding="utf-8").split("\n")
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for column, kind in enumerate(["rouge1", "rouge2", "rougeL"]):
        scores = [scorer.score(references[i], summaries[i])[kind].fmeasure for i in range(LIMIT)]
        assert float(row(summarize.stdout, system)[column]) == pytest.approx(
            100 * sum(scores) / LIMIT, abs=0.005
        )


def test_stock_state_is_keys_values_and_the_encoders_tensors(summarize, build):
    """The gauge against the sizes of BART's caches: all texts here are one batch."""
    pieces = (build / f"first-{LIMIT}" / "pieces.source").read_text(encoding="utf-8").split("\n")
    length = max(len(line.split()) for line in pieces) + 1  # and the end of the sentence
    layers, width, float_size = 2, 192, 4
    keys_and_values = 2 * layers * LIMIT * length * width * float_size
    output_and_embedding = 2 * LIMIT * length * width * float_size
    mask, lengths = LIMIT * length, LIMIT * 4
    stock_bytes = int(row(summarize.stdout, "stock fairseq")[-1].replace(",", ""))
    assert stock_bytes == keys_and_values + output_and_embedding + mask + lengths
    assert 0 < int(row(summarize.stdout, "fairseq_el")[-1].replace(",", "")) < stock_bytes


def test_data_is_prepared_once_and_again_when_it_changes(tmp_path, capsys):
    copy = tmp_path / "demo"
    shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("model.pt", "recipe"))
    build = tmp_path / "build"
    assert demo.prepare(copy, build, 2) == demo.prepare(copy, build, 2)
    assert capsys.readouterr().out.count("Preparing") == 1
    (copy / "test.source").write_text("another text\n" * 1000)
    demo.prepare(copy, build, 2)
    assert capsys.readouterr().out.count("Preparing") == 1


def test_a_failing_command_is_shown_with_its_last_words(tmp_path):
    copy = tmp_path / "demo"
    shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("recipe"))
    (copy / "model.pt").write_bytes(b"not a checkpoint")
    options = "--limit", 1, "--demo", copy, "--results-path", tmp_path / "build"
    failed = run_command(sys.executable, "scripts/demo.py", *options)
    assert failed.returncode == 1
    assert "fairseq-generate" in failed.stderr.splitlines()[-1]  # the command, to try by hand
    log = (tmp_path / "build" / "first-1" / "stock-fairseq.log").read_text(encoding="utf-8")
    assert log.splitlines()[-1] in failed.stderr  # what it said last
    assert "scripts/demo.py" not in failed.stderr  # and no traceback of our own


# ---- the recipe


def make_index(families: int, family_size: int) -> str:
    """A package index in which the packages of a family have descriptions that begin alike."""
    words = "alpha beta gamma delta omega".split()
    records = []
    for family in range(families):
        opening = " ".join(random.Random(family).choices(words, k=12))
        for member in range(family_size):
            records.append(
                f"Package: p{family}-{member}\n"
                "Description-md5: 0\n"
                f"Description-en: synopsis of {family} {member}\n"
                f" {family} {opening}\n .\n"
                f" and member {member} of the family in a second paragraph\n"
                f" with  more {'words ' * 8}\n"
            )
    return "\n".join(records)


def test_recipe_joins_paragraphs_to_one_line():
    pairs = importlib.import_module("pairs")
    index = "Package: p\nDescription-en: a synopsis\n One\n  line.\n .\n And  another.\n"
    assert pairs.read_index(index) == [("p", "One line. And another.", "a synopsis")]


def test_recipe_never_splits_a_family():
    pairs = importlib.import_module("pairs")
    splits = pairs.split_by_family(pairs.keep_usable(pairs.read_index(make_index(1700, 8))))
    families = {name: {p.synopsis.split()[2] for p in split} for name, split in splits.items()}
    assert [len(families[name]) for name in ("test", "valid", "train")] == [1000, 600, 100]
    assert len(set.union(*families.values())) == 1700
    assert len(splits["test"]) == 1000 and len(splits["train"]) == 100 * 6


def test_recipe_adds_nothing_that_has_to_do_with_what_is_held_out():
    pairs = importlib.import_module("pairs")

    def pair(package: str, opening: str, synopsis: str) -> tuple:
        rest = " ".join(f"{opening.split()[0]}{i}" for i in range(15))
        return pairs.Pair(package, f"{opening} {rest}", synopsis)

    held_out = pair("p", "the held out description of a package that nobody may see", "tool to be tested")
    known = pair("q", "known text for training about quite other things than that", "tool to train on")
    copied = " ".join(held_out.description.split()[4:])
    more = [
        pair("p", "another text of the same package in another release altogether", "tool of another name"),
        pair("p-extra", "the held out description of a package that everybody sees", "tool of the same family"),
        pair("r", "some text of another package with the same line to learn", "tool to be tested"),
        pairs.Pair("s", f"copy of {copied}", "tool with a copied text"),
        pair("t", "something new that is in the other release alone and long", "tool to train on"),
        pair("u", "something quite new that only the other release has to say", "tool that is new"),
        pairs.Pair("v", "too short", "tool without a description"),
    ]
    splits = {"test": [held_out], "valid": [], "train": [known]}
    assert [added.package for added in pairs.new_pairs(more, splits)] == ["u"]


def test_recipe_masks_about_a_quarter_and_keeps_the_rest_in_order():
    infill = importlib.import_module("infill")
    rng = random.Random(0)
    segment = [f"piece{i}" for i in range(24)]
    shares = []
    for _ in range(300):
        masked = infill.mask_spans(segment, rng)
        kept = [piece for piece in masked if piece != "<mask>"]
        assert kept == sorted(kept, key=segment.index)
        shares.append(1 - len(kept) / len(segment))
    assert max(shares) <= 0.25
    assert 0.1 < sum(shares) / len(shares) < 0.25


@pytest.fixture(scope="module")
def fresh_model():
    """The model as the recipe's training begins with it."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    importlib.import_module("copy_init")
    dictionary = Dictionary.load(str(DEMO / "dict.txt"))
    options = argparse.Namespace(max_source_positions=512, max_target_positions=128)
    ARCH_CONFIG_REGISTRY["bart_copy_init_demo"](options)
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY["bart_copy_init_demo"].build_model(options, task)


def test_recipe_trains_the_very_architecture_of_the_demo(fresh_model, checkpoint):
    def shapes(weights):
        return {name: tensor.shape for name, tensor in weights.items()}

    assert shapes(fresh_model.state_dict()) == shapes(checkpoint["model"])


def test_recipe_begins_with_attention_that_copies(fresh_model):
    for layer in fresh_model.decoder.layers:
        attention = layer.encoder_attn
        x = torch.randn(5, 192)
        torch.testing.assert_close(attention.out_proj(attention.v_proj(x)), x, atol=1e-5, rtol=0)
        assert torch.equal(attention.q_proj.weight, attention.k_proj.weight)
    embeddings = fresh_model.encoder.embed_tokens.weight
    assert fresh_model.decoder.output_projection.weight is embeddings
    assert embeddings.std().item() == pytest.approx(192**-0.5, rel=0.01)
    source, target = (x.embed_positions.weight for x in (fresh_model.encoder, fresh_model.decoder))
    assert torch.equal(source[: len(target)], target)


def test_recipe_exports_the_mean_in_half_precision_with_tied_weights_stored_once(fresh_model, tmp_path):
    options = argparse.Namespace(arch="bart_copy_init_demo", user_dir="here", data="there")
    state = {
        "cfg": {"model": options, "common": {"user_dir": "here"}, "checkpoint": {}, "task": {}},
        "model": fresh_model.state_dict(),
        "extra_state": {"train_iterator": {"epoch": 3, "shuffle": True}, "best": 1.0},
        "last_optimizer_state": {"momentum": torch.zeros(10_000_000)},
        "optimizer_history": [{"num_updates": 1}, {"num_updates": 2, "lr_scheduler_state": {"best": 1.0}}],
        "criterion": None,
    }
    checkpoints = [str(tmp_path / name) for name in ("earlier.pt", "later.pt")]
    torch.save(state, checkpoints[0])
    moved = {name: tensor + 2 for name, tensor in state["model"].items()}
    torch.save(state | {"model": moved}, checkpoints[1])
    exported = tmp_path / "model.pt"
    importlib.import_module("export").main(str(exported), *checkpoints)

    assert exported.stat().st_size < 8_000_000
    loaded = torch.load(exported, weights_only=True)
    assert loaded["cfg"]["model"].arch == "bart_base"
    assert loaded["cfg"]["common"]["user_dir"] is None
    assert loaded["optimizer_history"] == [{"num_updates": 2, "lr_scheduler_state": {}}]
    for name, tensor in fresh_model.state_dict().items():
        torch.testing.assert_close(loaded["model"][name], (tensor + 1).half(), atol=1e-3, rtol=1e-3)
