"""Damaged and malicious files, and texts of any kind: a right result or an error of one line, never anything else.

The cases are the same at every run; `pytest tests/jobs/test_hostile.py --hypothesis-profile explore` tries ten times as
many new ones.
"""
# Over 400 lines: all kinds of damage share the means to make and judge it.

import contextlib
import copy
import json
import math
import os
import re
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import pytest
import sentencepiece
import torch
from fairseq import checkpoint_utils
from fairseq_cli import generate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fairseq_el.checkpoints import loading, validation
from fairseq_el.cli import summarize
from fairseq_el.errors import UserError, explain
from fairseq_el.jobs import presets
from fairseq_el.jobs.inputs import Texts
from fairseq_el.jobs.journal import Journal
from fairseq_el.jobs.output import as_json
from fairseq_el.jobs.shards import Part, Shard
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.text.sentences import one_line
from fairseq_el.text.vocabulary import load_dictionary, load_encoding
from helpers import DEMO, exit_of, write_gpt2_encoding
from make_checkpoint import make_checkpoint

LEAST_CASES = 2_000
LONGEST = 60  # seconds that a case may take, which are a hang
TINY = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 8, "decoder_embed_dim": 8,
    "encoder_ffn_embed_dim": 8, "decoder_ffn_embed_dim": 8, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "max_source_positions": 32, "max_target_positions": 32,
}  # fmt: skip
TINY_LM = {
    "decoder_layers": 1, "decoder_embed_dim": 8, "decoder_output_dim": 8, "decoder_input_dim": 8,
    "decoder_ffn_embed_dim": 8, "decoder_attention_heads": 2, "share_decoder_input_output_embed": True,
    "tokens_per_sample": 32, "max_target_positions": 32, "decoder_learned_pos": True,
}  # fmt: skip
SHORT = {"beam": 2, "max_len_b": 5, "min_len": 1}
TEXTS = ["the cat sat there", "a"]

planned: dict[str, int] = {}
done: dict[str, int] = {}


def cases(number: int):
    """So many cases of a property, counted."""

    def decorate(test):
        planned[test.__name__] = number
        scale = 1 if settings().derandomize else 10
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
        phases = [Phase.reuse, Phase.generate]  # smaller examples of a failure take longer to find than it to read
        few = settings(max_examples=number * scale, deadline=None, suppress_health_check=checks, phases=phases)
        return few(test)

    return decorate


@contextlib.contextmanager
def case(name: str):
    """One case, which counts when it ends, and must."""

    def hang(*_):
        raise AssertionError(f"no end after {LONGEST} seconds")

    previous = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    done[name] = done.get(name, 0) + 1


def result_or_line(function, *arguments, **options):
    """What a function returns, or the line of its `UserError`; other exceptions fail the test."""
    try:
        return function(*arguments, **options), ""
    except UserError as error:
        assert re.fullmatch(r"[^\n\r]{20,2000}", str(error)), error
        return None, str(error)


# ---- models to damage, each made once


