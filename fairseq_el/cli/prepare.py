"""Makes fairseq's data from a copy of CNN/DailyMail, XSum or SQuAD 1.1: `fairseq-el prepare`."""

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fairseq.data.encoders.gpt2_bpe_utils import Encoder, get_encoder
from tqdm import tqdm

from fairseq_el.errors import UserError
from fairseq_el.jobs.atomic_file import AtomicFile
from fairseq_el.text.rouge import available_cores
from fairseq_el.text.sentences import one_line, read_lines, split_sentences

SPLITS = {"train": ["train"], "valid": ["valid", "validation", "val", "dev"], "test": ["test"]}
TEXT_SUFFIXES = [(".source", ".target"), (".src", ".tgt")]
LINES_PER_CALL = 200
LARGEST_CACHE = 500_000  # words; about 100 MB a process
BPE_FILES = ["encoder.json", "vocab.bpe", "dict.txt"]
BPE_SOURCE = "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe"


# ---- what the data sets hold


class Pair(NamedTuple):
    source: str
    sentences: list[str]  # of the target

    @property
    def target(self) -> str:
        return " ".join(self.sentences)


# "(CNN)", or "(CNNMoney)", and the place before it, at the very start of an article. Those who reproduced
# BART's scores looked for it in the first 50 characters. Older articles go on with "--"; some copies spell
# out the brackets.
CNN_HEADER = re.compile(r"^.{0,45}?(?:\(|-LRB- )CNN[\w. ]{0,20}?(?:\)| -RRB-)\s*(?:--\s*)?")


def close_up_stop(sentence: str) -> str:
    """`... at sea .` becomes `... at sea.`; the data set ends sentences so where the web page had no stop."""
    return re.sub(r"\s+([.!?])$", r"\1", sentence.strip())


def cnndm_pair(article: str, highlights: list[str]) -> Pair:
    sentences = [close_up_stop(line) for line in highlights if line.strip()]
    return Pair(CNN_HEADER.sub("", one_line(article)), sentences)


def squad_pair(row: dict[str, Any]) -> Pair:
    """Answer and passage as in GLGE. Of several answers people gave it is the first."""
    answers = row["answers"]["text"]
    source = f"{one_line(answers[0])} [SEP] {one_line(row['context'])}" if answers else ""
    return Pair(source, [one_line(row["question"])])


@dataclass(frozen=True)
class DataSet:
    name: str
    columns: list[str]
    from_row: Callable[[dict[str, Any]], Pair]
    from_text: Callable[[str, str], Pair]
    has_sentences: bool  # in its targets, more than one
    where: str


DATA_SETS = {
    "cnndm": DataSet(
        name="CNN/DailyMail",
        columns=["article", "highlights"],
        from_row=lambda row: cnndm_pair(row["article"], row["highlights"].splitlines()),
        from_text=lambda source, target: cnndm_pair(source, split_sentences(target)),
        has_sentences=True,
        where="hf download abisee/cnn_dailymail --repo-type dataset --include '3.0.0/*' --local-dir {}",
    ),
    "xsum": DataSet(
        name="XSum",
        columns=["document", "summary"],
        from_row=lambda row: Pair(one_line(row["document"]), [one_line(row["summary"])]),
        from_text=lambda source, target: Pair(one_line(source), [one_line(target)]),
        has_sentences=False,
        where="hf download EdinburghNLP/xsum --repo-type dataset --revision refs/convert/parquet "
        "--local-dir {}",
    ),
    "squad": DataSet(
        name="SQuAD 1.1",
        columns=["context", "question", "answers"],
        from_row=squad_pair,
        from_text=lambda source, target: Pair(one_line(source), [one_line(target)]),
        has_sentences=False,
        where="hf download rajpurkar/squad --repo-type dataset --local-dir {} (training and validation set; "
        "the paper's test set is that of GLGE, text files at https://microsoft.github.io/glge)",
    ),
}


# ---- reading


