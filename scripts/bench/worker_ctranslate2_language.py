"""Worker for GPT-2 in CTranslate2; runs in the peers' environment."""

import time

import ctranslate2

from bench.protocol import EOS, Answer, Request, serve
from bench.worker_ctranslate2 import CTranslate2System


class CTranslate2LanguageSystem(CTranslate2System):
    engine_class = ctranslate2.Generator

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        """</s> is barred in all `length` positions; the last holds a word where the others have </s>."""
        prompts = [[self.names[token] for token in (EOS, *source[:-1])] for source in sources]
        started = time.perf_counter()
        results = self.engine.generate_batch(
            prompts,
            beam_size=request.beam,
            min_length=request.length,
            max_length=request.length,
            include_prompt_in_result=False,
        )
        seconds = time.perf_counter() - started
        return self.checked(request, seconds, [result.sequences_ids[0] for result in results])


if __name__ == "__main__":
    serve(CTranslate2LanguageSystem)
