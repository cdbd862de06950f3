"""The finished work of a long job, in a file that survives a crash of the process or of the machine.

Each record is one line: a checksum and JSON. It is on the disk before `append` returns. The first record identifies
the job. A record that was being written during a crash is incomplete; resuming drops it.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_el.errors import UserError
from fairseq_el.jobs.atomic_file import check_writable, open_for_writing, sync_folder

try:
    import fcntl
except ImportError:  # Windows, where two jobs with one journal go unnoticed
    fcntl = None  # type: ignore[assignment]


def as_line(record: Any) -> bytes:
    content = json.dumps(record).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(content), content)


def from_line(line: bytes) -> Any:
    """The record, or None if the line is incomplete or damaged."""
    checksum, _, content = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
        return None
    return json.loads(content)


class Journal:
    """Locked by one process while open. `close` keeps the file if it has records; `remove` deletes it."""

    def __init__(self, path: Path, job: dict[str, Any], resume: bool = False, overwrite: bool = False):
        """job: what must be equal for a job to be resumed; its keys appear in messages."""
        self.path = path
        check_writable(path)
        self.file = open_for_writing(path, "a+b")
        try:
            self._lock()
            if overwrite:
                self.file.truncate(0)
            saved, self.finished, size = self._read()
            if self.finished and not resume:
                raise UserError(
                    f"{path} is of a run that did not finish: continue it with --resume, or start again with "
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
        """The job, the number of records after it, and the size in bytes up to the last complete record."""
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
                f"{self.path} can't be written ({error.strerror}): make room and continue with --resume; "
                "what was finished is kept"
            ) from error

    def append(self, record: Any) -> None:
        self._write(as_line(record))
        self.count += 1

    def records(self) -> Iterator[Any]:
        """The records that the journal had when it was opened."""
        return (record for _, record in self.offsets())

    def offsets(self) -> Iterator[tuple[int, Any]]:
        """The same records, each with its offset in the file."""
        with self.path.open("rb") as file:
            next(file)
            for _ in range(self.finished):
                offset = file.tell()
                yield offset, from_line(file.readline())

    def close(self) -> None:
        if not self.file.closed:
            if not self.count:
                self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # on a full disk, closing fails to flush
                self.file.close()

    def remove(self) -> None:
        self.path.unlink()
        self.file.close()


def check_same_job(path: Path, saved: Any, job: dict[str, Any]) -> None:
    other = differences(job, saved if isinstance(saved, dict) else {})
    if other:
        raise UserError(
            f"{path} is of a run with another {' and '.join(other)}: repeat the command of that run, give another "
            "--output, or start again with --overwrite"
        )


def differences(job: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The keys of `job` whose values `other` does not share."""
    return [name for name in job if name not in other or other[name] != job[name]]