@pytest.fixture(scope="module")
def bart(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bart")
    rows = write_gpt2_encoding(folder)
    make_checkpoint("bart_base", folder, vocab=rows, settings=TINY, sentences=8, source_length=10)
    for name in ("dict.source.txt", "dict.target.txt"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def old_bart(tmp_path_factory, bart) -> Path:
    """In the format of 2019, which has no checksums."""
    folder = tmp_path_factory.mktemp("old")
    make_checkpoint("bart_base", folder, vocab=write_gpt2_encoding(folder), settings=TINY, legacy=True)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    make_checkpoint("transformer_lm_gpt", folder, vocab=write_gpt2_encoding(folder), settings=TINY_LM)
    return folder


@pytest.fixture(scope="module")
def hurt(tmp_path_factory, bart) -> Path:
    """A copy of the folder, to put a damaged file into."""
    return shutil.copytree(bart, tmp_path_factory.mktemp("hurt") / "model")


@pytest.fixture(scope="module")
def state(bart):
    return torch.load(bart / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def summarizer(bart) -> Summarizer:
    return Summarizer.load(bart, "xsum", **SHORT)


def summaries_of(folder: Path, **options) -> list[str]:
    return Summarizer.load(folder, "xsum", **SHORT, **options)(TEXTS)


# ---- damage


KINDS = ("cut", "flip", "byte", "insert", "delete", "repeat")
SNIPPETS = (
    b"\0", b"\xff", b"\n", b"\r\n", "\u2028".encode(), b" ", b"\xed\xa0\x80", b"<s> 1\n", b"{", b'"', b"]", b": 1e999",
    b"${x}", b"\xef\xbb\xbf", b"9" * 5000, b"[" * 2000, b"-1", b"\t", b"&a [*a, *a]", b"!!python/name:os.system ",
)  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.integers(0, 2**32), st.integers(0, 255), st.integers(0, 60),
        st.sampled_from(SNIPPETS),
    ),  # fmt: skip
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, edits) -> bytes:
    changed = bytearray(content)
    for kind, place, byte, length, snippet in edits:
        place %= len(changed) + 1
        part = changed[place : place + length]
        if kind == "cut":
            del changed[place:]
        elif kind == "flip" and part:
            changed[place] ^= 1 << byte % 8
        elif kind == "byte":
            changed[place : place + 1] = bytes([byte])
        elif kind == "insert":
            changed[place:place] = snippet
        elif kind == "delete":
            changed[place : place + length] = b""
        elif kind == "repeat":
            changed[place:place] = part
    return bytes(changed)


# ---- checkpoints: the file


def assert_same_state(found, expected) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for name, weight in expected["model"].items():
        assert torch.equal(weight, found["model"][name]), name
    rest = [{name: str(value) for name, value in s.items() if name != "model"} for s in (found, expected)]
    assert rest[0] == rest[1]


@given(place=st.integers(0, 2**40))
@cases(350)
def test_a_flipped_bit_is_noticed_or_changes_nothing(bart, hurt, state, place):
    with case("flip"):
        content = bytearray((bart / "model.pt").read_bytes())
        place %= 8 * len(content)
        content[place // 8] ^= 1 << place % 8
        (hurt / "model.pt").write_bytes(content)
        found, line = result_or_line(loading.load, hurt / "model.pt")
        if not line:
            assert_same_state(found, state)


@given(is_old=st.booleans(), size=st.integers(0, 2**40))
@cases(100)
def test_a_cut_checkpoint_is_refused(bart, old_bart, hurt, is_old, size):
    with case("cut"):
        content = ((old_bart if is_old else bart) / "model.pt").read_bytes()
        (hurt / "model.pt").write_bytes(content[: size % len(content)])
        for load in (loading.load, lambda path: Summarizer.load(path.parent, "xsum")):
            assert re.search("not a complete checkpoint|was refused", result_or_line(load, hurt / "model.pt")[1])


@given(is_old=st.booleans(), edits=EDITS)
@cases(100)
def test_a_damaged_checkpoint_gives_a_line_or_summaries(bart, old_bart, hurt, is_old, edits):
    with case("damage"):
        (hurt / "model.pt").write_bytes(damaged(((old_bart if is_old else bart) / "model.pt").read_bytes(), edits))
        found, line = result_or_line(summaries_of, hurt)
        assert line or len(found) == len(TEXTS)


# ---- checkpoints: settings and weights

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([10**5, 10**9, 2**31, 10**30, math.nan, math.inf]),
    st.floats(-2, 2), st.text(max_size=5), st.sampled_from(["${x}", "${oc.env:HOME}", "1,2", "/dev/zero", "???"]),
    st.lists(st.integers(-1, 3), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.binary(max_size=3), st.builds(torch.zeros, st.integers(0, 3)),
)  # fmt: skip
SETTINGS = (
    *TINY, "arch", "_name", "dropout", "attention_dropout", "activation_fn", "share_all_embeddings",
    "encoder_embed_path", "decoder_embed_path", "encoder_normalize_before", "layernorm_embedding",
    "encoder_learned_pos", "decoder_layers_to_keep", "no_cross_attention", "cross_self_attention",
    "adaptive_softmax_cutoff", "no_token_positional_embeddings", "decoder_output_dim", "decoder_input_dim",
    "quant_noise_pq", "max_positions", "encoder_layerdrop", "checkpoint_activations", "base_layers", "export",
    "no_scale_embedding", "something_new",
)  # fmt: skip


def save(state, folder: Path) -> Path:
    torch.save(state, folder / "model.pt")
    return folder


@given(name=st.sampled_from(SETTINGS), value=VALUES)
@cases(120)
def test_any_value_of_a_setting_gives_a_line_or_summaries(hurt, state, name, value):
    with case("settings"):
        changed = copy.copy(state)
        changed["cfg"] = copy.deepcopy(state["cfg"])
        setattr(changed["cfg"]["model"], name, value)
        found, line = result_or_line(summaries_of, save(changed, hurt))
        assert line or len(found) == len(TEXTS)


@given(place=st.sampled_from(["args", "cfg", "model", "task_state", "extra_state", "optimizer_history", "cfg.task",
    "cfg.model", "cfg.generation", "cfg.task._name", "cfg.task.source_lang"]), value=VALUES)  # fmt: skip
@cases(60)
def test_any_value_of_a_part_gives_a_line_or_summaries(hurt, state, place, value):
    with case("parts"):
        changed = copy.copy(state)
        changed["cfg"] = copy.deepcopy(state["cfg"])
        *path, last = place.split(".")
        inner = changed
        for step in path:
            inner = inner[step]
        inner[last] = value
        found, line = result_or_line(summaries_of, save(changed, hurt))
        assert line or len(found) == len(TEXTS)


def spoilt(weight: torch.Tensor, kind: str):
    """A weight of another kind than a model has."""
    return {
        "none": None, "number": 3, "text": "weight", "empty": torch.zeros(0), "scalar": torch.tensor(1.0),
        "transposed": weight.flatten()[None], "longer": torch.cat([weight.reshape(1, -1)] * 2, dim=1),
        "huge": torch.zeros(1).expand(10**12), "sparse": weight.float().to_sparse(), "complex": weight.cfloat(),
        "whole numbers": weight.long(), "truth values": weight.bool(), "without data": weight.to("meta"),
        "quantized": torch.quantize_per_tensor(weight.float(), 0.1, 0, torch.qint8),
    }[kind]  # fmt: skip


SPOILT = ("none", "number", "text", "empty", "scalar", "transposed", "longer", "huge", "sparse", "complex",
    "whole numbers", "truth values", "without data", "quantized", "missing", "renamed")  # fmt: skip


@given(place=st.integers(0, 2**32), kind=st.sampled_from(SPOILT), new_name=st.text(max_size=9) | st.integers())
@cases(80)
def test_weights_of_another_kind_are_refused(hurt, state, place, kind, new_name):
    with case("weights"):
        changed = {**state, "model": dict(state["model"])}
        learned = [name for name in state["model"] if "layers" in name or "embed_positions" in name]
        name = learned[place % len(learned)]
        weight = changed["model"].pop(name)
        if kind == "renamed":
            changed["model"][new_name] = weight
        elif kind != "missing":
            changed["model"][name] = spoilt(weight, kind)
        assert result_or_line(summaries_of, save(changed, hurt))[1]


@given(
    name=st.sampled_from(["adaptive_softmax_cutoff", "character_filters", "encoder_layers", "something_new"]),
    before=st.sampled_from(["", " ", "\n", "[3, ", "0 or ", "(lambda: 3) or ", "{1: ", "f'{", "'%d' % "]),
    arch=st.sampled_from(["bart_base", "transformer", "fconv", "lightconv"]),
)
@cases(40)
def test_code_in_settings_never_runs(hurt, state, tmp_path_factory, name, before, arch):
    """fairseq evaluates some settings; files that use that are as plain as others to torch."""
    victim = tmp_path_factory.getbasetemp() / "victim"
    closing = {"[3, ": "]", "{1: ": "}", "f'{": "}'"}.get(before, "")
    payload = f'{before}__import__("os").system("touch {victim}"){closing}'
    with case("code"):
        changed = {**state, "cfg": copy.deepcopy(state["cfg"])}
        for key, value in ((name, payload), ("arch", arch), ("_name", arch)):
            setattr(changed["cfg"]["model"], key, value)
        assert "holds code" in result_or_line(summaries_of, save(changed, hurt))[1]
        assert not victim.exists()


def test_the_code_is_real(hurt, state, tmp_path, monkeypatch):
    """Without our look at settings it runs, and the test above can fail."""
    changed = {**state, "cfg": copy.deepcopy(state["cfg"])}
    payload = f"__import__('os').system('touch {tmp_path / 'victim'}')"
    changed["cfg"]["model"].adaptive_softmax_cutoff = payload
    monkeypatch.setattr(validation, "_holds_code", lambda text: False)
    with pytest.raises(UserError):
        summaries_of(save(changed, hurt))
    assert (tmp_path / "victim").exists()


@pytest.mark.parametrize("text", ["[(512, 3)] * 20", "(0.9, 0.999)", '{"beam": 4, "lenpen": 1.0}', "data-bin/en.de",
    "[(512, 10, 5)] + [(512, 3, 2)] * 4 + [(512,2,2)] * 2", "True", "tcp://host:1", "en-de,en-fr", "1e-4", "",
    "a b c"])  # fmt: skip
def test_what_trainings_leave_in_settings_is_no_code(text):
    assert not validation._holds_code(text)


@pytest.mark.parametrize("text", ["9**9**9**9", "[0] * 10 ** 9", "[0] * 1000000", "'a' * 1000 * 1000", "1 << 10**10",
    "'%999999999d' % 1", "x[0]", "[a for a in b]", "a * b", "1," * 10_000, "-" * 9000 + "1"])  # fmt: skip
def test_what_takes_for_ever_is_code(text):
    assert validation._holds_code(text)


# ---- checkpoints: sizes that a file claims


def rewritten(source: Path, target: Path, compression: int, extra: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
        for name, content in extra.items():
            new.writestr(name, content)
    return target


def test_an_archive_that_would_grow_is_refused(bart, hurt):
    """100 MB of zeros in a file of 150 KB: torch would inflate them."""
    bomb = rewritten(bart / "model.pt", hurt / "model.pt", zipfile.ZIP_DEFLATED, {"model/data/99": bytes(10**8)})
    assert bomb.stat().st_size < 200_000
    for load in (loading.load, lambda path: Summarizer.load(path.parent, "xsum")):
        assert "claims to hold more" in result_or_line(load, bomb)[1]


@given(claim=st.integers(1, 2**32 - 2), member=st.integers(0, 10**6), which=st.sampled_from(["both", "size", "packed"]))
@cases(100)
def test_a_member_that_claims_another_size_is_refused(bart, hurt, claim, member, which):
    with case("claims"):
        content = bytearray((bart / "model.pt").read_bytes())
        entries = [m.start() for m in re.finditer(b"PK\x01\x02", content)]  # of the directory at the end
        entry = entries[member % len(entries)]
        actual = int.from_bytes(content[entry + 24 : entry + 28], "little")
        for offset in {"both": (20, 24), "size": (24,), "packed": (20,)}[which]:
            content[entry + offset : entry + offset + 4] = claim.to_bytes(4, "little")
        (hurt / "model.pt").write_bytes(content)
        _, line = result_or_line(loading.load, hurt / "model.pt")
        assert line or claim == actual


@pytest.mark.parametrize("name, value", [("encoder_layers", 10**6), ("decoder_layers", 10**12),
    ("encoder_embed_dim", 10**6), ("decoder_ffn_embed_dim", 10**7), ("max_source_positions", 10**10)])  # fmt: skip
def test_a_model_larger_than_its_file_is_not_built(hurt, state, name, value):
    changed = {**state, "cfg": copy.deepcopy(state["cfg"])}
    setattr(changed["cfg"]["model"], name, value)
    with case("large"):
        assert "settings are damaged" in result_or_line(summaries_of, save(changed, hurt))[1]


# ---- NaN


@given(
    place=st.integers(0, 2**32), element=st.integers(0, 2**32), is_half=st.booleans(),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
)  # fmt: skip
@cases(100)
def test_one_weight_that_is_nan_is_named(hurt, state, place, element, value, is_half):
    """At once: not all of them show in what the model predicts, see below."""
    with case("nan"):
        names = [name for name, weight in state["model"].items() if weight.dim()]
        name = names[place % len(names)]
        weight = state["model"][name].clone() if is_half else state["model"][name].float()
        weight.view(-1)[element % weight.numel()] = value
        changed = {**state, "model": state["model"] | {name: weight}}
        assert f"{name} has NaN or infinite numbers" in result_or_line(summaries_of, save(changed, hurt))[1]


def test_attention_hides_nan(hurt, state, monkeypatch):
    """So without a look at the weights there would be a summary, and another one than the model's."""
    name = "encoder.layers.0.self_attn.q_proj.weight"
    weight = state["model"][name].clone()
    weight[3, 3] = math.nan
    monkeypatch.setattr(torch, "aminmax", lambda weight: (0.0, 1.0))
    found = summaries_of(save({**state, "model": state["model"] | {name: weight}}, hurt))
    assert found != summaries_of(save(state, hurt)) and len(found) == len(TEXTS)


# ---- the command line of fairseq


def generated(folder: Path, data: Path, monkeypatch, *words) -> str:
    """Runs fairseq-generate in this process; returns the line that it ends with, "" if all is well."""
    command = ["fairseq-generate", data, "--path", folder / "model.pt", "--user-dir", "fairseq_el", "-s", "source",
        "-t", "target", "--max-len-b", 4, "--beam", 2, "--cpu", "--required-batch-size-multiple", 1,
        *words]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in command])
        try:
            generate.cli_main()
        except Exception as error:
            line = explain(error)
            assert line and "\n" not in line, repr(error)
            return line
    return ""


@pytest.fixture(scope="module")
def data(tmp_path_factory, bart) -> Path:
    """Test data in a folder with the dictionaries that fairseq-generate looks for."""
    folder = shutil.copytree(bart, tmp_path_factory.mktemp("data") / "bin")
    for side in ("source", "target"):
        shutil.copy(bart / "dict.txt", folder / f"dict.{side}.txt")
    return folder


def test_fairseq_generate_works_where_nothing_is_damaged(bart, data, monkeypatch, capsys):
    assert generated(bart, data, monkeypatch) == ""
    assert capsys.readouterr().out.count("\nH-") == 8


@given(kind=st.sampled_from(["flip", "setting", "weight", "code", "cut"]), place=st.integers(0, 2**32),
    name=st.sampled_from(SETTINGS), value=VALUES, spoil=st.sampled_from(SPOILT[:-2]))  # fmt: skip
@cases(24)
def test_fairseq_generate_ends_in_one_line(data, hurt, state, monkeypatch, capsys, kind, place, name, value, spoil):
    victim = hurt / "victim"
    with case("generate"):
        changed = {**state, "cfg": copy.deepcopy(state["cfg"]), "model": dict(state["model"])}
        if kind == "setting":
            setattr(changed["cfg"]["model"], name, value)
        if kind == "code":
            changed["cfg"]["model"].adaptive_softmax_cutoff = f"__import__('os').system('touch {victim}')"
        if kind == "weight":
            weight = sorted(state["model"])[place % len(state["model"])]
            changed["model"][weight] = spoilt(state["model"][weight], spoil)
        content = save(changed, hurt).joinpath("model.pt").read_bytes()
        if kind in ("flip", "cut"):
            place %= len(content) - 64
            damage = bytes([content[place] ^ 4]) + content[place + 1 :] if kind == "flip" else b""
            (hurt / "model.pt").write_bytes(content[:place] + damage)
        line = generated(hurt, data, monkeypatch)
        assert line or kind not in ("code", "cut")
        assert capsys.readouterr().out.count("\nH-") == (0 if line else 8)
        assert not victim.exists()


@pytest.mark.parametrize("words", [[], ["--diverse-beam-groups", 2], ["--sampling", "--nbest", 2]], ids=str)
def test_fairseq_generate_stops_at_nan_with_the_sentence(bart, data, monkeypatch, capsys, words):
    """A token that one sentence has is NaN to the encoder: that sentence is named, and nothing of its batch printed."""
    assert generated(bart, data, monkeypatch) == ""
    sources = {n: tokens.split() for n, tokens in re.findall(r"^S-(\d)\t(.*)$", capsys.readouterr().out, re.M)}
    number, token = next(
        (n, token) for n in "5341" for token in sources[n] if sum(token in others for others in sources.values()) == 1
    )
    load = checkpoint_utils.load_model_ensemble

    def load_spoilt(*arguments, **options):
        models, saved = load(*arguments, **options)
        nan = lambda _, inputs, out: out.masked_fill(inputs[0].eq(int(token) + 4).unsqueeze(-1), math.nan)  # noqa: E731
        models[0].encoder.embed_tokens.register_forward_hook(nan)
        return models, saved

    monkeypatch.setattr(checkpoint_utils, "load_model_ensemble", load_spoilt)
    line = generated(bart, data, monkeypatch, *words)
    assert line.startswith(f"sentence {number}: the model computes NaN or infinite scores")
    assert "H-" not in capsys.readouterr().out


# ---- dictionaries and encodings


@given(edits=EDITS)
@cases(150)
def test_a_damaged_dictionary_gives_a_line_or_a_dictionary(bart, hurt, edits):
    with case("dictionary"):
        path = hurt / "hurt.dict"
        path.write_bytes(damaged((bart / "dict.txt").read_bytes(), edits))
        found, line = result_or_line(load_dictionary, path)
        assert line or len(found) == len(set(found.symbols)) or b"#fairseq:overwrite" in path.read_bytes()


@given(edits=EDITS, which=st.sampled_from(["encoder.json", "vocab.bpe"]), text=st.text(max_size=30))
@cases(200)
def test_a_damaged_encoding_gives_a_line_or_encodes_everything(bart, hurt, edits, which, text):
    with case("encoding"):
        files = [hurt / f"hurt.{name}" for name in ("encoder.json", "vocab.bpe")]
        for path in files:
            content = (bart / path.name.removeprefix("hurt.")).read_bytes()
            path.write_bytes(damaged(content, edits) if path.name.endswith(which) else content)
        encoding, line = result_or_line(load_encoding, files)
        text = text.encode("utf-8", "replace").decode()
        assert line or encoding.decode(encoding.encode(text)) == text


@pytest.mark.parametrize("content", [b"word", b"word x\n", b"a 1\na 1\n", b"\xff 1\n", b"a 1\n"])
def test_fairseq_generate_names_a_damaged_dictionary(bart, data, tmp_path, monkeypatch, content):
    folder = shutil.copytree(data, tmp_path / "bin")
    (folder / "dict.target.txt").write_bytes(content)
    line = generated(bart, folder, monkeypatch)
    assert re.search("dict.target.txt is not a dictionary|share-all-embeddings requires a joined dictionary", line)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> bytes:
    """A small model of SentencePiece."""
    prefix = tmp_path_factory.mktemp("pieces") / "small"
    sentences = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[:50]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_prefix=str(prefix), vocab_size=120, minloglevel=2, num_threads=1
    )
    return prefix.with_suffix(".model").read_bytes()


