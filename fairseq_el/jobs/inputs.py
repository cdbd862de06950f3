"""The texts of a job: a file with a text a line, or a JSON object a line.

Any stretch of it can be read without what comes before, so that processes can share the work out.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from fairseq_el.errors import UserError
from fairseq_el.jobs.shards import Shard

TEXT_FIELDS = ("text", "article", "document")
DEEPEST = 100  # that values of a JSON object may be nested
LINES_PER_MARK = 256  # after so many lines the place in the file is noted


class Item(NamedTuple):
    text: str
    record: dict[str, Any]  # what goes out again beside the summary


class Texts:
    """The input, which is read once to find what is wrong with it, and again to be summarised."""

    def __init__(self, place: str, is_json: bool, text_field: str | None, new_field: str | None):
        """text_field: None for the first of TEXT_FIELDS that is there; new_field: must not be there."""
        self.name = "standard input" if place == "-" else place
        self.path = Path(place).absolute()
        self.is_json = is_json
        self.fields = (text_field,) if text_field else TEXT_FIELDS
        self.new_field = new_field
        self.file = seekable(sys.stdin.buffer if place == "-" else self.path.open("rb"))
        self.identity = identity_of(self.file)
        self.marks = array("q")  # where in the file every LINES_PER_MARK-th line begins
        self.digest, self.count = self._check()

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which is to `reopen` the file."""
        return vars(self) | {"file": None}

    def reopen(self) -> None:
        """By its name; what it holds is taken for checked, if it is still the same file."""
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
        """Those that a shard takes, each with its number among all."""
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

    def describe(self, place: int) -> str:
        """place: of a text, counted from 0."""
        record = self._items(place, 1)[0].record
        given = f" (id {json.dumps(record['id'])[:80]})" if self.is_json and "id" in record else ""
        return f"line {place + 1} of {self.name}{given}"

    def _item(self, line: bytes, number: int) -> Item:
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {number} of {self.name} is not UTF-8 (byte {error.start + 1}): convert the file, for "
                "example with iconv -f latin1 -t utf-8"
            ) from error
        if number == 1:
            text = text.removeprefix("\ufeff")  # with which some editors begin a file
        if not self.is_json:
            return Item(text, {"id": number})
        return self._from_json(text, number) if text.strip() else Item("", {})

    def _from_json(self, line: str, number: int) -> Item:
        where = f"line {number} of {self.name}"
        try:
            record = json.loads(line, parse_float=finite)
            if line.count("[") + line.count("{") > DEEPEST and depth_of(record) > DEEPEST:
                raise ValueError(f"its values are nested more than {DEEPEST} deep")  # and might not be written again
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: write one object a line ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object: write one object a line")
        if self.new_field in record:
            raise UserError(
                f"{where} has a field {self.new_field!r} already: name another for summaries with "
                "--summary-field"
            )
        field = next((field for field in self.fields if field in record), None)
        if field is None or not isinstance(record[field], str):
            has = ", ".join(map(str, record)) or "none"
            raise UserError(
                f"{where} has no text in a field {' or '.join(self.fields)} (its fields: {has}): name the "
                "field with --text-field"
            )
        return Item(record[field], record)


def finite(number: str) -> float:
    """JSON has no infinity, which 1e999 would come out as."""
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
    """What is piped in goes to a file first."""
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()
    shutil.copyfileobj(file, copy)
    return copy


def identity_of(file: BinaryIO) -> tuple[int, int]:
    """What another process sees of a file only if it is the same one, unchanged."""
    facts = os.fstat(file.fileno())
    return facts.st_size, facts.st_mtime_ns
