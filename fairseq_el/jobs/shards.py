"""Shards of a job, for many machines: which texts each takes, and the record of a finished output.

The input is split into windows, whatever the number of shards, and no batch spans two windows. A shard takes whole
windows, and so forms the same batches as a single run. A finished output, of a shard or of a whole job, has a record
next to it, OUTPUT.job: which job it is of, and the checksum of the output.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_el.errors import UserError
from fairseq_el.jobs.atomic_file import AtomicFile
from fairseq_el.jobs.journal import as_line, from_line


@dataclass(frozen=True)
class Shard:
    """Takes every n-th window, so that shards get equal shares even if lengths change along the file."""

    number: int = 1
    total: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        shard = cls(int(match[1]), int(match[2])) if match else cls(0)
        if not 1 <= shard.number <= shard.total:
            raise UserError(f"invalid --shard {text}: of 16 shards the first is 1/16 and the last 16/16")
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def takes(self, window: int) -> bool:
        """window: counted from 0."""
        return window % self.total == self.number - 1

    def windows(self, texts: int, window_size: int) -> range:
        """The numbers of its windows in an input of `texts` texts."""
        return range(self.number - 1, -(-texts // window_size), self.total)

    def share(self, texts: int, window_size: int) -> int:
        """How many of `texts` texts it takes."""
        whole_windows, rest = divmod(texts, window_size)
        taken = len(range(self.number - 1, whole_windows, self.total))
        return taken * window_size + (rest if self.takes(whole_windows) else 0)


@dataclass(frozen=True)
class Part:
    """The finished output of a shard, or of a whole job as its only shard."""

    path: Path
    shard: Shard
    job: dict[str, Any]  # what all shards have in common; its keys appear in messages
    texts: int  # of all shards
    window_size: int
    skipped: int  # texts of this shard that have no summary because of an error
    digest: str  # of the output

    @staticmethod
    def record_of(output: str | Path) -> Path:
        return Path(f"{output}.job")

    def write(self) -> None:
        record = vars(self) | {"path": None, "shard": [self.shard.number, self.shard.total]}
        with AtomicFile(self.record_of(self.path)) as record_file:
            record_file.file.write(as_line(record))

    @classmethod
    def find(cls, output: Path) -> "Part | None":
        """The part that a file is the output of; None without a valid record."""
        try:
            record = from_line(cls.record_of(output).read_bytes())
            return cls(**record | {"path": output, "shard": Shard(*record["shard"])})
        except (FileNotFoundError, KeyError, TypeError):
            return None

    @classmethod
    def read(cls, output: Path) -> "Part":
        part = cls.find(output)
        if part is None or not output.is_file():
            raise UserError(
                f"{output} is not the finished output of a shard: give files that fairseq-el summarize --shard wrote, "
                f"each with its {cls.record_of(output).name} in the same folder"
            )
        return part

    def check_unchanged(self) -> None:
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.digest:
                raise UserError(
                    f"{self.path} was changed after it was written: give another --output, or write it again with "
                    "--overwrite"
                )