@given(edits=EDITS, text=st.text(max_size=30))
@cases(150)
def test_a_damaged_model_of_sentencepiece_gives_a_line_or_pieces(pieces, hurt, edits, text):
    with case("sentencepiece"):
        (hurt / "hurt.model").write_bytes(damaged(pieces, edits))
        encoding, line = result_or_line(load_encoding, [hurt / "hurt.model"])
        text = text.encode("utf-8", "replace").decode()
        assert line or isinstance(encoding.decode(encoding.encode(text)), str)


@pytest.mark.parametrize("name", ["dict.txt", "encoder.json", "vocab.bpe"])
@pytest.mark.parametrize("content", [b"", b"\0", b"[]", b"{}", b"null", b"1", b"[" * 10**5, b"\xff", b'{"a": []}'])
def test_another_file_in_place_of_one_is_named(bart, tmp_path, name, content):
    folder = shutil.copytree(bart, tmp_path / "model")
    (folder / name).write_bytes(content)
    line = result_or_line(Summarizer.load, folder, "xsum")[1]
    assert name in line or "dictionary" in line


def test_half_of_the_merges_are_no_encoding(bart, tmp_path):
    """They would do, and yield pieces that the model has not been trained on."""
    folder = shutil.copytree(bart, tmp_path / "model")
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "vocab.bpe").write_text("".join(lines[:5]), encoding="utf-8")
    assert "vocab.bpe does not make" in result_or_line(Summarizer.load, folder, "xsum")[1]


