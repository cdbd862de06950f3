"""Worker for CTranslate2; runs in the peers' environment."""

import time
from typing import Any

import ctranslate2

from bench.convert import token_name
from bench.protocol import THREADS, Answer, Request, serve


class CTranslate2System:
    engine_class = ctranslate2.Translator

    def __init__(self, options: dict[str, Any]):
        self.vocabulary = options["vocabulary"]
        self.engine = self.engine_class(
            options["model"],
            device="cpu",
            compute_type=options["compute_type"],
            inter_threads=1,
            intra_threads=THREADS,
        )
        self.names = [token_name(index) for index in range(self.vocabulary)]
        self.ids = {name: index for index, name in enumerate(self.names)}
        self.versions = {"ctranslate2": ctranslate2.__version__}

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        """</s> is barred in all `length` positions, and decoding ends after them: `length` steps.

        The last position holds a word where the other systems have </s>; it is left out of the answer.
        """
        named = [[self.names[token] for token in sentence] for sentence in sources]
        started = time.perf_counter()
        results = self.engine.translate_batch(
            named,
            beam_size=request.beam,
            min_decoding_length=request.length,
            max_decoding_length=request.length,
            max_input_length=0,
        )
        seconds = time.perf_counter() - started
        tokens = [[self.ids[name] for name in result.hypotheses[0]] for result in results]
        return self.checked(request, seconds, tokens)

    def checked(self, request: Request, seconds: float, tokens: list[list[int]]) -> Answer:
        for sentence in tokens:
            if len(sentence) != request.length:
                raise RuntimeError(f"{len(sentence)} tokens instead of {request.length}")
        return Answer(seconds=seconds, tokens=[sentence[:-1] for sentence in tokens])


if __name__ == "__main__":
    serve(CTranslate2System)
