"""Worker for Hugging Face Transformers, and for OpenVINO and ONNX Runtime through optimum, each in its environment."""

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.checkpoints import class_for
from bench.protocol import EOS, PAD, THREADS, Answer, Request, Sentences, in_batches, padded, serve, without_eos


class ClosingToken(transformers.LogitsProcessor):
    """Leaves </s> as the only choice for the last token, with its score, as fairseq does.

    The library's own `forced_eos_token_id` scores it zero, which ranks the beams differently.
    """

    def __init__(self, last_position: int):
        self.last_position = last_position

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids: [b * x, tokens so far], scores: [b * x, vocabulary]"""
        if input_ids.size(1) < self.last_position:
            return scores
        closed = torch.full_like(scores, -torch.inf)
        closed[:, EOS] = scores[:, EOS]
        return closed


def load_transformers(options: dict[str, Any]) -> tuple[Any, str]:
    kind = "CausalLM" if options["language_model"] else "Seq2SeqLM"
    model_class = getattr(transformers, f"AutoModelFor{kind}")
    model = model_class.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])).eval()
    settings = f"dtype=torch.{options['dtype']}"
    if options.get("compile"):
        model.forward = torch.compile(model.forward, dynamic=True)
        settings += ", model.forward = torch.compile(model.forward, dynamic=True)"
    return model, settings


def load_openvino(options: dict[str, Any]) -> tuple[Any, str]:
    import optimum.intel as library

    hints = {"INFERENCE_NUM_THREADS": str(THREADS)} | options.get("hints", {})
    model = class_for(library, "OV", Path(options["model"])).from_pretrained(options["model"], ov_config=hints)
    return model, f"ov_config={hints}"


def load_onnxruntime(options: dict[str, Any]) -> tuple[Any, str]:
    import onnxruntime
    import optimum.onnxruntime as library

    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = THREADS
    model_class = class_for(library, "ORT", Path(options["model"]))
    return model_class.from_pretrained(options["model"], session_options=session), f"intra_op_num_threads={THREADS}"


LOADERS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "transformers": (load_transformers, ()),
    "openvino": (load_openvino, ("openvino", "optimum-intel")),
    "onnxruntime": (load_onnxruntime, ("onnxruntime", "optimum-onnx")),
}


class GenerateSystem:
    """`generate` with the library's default cache."""

    def __init__(self, options: dict[str, Any]):
        torch.set_num_threads(THREADS)
        self.is_language_model = options["language_model"]
        self.vocabulary = options["vocabulary"]
        load, packages = LOADERS[options["library"]]
        self.model, self.settings = load(options)
        self.versions = {name: version(name) for name in (*packages, "transformers", "torch")}

    def generate(self, request: Request, sources: Sentences) -> Answer:
        if request.op == "encode":
            return self.encode(sources)
        if self.is_language_model:
            sources = [[EOS, *source[:-1]] for source in sources]
        started = time.perf_counter()
        tokens = [row for batch in in_batches(sources, request.batch) for row in self.generate_batch(request, batch)]
        seconds = time.perf_counter() - started
        if request.op == "generate" and any(len(row) != request.length for row in tokens):
            raise RuntimeError(f"{sorted({len(row) for row in tokens})} tokens instead of {request.length}")
        return {"seconds": seconds, "tokens": [without_eos(row) for row in tokens]}

    @torch.no_grad()
    def encode(self, sources: Sentences) -> Answer:
        tokens = torch.tensor(padded(sources, left=False))  # [b, n]
        encoder = self.model.get_encoder()
        started = time.perf_counter()
        encoder(input_ids=tokens, attention_mask=tokens.ne(PAD).long())
        return {"seconds": time.perf_counter() - started}

    def generate_batch(self, request: Request, sources: Sentences) -> Sentences:
        """`length` steps: words, of which none is </s> unless `op` is "texts", and then </s>."""
        tokens = torch.tensor(padded(sources, left=self.is_language_model))  # [b, n]
        given = tokens.size(1) if self.is_language_model else 1  # else the decoder's start token
        natural = request.op == "texts"
        generated = self.model.generate(  # [b, given + length]
            input_ids=tokens,
            attention_mask=tokens.ne(PAD).long(),
            num_beams=request.beam,
            do_sample=False,
            early_stopping=request.beam > 1,
            min_new_tokens=1 if natural else request.length - 1,
            max_new_tokens=request.length,
            logits_processor=transformers.LogitsProcessorList([ClosingToken(given + request.length - 1)]),
        )
        return generated[:, given:].tolist()


if __name__ == "__main__":
    serve(GenerateSystem)