# ---- presets


@given(preset=st.sampled_from(presets.names()), edits=EDITS)
@cases(200)
def test_a_damaged_preset_gives_a_line_or_summaries(summarizer, hurt, preset, edits):
    with case("preset"):
        path = hurt / "hurt.yaml"
        path.write_bytes(damaged((presets.CONFIGS / f"{preset}.yaml").read_bytes(), edits))
        found, line = result_or_line(presets.load, path)
        if not line and found.options.get("task", "translation") == "translation":
            loaded, line = result_or_line(with_preset, summarizer, found)
            assert line or len(loaded(TEXTS)) == len(TEXTS)


def with_preset(summarizer: Summarizer, preset: presets.Preset) -> Summarizer:
    return Summarizer(summarizer.task, summarizer.model, summarizer.tokenizer, preset)


NUMBERS = ("beam", "max_len_a", "max_len_b", "min_len", "lenpen", "unkpen", "temperature", "sampling_topk",
    "sampling_topp", "diverse_beam_groups", "diversity_rate", "no_repeat_ngram_size", "batch_size", "max_tokens",
    "nbest", "longest_source", "keep_sentences", "max_source_positions", "prefix_size", "constraints",
    "score_reference", "sampling", "match_source_len", "print_alignment", "lm_path")  # fmt: skip


