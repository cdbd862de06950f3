"""Worker for CTranslate2; runs in its environment."""

import time
from typing import Any

import ctranslate2

from bench.checkpoints import token_name
from bench.protocol import EOS, THREADS, Answer, Request, Sentences, serve


class CTranslate2System:
    """One call for all sentences, which the library divides. With `workers`, each of one thread takes a part."""

    def __init__(self, options: dict[str, Any]):
        self.is_language_model = options["language_model"]
        self.workers = options.get("workers", 1)
        engine = ctranslate2.Generator if self.is_language_model else ctranslate2.Translator
        threads = {"inter_threads": self.workers, "intra_threads": THREADS // self.workers}
        self.engine = engine(options["model"], device="cpu", compute_type=options["compute_type"], **threads)
        settings = {"compute_type": options["compute_type"]} | threads | {"batch_type": "tokens"}
        settings["max_batch_size"] = f"{'half of ' * (self.workers > 1)}the batch, in tokens"
        if self.is_language_model:
            settings["include_prompt_in_result"] = False
        self.settings = ", ".join(f"{name}={value}" for name, value in settings.items())
        self.vocabulary = options["vocabulary"]
        self.names = [token_name(index) for index in range(self.vocabulary)]
        self.ids = {name: index for index, name in enumerate(self.names)}
        self.versions = {"ctranslate2": ctranslate2.__version__}

    def generate(self, request: Request, sources: Sentences) -> Answer:
        """</s> is barred in all `length` positions, and decoding ends after them: `length` steps.

        The last position holds a word where the other systems have </s>; it is left out of the answer.
        """
        if self.is_language_model:
            sources = [[EOS, *source[:-1]] for source in sources]
        named = [[self.names[token] for token in sentence] for sentence in sources]
        started = time.perf_counter()
        results = self.engine_call(request, named)
        seconds = time.perf_counter() - started
        tokens = [[self.ids[name] for name in words] for words in results]
        if request.op == "texts":
            return {"seconds": seconds, "tokens": tokens}
        for sentence in tokens:
            if len(sentence) != request.length:
                raise RuntimeError(f"{len(sentence)} tokens instead of {request.length}")
        return {"seconds": seconds, "tokens": [sentence[:-1] for sentence in tokens]}

    def engine_call(self, request: Request, named: list[list[str]]) -> list[list[str]]:
        least, most = (1, request.length) if request.op == "texts" else (request.length, request.length)
        # the library sorts by length and fills batches with so many tokens, padding included
        tokens = -(-request.batch // self.workers) * max(map(len, named))
        batching = {"max_batch_size": tokens, "batch_type": "tokens", "beam_size": request.beam}
        if self.is_language_model:
            lengths = {"min_length": least, "max_length": most, "include_prompt_in_result": False}
            return [r.sequences[0] for r in self.engine.generate_batch(named, **batching, **lengths)]
        lengths = {"min_decoding_length": least, "max_decoding_length": most, "max_input_length": 0}
        return [r.hypotheses[0] for r in self.engine.translate_batch(named, **batching, **lengths)]


if __name__ == "__main__":
    serve(CTranslate2System)
