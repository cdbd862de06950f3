"""Worker for fairseq_el with so many threads, as many of which share a machine."""

from typing import Any

import torch

from bench.protocol import serve
from bench.worker_el import ELSystem


class ThreadedSystem(ELSystem):
    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        torch.set_num_threads(options["threads"])


if __name__ == "__main__":
    serve(ThreadedSystem)