@given(options=st.dictionaries(st.sampled_from(NUMBERS), VALUES, min_size=1, max_size=3))
@cases(100)
def test_any_value_of_an_option_gives_a_line_or_summaries(bart, options):
    options = {name: value for name, value in options.items() if not isinstance(value, torch.Tensor | bytes)}
    with case("options"):
        found, line = result_or_line(Summarizer.load, bart, "demo", **{"max_len_b": 5} | options)
        assert line or len(found(TEXTS)) == len(TEXTS)


def test_a_preset_that_grows_as_it_is_read_is_refused(tmp_path):
    levels = "\n".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]" for n in range(1, 40))
    (tmp_path / "laughs.yaml").write_text(f"x0: &x0 [1, 1]\n{levels}\nsearches: {{beam: {{beam: 4}}}}\n")
    with case("laughs"):
        assert "references" in result_or_line(presets.load, tmp_path / "laughs.yaml")[1]


# ---- texts

ANY_TEXT = st.text(st.characters(), max_size=40)  # halves of characters included
HOSTILE = st.sampled_from(["\0", "a\0b", "\ud800", "\u202eשלום", "\u200b\ufeff", "a\u2028b\rc\x85d\x1ce", "🙂" * 50,
    "👩‍👩‍👧‍👦", " \t ", "\ufeffstart", "\r", "\x1b[31mred\x07", "x" * 3000, " " * 3000 + "y", "a" + " " * 3000 + "b",
    "<s> </s> <pad>", "<unk>", "<mask>", "e\u0301" * 60, "\U0010ffff", "ｆｕｌｌ", "𝕬"])  # fmt: skip


