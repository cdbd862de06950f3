"""The front's end of a worker: starts the process, sends it messages, and passes on what it says."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fairseq_el.serve.settings import ModelSettings


class WorkerProcess:
    """on_message, on_exit: called in the event loop; the latter with the process's exit status, once, at its end."""

    def __init__(self, on_message: Callable[[Any], None], on_exit: Callable[[int], None]):
        self.on_message = on_message
        self.on_exit = on_exit
        self.process: subprocess.Popen | None = None
        self.connection: Connection | None = None

    def start(self, settings: ModelSettings) -> None:
        self.loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "fairseq_el.serve.worker", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.connection = Connection(ours.detach())
        self.send(settings)
        self.loop.add_reader(self.connection.fileno(), self._receive)

    def send(self, message: Any) -> None:
        """The worker reads at once, or the message fits into the socket's buffer; so this does not block for long."""
        assert self.connection is not None
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died, and `on_exit` is about to be called

    def stop(self) -> None:
        """Kills it: the server stops when no client waits for anything any more."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def _receive(self) -> None:
        """Reads a message whole: the worker has written all of it, or does so at once."""
        assert self.process is not None and self.connection is not None
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.loop.remove_reader(self.connection.fileno())
            self.connection.close()
            self.waiting = self.loop.create_task(self._wait(self.process))
        else:
            self.on_message(message)

    async def _wait(self, process: subprocess.Popen) -> None:
        self.on_exit(await asyncio.to_thread(process.wait))
