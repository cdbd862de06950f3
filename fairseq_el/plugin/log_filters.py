"""Silences messages of fairseq's libraries that users can't act on."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def silence_library_notices() -> None:
    """Ignores hydra's deprecation warnings (fairseq was written for hydra 1.0) and debug lines, and warnings about
    pinned memory on machines without an accelerator."""
    warnings.filterwarnings("ignore", module=r"hydra(\.|$)")
    for begins in (
        r"\s*The version_base parameter is not specified",
        r"\s*'config' is validated against ConfigStore schema",
        r"\s*The strict flag in the compose API is deprecated",
        r"hydra\.experimental\.\w+\(\) is no longer experimental",
        r"'pin_memory' argument is set as true but no accelerator is found",
        r"`torch\.jit\.script` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=begins)
    logging.getLogger("hydra").setLevel(logging.WARNING)


@contextmanager
def no_import_notices() -> Iterator[None]:
    """Silences fairseq's log while it is imported, such as "Please install tensorboardX".

    Where fairseq is imported before fairseq_el, it has printed these already.
    """
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def stderr_in_file(path: Path) -> Iterator[None]:
    """Redirects the standard error of this process to a file, also for code that is not Python."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