def find_split(folder: Path, split: str) -> list[Path]:
    """The files of a split: a pair of text files, or all parts of it in one format."""
    for sides in TEXT_SUFFIXES:
        for name in SPLITS[split]:
            pair = [folder / f"{name}{side}" for side in sides]
            if all(path.is_file() for path in pair):
                return pair
    for suffixes in ([".parquet"], [".arrow"], [".jsonl", ".json"]):
        found = sorted(
            path for path in folder.rglob("*") if path.suffix in suffixes and belongs_to(path, split, folder)
        )
        if len({path.parent for path in found}) > 1:
            folders = ", ".join(sorted({str(path.parent) for path in found}))
            raise UserError(f"the {split} set is in several folders: give one of them as --input: {folders}")
        if found:
            return found
    return []


def belongs_to(path: Path, split: str, folder: Path) -> bool:
    """By its name (test-00000-of-00001.parquet), or that of its folder (test/data-00000-of-00001.arrow)."""
    named = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(SPLITS[split])})(?:[^a-z]|$)")
    if path.suffix != ".json" and not path.name.startswith("cache-") and path.parent != folder:
        return bool(named.search(path.stem) or path.parent.name in SPLITS[split])
    return bool(named.search(path.stem))


def read_pairs(data: DataSet, files: list[Path]) -> Iterator[Pair]:
    if any(files[0].suffix in sides for sides in TEXT_SUFFIXES):
        return read_text(data, *files)
    return (data.from_row(row) for path in files for row in read_rows(path, data.columns))


def read_text(data: DataSet, source: Path, target: Path) -> Iterator[Pair]:
    try:
        for pair in zip(read_lines(source), read_lines(target), strict=True):
            yield data.from_text(*pair)
    except ValueError as error:
        raise UserError(
            f"{source} and {target} have different numbers of lines: take the two files of one set"
        ) from error


def read_rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    read = {".parquet": read_parquet, ".arrow": read_arrow}.get(path.suffix, read_json_lines)
    for row in read(path):
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise UserError(
                f"{path} has a row without {missing[0]} (it has {', '.join(row)}): is it another data set?"
            )
        yield row


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    pyarrow = import_pyarrow()
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000):
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a complete parquet file: get it again ({error})") from error


