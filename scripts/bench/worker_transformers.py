"""Worker for Hugging Face Transformers; runs in the peers' environment."""

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import transformers

from bench.protocol import EOS, PAD, THREADS, Answer, Request, padded, serve, without_eos


class ClosingToken(transformers.LogitsProcessor):
    """Leaves </s> as the only choice for the last token, with its score, as fairseq does. Called once a
    step, it also notes the time.

    The library's own `forced_eos_token_id` scores it zero, which ranks the beams differently.
    """

    def __init__(self, last_position: int):
        self.last_position = last_position
        self.called: list[float] = []

    def step_seconds(self) -> float:
        return median(after - before for before, after in pairwise(self.called))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids: [b * x, tokens so far], scores: [b * x, vocabulary]"""
        self.called.append(time.perf_counter())
        if input_ids.size(1) < self.last_position:
            return scores
        return torch.full_like(scores, -torch.inf).index_copy_(
            1, torch.tensor([EOS]), scores[:, EOS : EOS + 1]
        )


def load(model_class: type, options: dict[str, Any]) -> transformers.PreTrainedModel:
    torch.set_num_threads(THREADS)
    return model_class.from_pretrained(options["model"], dtype=torch.float32).eval()


VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}


class TransformersSystem:
    """`generate` with the library's default cache, float32."""

    versions = VERSIONS

    def __init__(self, options: dict[str, Any]):
        self.model = load(transformers.BartForConditionalGeneration, options)
        self.vocabulary = self.model.config.vocab_size
        self.encoder_seconds = 0.0
        encoder = self.model.get_encoder()
        encoder.register_forward_pre_hook(self.encoder_starts)
        encoder.register_forward_hook(self.encoder_ends)

    def encoder_starts(self, module, inputs) -> None:
        self.encoder_started = time.perf_counter()

    def encoder_ends(self, module, inputs, output) -> None:
        self.encoder_seconds += time.perf_counter() - self.encoder_started

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        """length - 1 words, </s> barred among them, then </s> forced: `length` steps."""
        tokens = torch.tensor(padded(sources, left=False))  # [b, n]
        self.encoder_seconds = 0.0
        closing = ClosingToken(request.length)
        started = time.perf_counter()
        generated = (
            self.model.generate(  # [b, 1 + length], the first being the decoder's start token
                tokens,
                attention_mask=tokens.ne(PAD).long(),
                num_beams=request.beam,
                do_sample=False,
                min_new_tokens=request.length - 1,
                max_new_tokens=request.length,
                forced_eos_token_id=None,
                logits_processor=transformers.LogitsProcessorList([closing]),
            )
        )
        seconds = time.perf_counter() - started
        if generated.size(1) != 1 + request.length:
            raise RuntimeError(f"{generated.size(1) - 1} tokens instead of {request.length}")
        return Answer(
            seconds=seconds,
            encoder_seconds=self.encoder_seconds,
            step_seconds=closing.step_seconds(),
            tokens=[without_eos(row) for row in generated[:, 1:].tolist()],
        )


if __name__ == "__main__":
    serve(TransformersSystem)
