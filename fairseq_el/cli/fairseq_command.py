"""Runs fairseq's own commands, with their output in a log."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fairseq_el.resources import TREE


class CommandFailed(Exception):
    """A fairseq command failed. The message has the command and the end of its output."""


def fairseq(arguments: list[str | Path], log: Path, on_line: Callable[[str], None]) -> None:
    """Runs a fairseq command, passes its lines to `on_line` and writes them all to `log`.

    fairseq prints many of hydra's deprecation warnings and debug lines; they only go to the log. If the command fails,
    the end of the log is part of the error.
    """
    command = [str(Path(sys.executable).with_name(str(arguments[0]))), *map(str, arguments[1:])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",  # for progress, lines must arrive as they are written
        "PYTHONUTF8": "1",
        "PYTHONWARNINGS": "ignore",
        "LOGLEVEL": "INFO",  # the speed is logged at this level
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as log_file,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log_file.write(line)
            on_line(line.rstrip("\n"))
    if process.returncode != 0:
        # fairseq also prints its whole configuration, in a line of thousands of characters.
        last_lines = "\n".join(line[:400] for line in log.read_text(encoding="utf-8").splitlines()[-20:])
        raise CommandFailed(
            f"{last_lines}\n\nThis command failed with status {process.returncode}"
            f" (all output: {log}):\n  {shlex.join(command)}"
        )


def human_size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
