"""What a long job has finished, in a file that survives its end, whatever that is.

A record is a line: a checksum, and JSON. It is on the disk before `append` returns. The first record says
what job it is. A record that was being written when the job ended is incomplete, and dropped when it goes on.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fairseq_el.errors import UserError

try:
    import fcntl
except ImportError:  # on Windows two jobs with one journal are not noticed
    fcntl = None  # type: ignore[assignment]


def as_line(record: Any) -> bytes:
    content = json.dumps(record).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(content), content)


def from_line(line: bytes) -> Any:
    """The record, or None if the line is not a whole one."""
    checksum, _, content = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
        return None
    return json.loads(content)


class Journal:
    """Open, it belongs to one process. Closed, it stays if it has records; `remove` it when all is done."""

    def __init__(self, path: Path, job: dict[str, Any], resume: bool = False, overwrite: bool = False):
        """job: what must be the same for the job to go on; its keys appear in messages."""
        self.path = path
        self.file = open_for_appending(path)
        try:
            self._lock()
            if overwrite:
                self.file.truncate(0)
            saved, self.finished, size = self._read()
            if self.finished and not resume:
                raise UserError(
                    f"{path} is of a run that did not finish: go on with --resume, or start again with "
                    "--overwrite"
                )
            if self.finished:
                check_same_job(path, saved, job)
                self.file.truncate(size)
            else:
                self._begin(job)
        except BaseException:
            self.file.close()
            raise
        self.count = self.finished

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{self.path} is in use by another run: wait for it, or give another --output"
            ) from error

    def _read(self) -> tuple[Any, int, int]:
        """The job, the number of records behind it, and the bytes up to the end of the last whole one."""
        self.file.seek(0)
        job, count, size = None, -1, 0
        for line in self.file:
            record = from_line(line)
            if record is None:
                break
            job = record if count < 0 else job
            count, size = count + 1, size + len(line)
        self.file.seek(0)
        if job is None and b"\n" in self.file.read():
            raise UserError(f"{self.path} is not the journal of a run: move it away, or use --overwrite")
        return job, max(count, 0), size

    def _begin(self, job: dict[str, Any]) -> None:
        self.file.truncate(0)
        self._write(as_line(job))
        sync_folder(self.path.parent)

    def _write(self, line: bytes) -> None:
        try:
            self.file.write(line)
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} can't be written ({error.strerror}): make room and go on with --resume; "
                "what was finished is kept"
            ) from error

    def append(self, record: Any) -> None:
        self._write(as_line(record))
        self.count += 1

    def records(self) -> Iterator[Any]:
        """Those that were there when the journal was opened."""
        return (record for _, record in self.places())

    def places(self) -> Iterator[tuple[int, Any]]:
        """The same, each with its place in the file."""
        with self.path.open("rb") as file:
            next(file)
            for _ in range(self.finished):
                place = file.tell()
                yield place, from_line(file.readline())

    def close(self) -> None:
        if not self.file.closed:
            if not self.count:
                self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # where there is no room for a record, there is none now
                self.file.close()

    def remove(self) -> None:
        self.path.unlink()
        self.file.close()


def open_for_appending(path: Path) -> BinaryIO:
    check_folder(path)
    return path.open("a+b")


def sync_folder(path: Path) -> None:
    """Has the names in a folder survive a loss of power, as `fsync` has the contents of files."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_folder(path: Path, needed: int = 0) -> None:
    """Raise a `UserError` if a file of that name and of about so many bytes can't be written: there is a folder or a
    device in its place, no folder to write it to, or too little room."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file in it")
    if path.exists() and not path.is_file():  # which moving a file into its place would remove
        raise UserError(f"{path} is a device: give the name of a file, or write to standard output")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}: create it, or correct the name of the output")
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise UserError(
            f"{path.parent} has room for {free:,} bytes and the output takes about {needed:,} or more: make room, or "
            "write elsewhere"
        )


class WholeFile:
    """A file that is under another name until it is whole, and goes if it never is."""

    def __init__(self, path: Path):
        check_folder(path)
        self.path = path
        self.growing = path.with_name(f"{path.name}.tmp")
        self.file = self.growing.open("wb")
        self.is_whole = False

    def __enter__(self) -> "WholeFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.growing, self.path)
        self.is_whole = True
        sync_folder(self.path.parent)

    def discard(self) -> None:
        if self.is_whole:
            return
        with contextlib.suppress(OSError):  # where there is no room, closing fails to write the rest
            self.file.close()
        self.growing.unlink(missing_ok=True)


def check_same_job(path: Path, saved: Any, job: dict[str, Any]) -> None:
    other = differences(job, saved if isinstance(saved, dict) else {})
    if other:
        raise UserError(
            f"{path} is of a run with another {' and '.join(other)}: repeat what that run was started with, "
            "or start again with --overwrite"
        )


def differences(job: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What another job doesn't have in common with this one."""
    return [name for name in job if name not in other or other[name] != job[name]]