def read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Data sets are saved as streams; the file format of arrow is tried where that fails."""
    pyarrow = import_pyarrow()
    with pyarrow.memory_map(str(path)) as file:
        try:
            batches: Iterable = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            try:
                opened = pyarrow.ipc.open_file(file)
            except pyarrow.ArrowInvalid as error:
                raise UserError(f"{path} is not a complete arrow file: get it again ({error})") from error
            batches = map(opened.get_batch, range(opened.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def import_pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "parquet and arrow files need the package pyarrow: pip install pyarrow"
        ) from error
    return pyarrow


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"line {number} of {path} is not JSON: write one object a line ({error})"
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not a JSON object: write one object a line")
        yield row


# ---- writing


def write_text(pairs: Iterable[Pair], prefix: Path, with_sentences: bool) -> int:
    """Writes a split as text and returns the number of its pairs."""
    kept = empty = 0
    with contextlib.ExitStack() as stack:

        def create(side: str) -> BinaryIO:
            return stack.enter_context(AtomicFile(prefix.with_suffix(f".{side}"))).file

        source, target = create("source"), create("target")
        references = create("references") if with_sentences else None
        for pair in tqdm(pairs, desc=f"reading {prefix.name}", unit=" pairs", mininterval=1):
            if not pair.source or not pair.target:
                empty += 1
                continue
            kept += 1
            source.write(f"{pair.source}\n".encode())
            target.write(f"{pair.target}\n".encode())
            if references is not None:
                references.write(f"{' <n> '.join(pair.sentences)}\n".encode())
    left_out = f", {empty:,} left out because a side is empty" if empty else ""
    print(f"{prefix.name}: {kept:,} pairs{left_out}")
    return kept


class WordEncoder(dict):
    """fairseq's GPT-2 encoding, which remembers the numbers of a word (a match of its pattern) as text.

    The pattern looks beyond a match for nothing but more space: a word alone is encoded as in its sentence.
    """

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder

    def __missing__(self, word: str) -> str:
        if len(self) >= LARGEST_CACHE:
            self.clear()
            self.encoder.cache.clear()
        self[word] = numbers = " ".join(map(str, self.encoder.encode(word)))
        return numbers

    def encode(self, text: str) -> str:
        return " ".join([self[word] for word in self.encoder.pat.findall(text)])


@functools.cache
def load_encoder(bpe: Path) -> WordEncoder:
    return WordEncoder(get_encoder(bpe / "encoder.json", bpe / "vocab.bpe"))


def encode_lines(bpe: Path, lines: list[str]) -> list[str]:
    encoder = load_encoder(bpe)
    return [encoder.encode(line) for line in lines]


def encode_file(pool: Pool, bpe: Path, text: Path, encoded: Path, total: int) -> None:
    """Encodes a file in all processes; line by line the output belongs to the input."""
    encoded.parent.mkdir(parents=True, exist_ok=True)
    with (
        AtomicFile(encoded) as whole,
        tqdm(total=total, desc=f"encoding {text.name}", unit=" lines", mininterval=1) as bar,
    ):
        groups = in_groups(read_lines(text), LINES_PER_CALL)
        for lines in pool.imap(functools.partial(encode_lines, bpe), groups):
            whole.file.writelines(f"{line}\n".encode() for line in lines)
            bar.update(len(lines))


def in_groups(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for line in lines:
        group.append(line)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def binarise(output: Path, dictionary: Path, counts: dict[str, int]) -> None:
    """Runs `fairseq-preprocess`; what it says is kept in a file and shown if it fails. The folder has another name
    until it is whole."""
    growing, whole = output / "bin.tmp", output / "bin"
    shutil.rmtree(growing, ignore_errors=True)
    workers = max(1, min(available_cores(), min(counts.values()) // 100))
    command = [
        str(Path(sys.executable).with_name("fairseq-preprocess")), "--destdir", str(growing),
        "--source-lang", "source", "--target-lang", "target",
        "--srcdict", str(dictionary), "--tgtdict", str(dictionary), "--workers", str(workers),
    ]  # fmt: skip
    for split in counts:
        command += [f"--{split}pref", str(output / "bpe" / split)]
    print("binarising ...", flush=True)
    log = output / "preprocess.log"
    with log.open("w") as file:
        failed = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode != 0
    if failed:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"fairseq-preprocess failed: {last[0]} (all output: {log})")
    if whole.exists():
        shutil.rmtree(whole)
    growing.rename(whole)


# ---- command line


def check_bpe(folder: Path) -> None:
    missing = [name for name in BPE_FILES if not (folder / name).is_file()]
    if missing:
        urls = " ".join(f"{BPE_SOURCE}/{name}" for name in missing)
        raise UserError(
            f"{folder} lacks {', '.join(missing)} of GPT-2's encoding: get it with wget -P {folder} {urls}"
        )
    try:
        numbers = {str(number) for number in json.loads((folder / "encoder.json").read_bytes()).values()}
    except ValueError as error:
        raise UserError(
            f"{folder / 'encoder.json'} is not JSON: get it from {BPE_SOURCE} ({error})"
        ) from error
    entries = {line.split(" ")[0] for line in read_lines(folder / "dict.txt")}
    if unknown := numbers - entries:
        raise UserError(
            f"{folder / 'dict.txt'} lacks {len(unknown):,} of the {len(numbers):,} numbers of "
            f"{folder / 'encoder.json'}: get the two that belong together from {BPE_SOURCE}"
        )


def prepare(data: DataSet, source: Path, output: Path, bpe: Path, splits: list[str]) -> None:
    check_bpe(bpe)
    found = {split: files for split in splits if (files := find_split(source, split))}
    if not found:
        raise UserError(
            f"there is no {data.name} in {source} (no {' or '.join(splits)} set as parquet, arrow, JSON "
            f"lines or .source and .target files): get it with {data.where.format(source)}"
        )
    output.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, files in found.items():
        counts[split] = write_text(read_pairs(data, files), output / split, data.has_sentences)
        if not counts[split]:
            raise UserError(f"there is no pair of texts in {', '.join(map(str, files))}: get them again")
    with multiprocessing.Pool(available_cores()) as pool:
        for split, side in itertools.product(counts, ("source", "target")):
            name = f"{split}.{side}"
            encode_file(pool, bpe, output / name, output / "bpe" / name, counts[split])
    binarise(output, bpe / "dict.txt", counts)
    print(f"ready: {output / 'bin'}")


def main(args: argparse.Namespace) -> None:
    """args: of `options.prepare`."""
    prepare(DATA_SETS[args.dataset], args.input, args.output, args.bpe_dir, args.splits)
