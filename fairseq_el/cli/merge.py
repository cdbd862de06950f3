"""Merges the outputs of a sharded job: `fairseq-el merge`."""

import argparse
import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from fairseq_el.errors import UserError
from fairseq_el.jobs.atomic_file import AtomicFile, check_writable
from fairseq_el.jobs.journal import differences
from fairseq_el.jobs.shards import Part

NAMED = 10  # shards that a message lists


# ---- which files


def outputs_of(paths: Iterable[Path]) -> list[Path]:
    """Each output once, also where its record or journal is named."""
    outputs = {path.with_suffix("") if path.suffix in (".job", ".journal") else path for path in paths}
    return sorted(outputs)


def read_part(output: Path) -> Part:
    if output.with_name(f"{output.name}.journal").exists():
        raise UserError(f"{output} is unfinished: go on with its shard, with --resume")
    return Part.read(output)


def check_together(parts: list[Part]) -> None:
    """That these are all shards of one job."""
    first = parts[0]
    for part in parts[1:]:
        if other := differences(first.job, part.job):
            raise UserError(
                f"{part.path} was made from another {' and '.join(other)} than {first.path}: give the shards of "
                "one job"
            )
        if part.shard.total != first.shard.total:
            raise UserError(
                f"{part.path} is shard {part.shard} but {first.path} is {first.shard}, so that they overlap: "
                "give the shards of one job"
            )
    by_number = {part.shard.number: part for part in parts}
    if twice := next((part for part in parts if by_number[part.shard.number] is not part), None):
        raise UserError(
            f"{twice.path} and {by_number[twice.shard.number].path} overlap: both are shard {twice.shard}"
        )
    if missing := [n for n in range(1, first.shard.total + 1) if n not in by_number]:
        named = ", ".join(map(str, missing[:NAMED])) + (", ..." if len(missing) > NAMED else "")
        raise UserError(
            f"the set is incomplete: of {first.shard.total} shards {len(missing)} are missing ({named})"
        )


# ---- merging


class Reader:
    """An output, window by window. Opened only to be read: there may be more than a process can hold open."""

    def __init__(self, part: Part):
        self.part = part
        self.offset = 0
        self.digest = hashlib.sha256()

    def copy(self, lines: int, target: BinaryIO) -> None:
        with self.part.path.open("rb") as file:
            file.seek(self.offset)
            for line in itertools.islice(file, lines):
                target.write(line)
                self.digest.update(line)
                self.offset += len(line)

    def check(self) -> None:
        """That all of it was read, and was what the shard wrote."""
        whole = self.offset == self.part.path.stat().st_size
        if not whole or self.digest.hexdigest() != self.part.digest:
            raise UserError(
                f"{self.part.path} is not what its shard wrote, but was changed or cut: copy it again, or repeat "
                "the shard with --overwrite"
            )


def merge(parts: list[Part], target: BinaryIO) -> None:
    readers = [Reader(part) for part in sorted(parts, key=lambda part: part.shard.number)]
    texts, size = parts[0].texts, parts[0].window_size
    for first, reader in zip(range(0, texts, size), itertools.cycle(readers)):  # shards take windows in turn
        reader.copy(min(size, texts - first), target)
    for reader in readers:
        reader.check()


def main(args: argparse.Namespace) -> None:
    """args: of `options.merge`."""
    outputs = outputs_of(args.parts)
    if args.output in outputs:
        raise UserError(f"--output {args.output} is a shard: give another name")
    check_writable(args.output, sum(output.stat().st_size for output in outputs if output.is_file()))
    if args.output.exists() and not args.overwrite:
        raise UserError(f"{args.output} exists: give another --output, or replace it with --overwrite")
    parts = [read_part(output) for output in outputs]
    check_together(parts)
    with AtomicFile(args.output) as whole:
        merge(parts, whole.file)
    skipped = sum(part.skipped for part in parts)
    print(
        f"{parts[0].texts:,} texts of {len(parts):,} shards are in {args.output}"
        + (f"; {skipped:,} were skipped because of errors and have empty summaries" if skipped else "")
    )
