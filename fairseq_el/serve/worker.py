"""The process with the model: `python -m fairseq_el.serve.worker FILE_DESCRIPTOR`.

It reads `ModelSettings` and then batches, one at a time, and ends when the front closes the connection. A signal to the
whole process group (Ctrl-C, or a service manager's SIGTERM) leaves it alone: the front decides when its work is done.
"""

import logging
import signal
import sys
from multiprocessing.connection import Connection

from fairseq_el import heap
from fairseq_el.errors import explain
from fairseq_el.serve.engine import BatchCancelled, Engine
from fairseq_el.serve.messages import Batch, Cancel, LoadFailed, Ready

BATCHES_PER_TRIM = 256


class Worker:
    """Reads from the connection between batches, and during a batch only whether it is still wanted."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.wanted: set[int] | None = None  # texts of the batch in work that clients wait for; None while warming up

    def serve(self) -> None:
        try:
            engine = Engine(self.connection.recv(), self.connection.send, self.check_cancelled)
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            return self.connection.send(LoadFailed(message))
        self.connection.send(Ready(engine.facts))
        count = 0
        while True:
            message = self.connection.recv()
            if isinstance(message, Batch):  # else it cancels a batch that is done
                self.wanted = {text.job for text in message.texts}
                engine.run(message)
                count += 1
                if count % BATCHES_PER_TRIM == 0:
                    heap.trim()  # batches of ever new sizes leave gaps

    def check_cancelled(self) -> None:
        if self.wanted is None:
            return
        while self.connection.poll():
            message = self.connection.recv()
            assert isinstance(message, Cancel)  # the front sends a batch only when the last one is done
            self.wanted.discard(message.job)
        if not self.wanted:
            raise BatchCancelled


def main() -> None:
    logging.basicConfig(format="serve: warning: %(message)s", level=logging.WARNING, force=True)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    try:
        Worker(Connection(int(sys.argv[1]))).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the front has ended


if __name__ == "__main__":
    main()