@given(texts=st.lists(st.one_of(ANY_TEXT, HOSTILE), max_size=6))
@cases(200)
def test_any_texts_get_a_line_each_in_their_order(summarizer, texts):
    with case("texts"):
        found = summarizer(texts)
        assert len(found) == len(texts)
        for text, summary in zip(texts, found):
            assert len(summary.splitlines()) <= 1 and summary.encode("utf-8") is not None
            assert not summary or one_line(text)  # none of what is blank
        assert found[:1] == summarizer(texts[:1])


@pytest.mark.parametrize("text", ["x" * 10**7, "word " * 2 * 10**6, "a" + " " * 10**7 + "b", "\n" * 10**7 + "a",
    "é" * 5 * 10**6, "\0" * 10**7], ids=["a word", "words", "spaces", "lines", "letters", "nul"])  # fmt: skip
@pytest.mark.parametrize("model", ["bart", "gpt2"])
def test_texts_of_10_mb_take_no_longer_than_their_beginning(request, model, text):
    folder = request.getfixturevalue(model)
    options = {"max_new_tokens": 4} if model == "gpt2" else SHORT
    loaded = Summarizer.load(folder, *(("gpt2_cnndm", "greedy") if model == "gpt2" else ("xsum", "beam")), **options)
    with case("long"):
        [found] = loaded([text])
    line = one_line(text)
    assert found == loaded([line if len(line) < 2000 else line[:1999] + line[-1]])[0]


