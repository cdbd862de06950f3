"""A job in shards, for many machines: which texts each takes, and the record that says that one is whole.

The input is cut into windows, whatever the number of shards, and a batch never reaches beyond its window. A shard
takes whole windows, and so forms the very batches that a single run forms of them. Beside its output lies
OUTPUT.shard, which says what job it is a part of, and the checksum of the output.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_el.errors import UserError
from fairseq_el.jobs.journal import WholeFile, as_line, from_line


@dataclass(frozen=True)
class Shard:
    """Every n-th window rather than a stretch of them: where lengths change along a file, all get their share."""

    number: int = 1
    total: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        shard = cls(int(match[1]), int(match[2])) if match else cls(0)
        if not 1 <= shard.number <= shard.total:
            raise UserError(f"--shard {text} is none: of 16 shards the first is 1/16 and the last 16/16")
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def takes(self, window: int) -> bool:
        """window: counted from 0."""
        return window % self.total == self.number - 1

    def windows(self, texts: int, window_size: int) -> range:
        """The numbers of those that it takes, where there are so many texts."""
        return range(self.number - 1, -(-texts // window_size), self.total)

    def share(self, texts: int, window_size: int) -> int:
        """How many of so many texts it takes."""
        whole_windows, rest = divmod(texts, window_size)
        taken = len(range(self.number - 1, whole_windows, self.total))
        return taken * window_size + (rest if self.takes(whole_windows) else 0)


@dataclass(frozen=True)
class Part:
    """The finished output of a shard."""

    path: Path
    shard: Shard
    job: dict[str, Any]  # what all shards have in common; its keys appear in messages
    texts: int  # of all shards
    window_size: int
    skipped: int  # texts of this shard that have no summary because of an error
    digest: str  # of the output

    @staticmethod
    def record_of(output: str | Path) -> Path:
        return Path(f"{output}.shard")

    def write(self) -> None:
        record = vars(self) | {"path": None, "shard": [self.shard.number, self.shard.total]}
        with WholeFile(self.record_of(self.path)) as whole:
            whole.file.write(as_line(record))

    @classmethod
    def read(cls, output: Path) -> "Part":
        path = cls.record_of(output)
        try:
            record = from_line(path.read_bytes())
            part = cls(**record | {"path": output, "shard": Shard(*record["shard"])})
        except (FileNotFoundError, KeyError, TypeError):
            part = None
        if part is None or not output.is_file():
            raise UserError(
                f"{output} is not the finished output of a shard: give files that summarize.py --shard wrote, "
                f"each with its {path.name} beside it"
            )
        return part
