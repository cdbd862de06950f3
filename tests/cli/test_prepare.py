"""Data sets as people have them become data for fairseq, and nothing in between gets lost or out of step."""

import json
import re
import sys

import pyarrow.parquet
import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_el.cli import prepare
from helpers import exit_of, run_command

CNNDM = prepare.DATA_SETS["cnndm"]
XSUM = prepare.DATA_SETS["xsum"]
SQUAD = prepare.DATA_SETS["squad"]

ARTICLES = [
    {
        "article": "(CNN) -- The cats\rsat there.\n\nThey slept. “Naïve,” he said.",
        "highlights": "Cats sat there .\nThey slept, says Dr. Who .",
        "id": "1",
    },
    {"article": "", "highlights": "An article without text .", "id": "2"},
    {"article": "By . A Reporter . It rained\u2028again.", "highlights": "It rained again!", "id": "3"},
    *(
        {"article": f"Article {n} of many.", "highlights": f"This is {n} .", "id": str(n)}
        for n in range(4, 25)
    ),
]
SOURCES = [
    "The cats sat there. They slept. “Naïve,” he said.",
    "By . A Reporter . It rained again.",
    *(f"Article {n} of many." for n in range(4, 25)),
]
TARGETS = [
    "Cats sat there. They slept, says Dr. Who.",
    "It rained again!",
    *(f"This is {n}." for n in range(4, 25)),
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-pair encoding of GPT-2's form with all bytes and a few merges, and its dictionary."""
    folder = tmp_path_factory.mktemp("bpe")
    symbols = list(bytes_to_unicode().values())
    merges = ["t h", "th e", "Ġ the", "Ġ a", "a t", "c at", "i n", "e r", "' s", "Ġ Ġ", "1 2"]
    symbols += [merge.replace(" ", "") for merge in merges]
    (folder / "encoder.json").write_text(json.dumps({symbol: n for n, symbol in enumerate(symbols)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "dict.txt").write_text("".join(f"{n} 1\n" for n in reversed(range(len(symbols)))))
    return folder


@pytest.fixture(scope="module")
def fairseq_bpe(bpe):
    return GPT2BPE(
        GPT2BPEConfig(gpt2_encoder_json=str(bpe / "encoder.json"), gpt2_vocab_bpe=str(bpe / "vocab.bpe"))
    )


# ---- what the data sets hold


@pytest.mark.parametrize(
    ("article", "cleaned"),
    [
        ("(CNN)Share this.", "Share this."),
        ("(CNN) -- Share this.", "Share this."),
        ("Marseille, France (CNN)The prosecutor said.", "The prosecutor said."),
        ("(CNN Student News) -- Today.", "Today."),
        ("New York (CNNMoney)Stocks (CNN) fell.", "Stocks (CNN) fell."),
        ("Paris -LRB- CNN -RRB- It rained .", "It rained ."),
        ("LONDON, England (Reuters) -- It rained.", "LONDON, England (Reuters) -- It rained."),
        ("The boy told the reporters that he had never been on (CNN) before.", None),
        ("CNN (the network) said so.", None),
        ("It rained.", None),
    ],
)
def test_the_header_of_cnn_is_removed_and_only_that(article, cleaned):
    assert CNNDM.from_row({"article": article, "highlights": "a"}).source == (cleaned or article)


def test_highlights_are_sentences_without_space_before_their_stops():
    pair = CNNDM.from_row({"article": "a", "highlights": "One . Two .\n\nThree!\n Four "})
    assert pair.sentences == ["One . Two.", "Three!", "Four"]
    assert pair.target == "One . Two. Three! Four"
    assert CNNDM.from_text("a", "One ends. Two ends .").sentences == ["One ends.", "Two ends."]


def test_questions_have_the_answer_and_then_the_passage_as_source():
    row = {
        "context": "Microsoft was founded\nby Bill Gates.",
        "question": " Who founded Microsoft?",
        "answers": {"text": ["Bill Gates", "Gates"], "answer_start": [25, 30]},
    }
    source = "Bill Gates [SEP] Microsoft was founded by Bill Gates."
    assert SQUAD.from_row(row) == (source, ["Who founded Microsoft?"])
    assert SQUAD.from_row(row | {"answers": {"text": [], "answer_start": []}}).source == ""


def test_articles_of_xsum_become_one_line():
    row = {"document": "It rained.\r\nThen\x85it\x0cdid not. \n", "summary": "Rain.\n"}
    assert XSUM.from_row(row) == ("It rained. Then it did not.", ["Rain."])


# ---- reading


def write_parquet(folder, rows):
    half = len(rows) // 2
    for n, part in enumerate((rows[:half], rows[half:])):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(part), folder / f"test-0000{n}-of-00002.parquet"
        )


def write_arrow_stream(folder, rows):
    """As `save_to_disk` of Hugging Face's library does."""
    (folder / "test").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(folder / "test" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (folder / "test" / "state.json").write_text("{}")
    (folder / "test" / "cache-1234.arrow").write_bytes(b"of a computation")


def write_arrow_file(folder, rows):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(folder / "cnn_dailymail-test.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def write_json_lines(folder, rows):
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dataset_info.json").write_text("{}")


def write_text(folder, rows):
    for side, column in (("source", "article"), ("target", "highlights")):
        lines = (" ".join(filter(None, row[column].splitlines())) for row in rows)
        (folder / f"test.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


FORMATS = [write_parquet, write_arrow_stream, write_arrow_file, write_json_lines, write_text]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_pairs(tmp_path, write):
    write(tmp_path, ARTICLES)
    pairs = list(prepare.read_pairs(CNNDM, prepare.find_split(tmp_path, "test")))
    assert [pair.source for pair in pairs if pair.source] == SOURCES
    assert [pair.target for pair in pairs if pair.source] == TARGETS
    assert pairs[0].sentences == ["Cats sat there.", "They slept, says Dr. Who."]
    assert len(pairs) == len(ARTICLES)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("validation-00000-of-00001.parquet", "valid"),
        ("default/validation/0000.parquet", "valid"),
        ("plain_text/train-00000-of-00001.parquet", "train"),
        ("val.jsonl", "valid"),
        ("cnn_dailymail-train-00000-of-00003.arrow", "train"),
    ],
)
def test_splits_go_by_the_names_in_use(tmp_path, name, split):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert {s: prepare.find_split(tmp_path, s) for s in prepare.SPLITS} == {
        s: [tmp_path / name] * (s == split) for s in prepare.SPLITS
    }


def test_texts_of_glge_are_read_by_their_names(tmp_path):
    (tmp_path / "dev.src").write_text("Gates [SEP] Gates founded it.\n")
    (tmp_path / "dev.tgt").write_text("Who founded it?\n")
    files = prepare.find_split(tmp_path, "valid")
    pairs = list(prepare.read_pairs(SQUAD, files))
    assert pairs == [("Gates [SEP] Gates founded it.", ["Who founded it?"])]


# ---- encoding


@settings(max_examples=300)
@given(st.text(max_size=40) | st.text(alphabet="the cats' 12\t\n\u3000é", max_size=40))
def test_words_are_encoded_as_fairseq_encodes_texts(bpe, fairseq_bpe, text):
    assert prepare.load_encoder(bpe).encode(text) == fairseq_bpe.encode(text)


def test_a_full_memory_of_words_changes_nothing(bpe, fairseq_bpe, monkeypatch):
    monkeypatch.setattr(prepare, "LARGEST_CACHE", 3)
    encoder = prepare.WordEncoder(prepare.load_encoder(bpe).encoder)
    text = "the cat sat at the inn, the other cat at 12 inns"
    assert encoder.encode(text) == fairseq_bpe.encode(text)
    assert len(encoder) <= 3


# ---- from end to end


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, bpe):
    folder = tmp_path_factory.mktemp("cnndm")
    (folder / "input").mkdir()
    write_parquet(folder / "input", ARTICLES)
    write_json_lines(folder / "input", ARTICLES)  # test.jsonl is left alone: there is parquet
    done = run_command(
        sys.executable, "-m", "fairseq_el", "prepare", "cnndm", "--input", folder / "input",
        "--output", folder / "out", "--bpe-dir", bpe,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "out", done


@pytest.mark.parametrize(("side", "texts"), [("source", SOURCES), ("target", TARGETS)])
def test_what_fairseq_reads_is_the_text(prepared, fairseq_bpe, side, texts):
    out, _ = prepared
    assert (out / f"test.{side}").read_text(encoding="utf-8") == "".join(f"{text}\n" for text in texts)
    dictionary = Dictionary.load(str(out / "bin" / f"dict.{side}.txt"))
    data = data_utils.load_indexed_dataset(str(out / "bin" / f"test.source-target.{side}"), dictionary)
    assert [fairseq_bpe.decode(dictionary.string(data[n])) for n in range(len(data))] == texts


def test_references_keep_their_sentences(prepared):
    out, _ = prepared
    references = (out / "test.references").read_text(encoding="utf-8").splitlines()
    assert references[0] == "Cats sat there. <n> They slept, says Dr. Who."
    assert [line.replace(" <n> ", " ") for line in references] == TARGETS


def test_pairs_left_out_are_counted_and_progress_is_shown(prepared):
    _, done = prepared
    assert "test: 23 pairs, 1 left out because a side is empty" in done.stdout
    assert "encoding test.source: 100%" in done.stderr
    assert not re.search("warning|deprecat|info:", done.stderr + done.stdout, re.IGNORECASE)


def test_lines_keep_their_order_in_several_processes(tmp_path, bpe, fairseq_bpe, monkeypatch):
    monkeypatch.setattr(prepare, "LINES_PER_CALL", 3)
    lines = [f"line {n} of the cats" for n in range(50)] + ["", "the end"]
    (tmp_path / "text").write_text("\n".join(lines))
    with prepare.multiprocessing.Pool(2) as pool:
        prepare.encode_file(pool, bpe, tmp_path / "text", tmp_path / "new" / "bpe", len(lines))
    encoded = (tmp_path / "new" / "bpe").read_text().split("\n")[:-1]
    assert encoded == [fairseq_bpe.encode(line) for line in lines]


# ---- what goes wrong


@pytest.fixture
def fails(tmp_path, bpe, monkeypatch):
    """Runs the script on a folder that `write` fills, and returns its last words."""
    monkeypatch.setattr(prepare, "available_cores", lambda: 1)

    def run(write, dataset="cnndm", bpe=bpe) -> str:
        (tmp_path / "input").mkdir()
        write(tmp_path / "input")
        words = [dataset, "--input", tmp_path / "input", "--output", tmp_path / "output", "--bpe-dir", bpe]
        said = exit_of(prepare, words, monkeypatch)
        assert re.fullmatch(r"prepare: error: \S.*", said)  # one line
        return said

    return run


@pytest.mark.parametrize(
    ("dataset", "address"),
    [("cnndm", "abisee/cnn_dailymail"), ("xsum", "EdinburghNLP/xsum"), ("squad", "rajpurkar/squad")],
)
def test_missing_data_is_answered_with_where_to_get_it(fails, dataset, address):
    message = fails(lambda folder: (folder / "README.md").touch(), dataset)
    assert f"hf download {address} --repo-type dataset" in message


def test_missing_files_of_the_encoding_are_answered_with_where_to_get_them(fails, bpe, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "encoder.json").write_bytes((bpe / "encoder.json").read_bytes())
    message = fails(lambda folder: write_text(folder, ARTICLES), bpe=tmp_path / "half")
    assert "lacks vocab.bpe, dict.txt" in message
    assert "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/vocab.bpe" in message


def different_lengths(folder):
    write_text(folder, ARTICLES)
    (folder / "test.target").write_text("only one\n")


def not_utf8(folder):
    write_text(folder, ARTICLES)
    (folder / "test.source").write_bytes(b"fine\n\xe9t\xe9\n")


def file(name, content):
    return lambda folder: (folder / name).write_text(content)


def several_versions(folder):
    for version in ("2.0.0", "3.0.0"):
        (folder / version).mkdir()
        write_json_lines(folder / version, ARTICLES)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (different_lengths, "test.source and .*test.target have different numbers of lines"),
        (not_utf8, "line 2 of .*test.source is not UTF-8"),
        (several_versions, "test set is in several folders: .*2.0.0, .*3.0.0"),
        (file("test.jsonl", '{"article": "a"}\n'), "row without highlights .it has article"),
        (
            file("test.jsonl", '{"article": "a", "highlights": "b"}\n{"article": \n'),
            "line 2 of .* is not JSON",
        ),
        (file("test.jsonl", "[1]\n"), "line 1 of .*test.jsonl is not a JSON object"),
        (file("test.parquet", "PAR1 cut short"), "not a complete parquet file"),
        (file("test.arrow", "ARROW1 cut short"), "not a complete arrow file"),
        (lambda folder: write_json_lines(folder, ARTICLES[1:2]), "no pair of texts in .*test.jsonl"),
    ],
)
def test_wrong_data_are_one_line(fails, write, message):
    assert re.search(message, fails(write))


def test_a_missing_package_is_named(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in fails(lambda folder: (folder / "test.parquet").touch())


def test_a_dictionary_of_another_encoding_is_noticed(fails, bpe, tmp_path):
    (tmp_path / "other").mkdir()
    for name in prepare.BPE_FILES:
        (tmp_path / "other" / name).write_bytes((bpe / name).read_bytes())
    (tmp_path / "other" / "dict.txt").write_text("1 1\n2 1\n")
    message = fails(lambda folder: write_text(folder, ARTICLES), bpe=tmp_path / "other")
    assert re.search(r"dict.txt lacks 265 of the 267 numbers of .*encoder.json", message)
    assert not (tmp_path / "output").exists()  # said before the work, not after


def test_a_failing_command_is_shown_with_its_last_words(fails, tmp_path, monkeypatch):
    command = tmp_path / "fairseq-preprocess"
    command.write_text("#!/bin/sh\necho a word before\necho the last word >&2\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    message = fails(lambda folder: write_text(folder, ARTICLES))
    assert "fairseq-preprocess failed: the last word (all output: " in message
    assert (tmp_path / "output" / "preprocess.log").read_text() == "a word before\nthe last word\n"