@given(content=st.one_of(st.binary(max_size=60), st.lists(st.one_of(ANY_TEXT, HOSTILE), max_size=5).map(
    lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))), is_json=st.booleans())  # fmt: skip
@cases(80)
def test_any_bytes_in_give_a_line_for_each_or_an_error_and_nothing(
    summarizer, tmp_path_factory, monkeypatch, content, is_json
):
    folder = tmp_path_factory.mktemp("job")
    source, output = folder / ("in.jsonl" if is_json else "in.txt"), folder / "out.txt"
    if is_json:
        lines = [json.dumps({"text": line.decode("utf-8", "replace")}).encode() for line in content.split(b"\n")]
        content = b"\n".join(lines) if len(content) % 3 else content
    source.write_bytes(content)
    with case("command"), monkeypatch.context() as patch:
        patch.setattr(Summarizer, "load", lambda *_, **__: summarizer)
        words = ["--model", summarizer.task.cfg.data, "--preset", "xsum", "--input", source, "--output", output]
        said = exit_of(summarize, words, patch)
        if said is None:
            expected = content.count(b"\n") + (not content.endswith(b"\n") and content != b"")
            assert output.read_bytes().count(b"\n") == len(output.read_text("utf-8").splitlines()) == expected
        else:
            assert re.fullmatch(r"summarize: error: line \d+ of .*", said)
        assert sorted(os.listdir(folder)) == [source.name] + ["out.txt", "out.txt.job"] * (said is None)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@given(
    records=st.lists(st.dictionaries(st.sampled_from(["text", "article", "id", "", "x\0"]), JSON), max_size=4),
    edits=EDITS, is_whole=st.booleans(),
)  # fmt: skip
@cases(200)
def test_objects_come_out_as_they_were_or_a_line_is_named(hurt, records, edits, is_whole):
    with case("objects"):
        content = "".join(f"{json.dumps(record)}\n" for record in records).encode()
        path = hurt / "in.jsonl"
        path.write_bytes(content if is_whole else damaged(content, edits))
        texts, line = result_or_line(Texts, str(path), True, None, ["summary"])
        if line:
            assert re.match(r"line \d+ of .*in.jsonl", line)
            return
        lines = path.read_bytes().splitlines(keepends=False) if is_whole else list(path.open("rb"))
        assert texts.count == len(lines)
        for _, window in texts.windows(2, Shard()):
            for item in window:
                again = as_json(item.record | {"summary": "s"})
                assert len(again.encode("utf-8").split(b"\n")) == 1
                assert str(json.loads(again)) == str(item.record | {"summary": "s"})
                assert isinstance(item.text, str)


