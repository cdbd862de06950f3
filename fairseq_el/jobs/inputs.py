"""The texts of a job: a file with one text, or one JSON object, per line.

Any window of lines can be read without reading what precedes it, so that processes can share the work.
"""

import hashlib
import itertools
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from fairseq_el.errors import UserError
from fairseq_el.jobs.shards import Shard

TEXT_FIELDS = ("text", "article", "document")
MOST_NESTING = 100  # of values in a JSON object
LINES_PER_MARK = 256  # the file offset is kept of every so many lines


class Item(NamedTuple):
    text: str
    record: dict[str, Any]  # fields that the output repeats


class Texts:
    """The input. It is read once to find mistakes in it, and again window by window."""

    def __init__(self, source: str, is_json: bool, text_field: str | None, new_fields: Collection[str] = ()):
        """source: the name of a file, or `-`. text_field: None for the first of TEXT_FIELDS that an object has.
        new_fields: what the output adds to objects, which must not have such fields."""
        self.name = "standard input" if source == "-" else source
        self.path = Path(source).absolute()
        self.is_json = is_json
        self.fields = (text_field,) if text_field else TEXT_FIELDS
        self.new_fields = new_fields
        self.file = seekable(sys.stdin.buffer if source == "-" else self.path.open("rb"))
        self.identity = identity_of(self.file)
        self.marks = array("q")  # file offsets of every LINES_PER_MARK-th line
        self.digest, self.count = self._check()

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which has to `reopen` the file."""
        return vars(self) | {"file": None}

    def reopen(self) -> None:
        """Opens the file by its name, and checks that it is the same, unchanged."""
        self.file = self.path.open("rb")
        if identity_of(self.file) != self.identity:
            raise UserError(f"{self.name} has changed since the run began: start again with --overwrite")

    def _check(self) -> tuple[str, int]:
        digest, count, read = hashlib.sha256(), 0, 0
        self.size = self.file.seek(0, os.SEEK_END)
        self.file.seek(0)
        with tqdm(total=self.size, desc="reading", unit="B", unit_scale=True, delay=2) as bar:
            for count, line in enumerate(self.file, start=1):
                if count % LINES_PER_MARK == 1:
                    self.marks.append(read)
                self._item(line, count)
                digest.update(line)
                read += len(line)
                bar.update(len(line))
        return digest.hexdigest(), count

    def windows(self, size: int, shard: Shard) -> Iterator[tuple[int, list[Item]]]:
        """The windows of a shard, each with its number in the whole input."""
        for number in shard.windows(self.count, size):
            yield number, self.window(number, size)

    def window(self, number: int, size: int) -> list[Item]:
        return self._items(number * size, min(size, self.count - number * size))

    def _items(self, first: int, count: int) -> list[Item]:
        """first: counted from 0."""
        mark, rest = divmod(first, LINES_PER_MARK)
        self.file.seek(self.marks[mark])
        lines = itertools.islice(self.file, rest, rest + count)
        return [self._item(line, number) for number, line in enumerate(lines, start=first + 1)]

    def describe(self, line: int) -> str:
        """line: of a text, counted from 0."""
        record = self._items(line, 1)[0].record
        given = f" (id {json.dumps(record['id'])[:80]})" if self.is_json and "id" in record else ""
        return f"line {line + 1} of {self.name}{given}"

    def _item(self, line: bytes, number: int) -> Item:
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {number} of {self.name} is not UTF-8 (byte {error.start + 1}): convert the file, for "
                "example with iconv -f latin1 -t utf-8"
            ) from error
        if number == 1:
            text = text.removeprefix("\ufeff")  # the byte-order mark of some editors
        if not self.is_json:
            return Item(text, {"id": number})
        return self._from_json(text, number) if text.strip() else Item("", {})

    def _from_json(self, line: str, number: int) -> Item:
        where = f"line {number} of {self.name}"
        try:
            record = json.loads(line, parse_float=finite)
            if line.count("[") + line.count("{") > MOST_NESTING and depth_of(record) > MOST_NESTING:
                raise ValueError(f"its values are nested more than {MOST_NESTING} deep")  # writing it might fail
        except (ValueError, RecursionError) as error:
            if number == 1 and line.lstrip().startswith("["):
                raise UserError(self._is_array(where)) from error
            raise UserError(f"{where} is not JSON: write one object per line ({error})") from error
        if isinstance(record, list):
            raise UserError(self._is_array(where))
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object: write one object per line")
        if taken := next((field for field in self.new_fields if field in record), None):
            raise UserError(
                f"{where} has a field {taken!r} already: give the new fields another name with --summary-field"
            )
        field = next((field for field in self.fields if field in record), None)
        if field is None or not isinstance(record[field], str):
            has = ", ".join(map(str, record)) or "none"
            raise UserError(
                f"{where} has no text in a field {' or '.join(self.fields)} (its fields: {has}): name the "
                "field with --text-field"
            )
        return Item(record[field], record)


    def _is_array(self, where: str) -> str:
        file = shlex.quote(self.name) if self.name != "standard input" else "array.json"
        return (
            f"{where} is not JSON lines but a JSON array: write one object per line, for example with "
            f"jq -c '.[]' {file} > texts.jsonl"
        )


def finite(number: str) -> float:
    """A float of JSON, which has no infinity: Python would read 1e999 as such."""
    if math.isinf(value := float(number)):
        raise ValueError(f"{number[:20]} is too large a number")
    return value


def depth_of(record: dict[str, Any]) -> int:
    level: list[Any] = [record]
    depth = 0
    while level := [part for value in level for part in (value.values() if isinstance(value, dict) else value)]:
        level = [value for value in level if isinstance(value, dict | list)]
        depth += 1
    return depth


def seekable(file: BinaryIO) -> BinaryIO:
    """The file, or a temporary copy of what a pipe delivers."""
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()
    shutil.copyfileobj(file, copy)
    return copy


def identity_of(file: BinaryIO) -> tuple[int, int]:
    """Size and time of change, which differ in another process if the file was changed."""
    facts = os.fstat(file.fileno())
    return facts.st_size, facts.st_mtime_ns
