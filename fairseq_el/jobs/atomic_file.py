"""Output files that are complete or absent, and checks of where they are to be written."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from fairseq_el.errors import UserError


class AtomicFile:
    """A file that has a temporary name until it is complete, and is removed if it never is."""

    def __init__(self, path: Path):
        check_writable(path)
        self.path = path
        self.temporary = path.with_name(f"{path.name}.tmp")
        self.file = open_for_writing(self.temporary, "wb")
        self.is_complete = False

    def __enter__(self) -> "AtomicFile":
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
        os.replace(self.temporary, self.path)
        self.is_complete = True
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes an incomplete file; leaves a complete one alone."""
        if self.is_complete:
            return
        with contextlib.suppress(OSError):  # on a full disk, closing fails to flush
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def open_for_writing(path: Path, mode: str) -> BinaryIO:
    """Like `path.open`, but blames the folder if the file does not exist yet."""
    try:
        return path.open(mode)  # type: ignore[return-value]
    except OSError as error:
        what = path if path.exists() else f"the folder {path.parent}"
        raise UserError(
            f"{what} can't be written to ({error.strerror}): change its permissions, or write elsewhere"
        ) from error


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to the disk, as `fsync` does for the contents of files."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_writable(path: Path, needed: int = 0) -> None:
    """Raises a `UserError` if no file of about `needed` bytes can be written to `path`."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file in it")
    if path.exists() and not path.is_file():  # replacing it would remove the device
        raise UserError(f"{path} is a device: give the name of a file, or write to standard output")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}: create it, or correct the name of the output")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"the folder {path.parent} can't be written to: change its permissions, or write elsewhere")
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise UserError(
            f"{path.parent} has room for {free:,} bytes and the output takes at least about {needed:,}: make room, or "
            "write elsewhere"
        )
