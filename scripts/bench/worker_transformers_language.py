"""Worker for GPT-2 in Hugging Face Transformers; runs in the peers' environment."""

import time
from typing import Any

import torch
import transformers

from bench.protocol import EOS, Answer, Request, serve, without_eos
from bench.worker_transformers import VERSIONS, ClosingToken, load


class TransformersLanguageSystem:
    """`generate` with the library's default cache, float32."""

    versions = VERSIONS

    def __init__(self, options: dict[str, Any]):
        self.model = load(transformers.GPT2LMHeadModel, options)
        self.vocabulary = self.model.config.vocab_size

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        tokens = torch.tensor([[EOS, *source[:-1]] for source in sources])  # [b, n]
        n = tokens.size(1)
        closing = ClosingToken(n + request.length - 1)
        started = time.perf_counter()
        generated = self.model.generate(  # [b, n + length]
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=request.beam,
            do_sample=False,
            min_new_tokens=request.length - 1,
            max_new_tokens=request.length,
            logits_processor=transformers.LogitsProcessorList([closing]),
        )
        seconds = time.perf_counter() - started
        if generated.size(1) != n + request.length:
            raise RuntimeError(f"{generated.size(1) - n} tokens instead of {request.length}")
        tokens_out = [without_eos(row) for row in generated[:, n:].tolist()]
        return Answer(seconds=seconds, step_seconds=closing.step_seconds(), tokens=tokens_out)


if __name__ == "__main__":
    serve(TransformersLanguageSystem)
