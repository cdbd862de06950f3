"""Sampling that depends on the text only, not on the rest of the batch."""

import hashlib
import threading

import torch
from fairseq.data import Dictionary
from fairseq.search import Sampling

RANDOM_NUMBERS = threading.Lock()  # torch has one global generator for all threads


class TextSampling(Sampling):
    """Sampling seeded by the tokens generated so far and `seed`, so that a text gets the same samples in any batch."""

    def __init__(self, dictionary: Dictionary, stock: Sampling, seed: int):
        super().__init__(dictionary, stock.sampling_topk, stock.sampling_topp)
        self.key = str(seed).encode()

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        """lprobs: [b, x, vocabulary], scores: [b, x, step], prev_output_tokens: [b * x, step + 1]."""
        b = lprobs.size(0)
        texts = prev_output_tokens.reshape(b, -1).cpu().numpy()
        random = (
            torch.cuda.default_generators[lprobs.get_device()] if lprobs.is_cuda else torch.default_generator
        )
        found = []
        with RANDOM_NUMBERS:
            before = random.get_state()
            try:
                for row in range(b):
                    digest = hashlib.blake2b(texts[row].tobytes(), key=self.key, digest_size=8).digest()
                    random.manual_seed(int.from_bytes(digest, "little"))
                    found.append(super().step(step, lprobs[row : row + 1], scores[row : row + 1]))
            finally:
                random.set_state(before)
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