@pytest.mark.parametrize(
    "value, why", [("1e999", "too large"), ("[" * 150 + "]" * 150, "nested"), ("9" * 5000, "digits")]
)
def test_what_could_not_be_written_again_is_named_at_once(tmp_path, value, why):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b", "x": ' + value + "}\n")
    line = result_or_line(Texts, str(tmp_path / "in.jsonl"), True, None)[1]
    assert re.match(r"line 2 of \S+ is not JSON", line) and why in line


# ---- what a run leaves behind


@given(edits=EDITS)
@cases(150)
def test_of_a_damaged_journal_only_whole_records_from_its_beginning_count(hurt, edits):
    with case("journal"):
        path, job = hurt / "journal", {"input": "1", "model": "2"}
        path.unlink(missing_ok=True)
        journal = Journal(path, job)
        records = [{"lines": [n], "summaries": [f"é{n}"]} for n in range(4)]
        for record in records:
            journal.append(record)
        journal.close()
        path.write_bytes(damaged(path.read_bytes(), edits))
        journal, line = result_or_line(Journal, path, job, resume=True)
        if not line:
            found = list(journal.records())
            journal.close()
            known = [json.dumps(record) for record in records]
            assert all(json.dumps(record) in known for record in found)  # a repeated one is whole, too
            assert found == records[: len(found)] or any(kind == "repeat" for kind, *_ in edits)


@given(edits=EDITS)
@cases(100)
def test_a_damaged_record_of_a_shard_is_refused(hurt, edits):
    with case("shard"):
        output = hurt / "part.jsonl"
        output.write_bytes(b"{}\n")
        part = Part(output, Shard(2, 3), {"input": "1"}, 5, 2, 0, "0" * 64)
        part.write()
        record = Part.record_of(output)
        record.write_bytes(damaged(record.read_bytes(), edits))
        found, line = result_or_line(Part.read, output)
        assert line or found == part


# ---- how much this was


def test_there_are_cases_enough():
    assert sum(planned.values()) >= LEAST_CASES
    if len(done) > len(planned):  # all of this file ran, in this process
        assert sum(done.values()) >= LEAST_CASES, done
