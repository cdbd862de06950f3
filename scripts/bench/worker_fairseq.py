"""What the fairseq-based workers share: loading, one forced-length generation, and the encoder's
share."""

import time
from argparse import Namespace
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor

from bench.parts import age_nothing, time_parts
from bench.protocol import (
    PAD,
    THREADS,
    Answer,
    Request,
    padded,
    reset_peak,
    resident_memory,
    without_eos,
)

WARMING = 2  # sentences


class EncoderProbe:
    """Stands in front of one encoder's `forward`: times it, or hands out what `remember`
    prepared."""

    def __init__(self, encoder: torch.nn.Module):
        self.encoder = encoder
        self.compute = encoder.forward
        self.seconds = 0.0
        self.distinct: tuple[Tensor, Any] | None = None  # sentences [u, n] and their encoder output
        self.facts: dict[str, Any] = {}  # of encoding these
        self.warmed: Tensor | None = None  # what was encoded to warm up
        self.prepared: Any = None
        encoder.forward = self  # on this instance only; the class stays as it is

    def __call__(self, src_tokens: Tensor, src_lengths: Tensor, **options):
        if self.prepared is not None:
            return self.prepared
        started = time.perf_counter()
        output = self.compute(src_tokens, src_lengths=src_lengths, **options)
        self.seconds += time.perf_counter() - started
        return output

    @torch.no_grad()
    def remember(self, src_tokens: Tensor) -> None:
        """Prepares the output for a batch [b, n]; its distinct sentences are encoded at most
        once."""
        distinct, rows = torch.unique(src_tokens, dim=0, return_inverse=True)  # [u, n], [b]
        if self.distinct is None or not torch.equal(self.distinct[0], distinct):
            self.distinct = (distinct, self.encode_and_note(distinct))
        # The class's method: on a stock BART that shares K and V, the instance's does nothing.
        self.prepared = type(self.encoder).reorder_encoder_out(self.encoder, self.distinct[1], rows)

    def encode_and_note(self, sentences: Tensor) -> Any:
        """sentences: [u, n]. Some are encoded before, for what only a first call has to do: kernels are made for a
        shape, weights read from the disk. A long run pays for that once."""
        few = sentences[:WARMING]
        if self.warmed is None or not torch.equal(self.warmed, few):
            self.warmed = few
            self.compute(few, src_lengths=few.ne(PAD).sum(dim=1))
        resident, started = resident_memory()["resident"], time.perf_counter()
        output = self.compute(sentences, src_lengths=sentences.ne(PAD).sum(dim=1))
        self.facts = {
            "sources": sentences.size(0),
            "source_seconds": time.perf_counter() - started,
            "source_peak_bytes": resident_memory()["peak"] - resident,
        }
        return output

    def forget(self) -> None:
        self.distinct = self.prepared = None


class StepClock:
    """Notes when each decoding step begins. The first step is left out: K and V are built in it."""

    def __init__(self, ensemble: torch.nn.Module):
        self.begun: list[float] = []
        self.decode = ensemble.forward_decoder
        ensemble.forward_decoder = self  # on this instance only; the class stays as it is

    def __call__(self, *args):
        self.begun.append(time.perf_counter())
        return self.decode(*args)

    def step_seconds(self) -> float | None:
        steps = [after - before for before, after in pairwise(self.begun[1:])]
        return median(steps) if steps else None


class FairseqSystem:
    """A fairseq task, model and generator; subclasses say which, and how they count cached
    bytes."""

    def __init__(self, options: dict[str, Any]):
        torch.set_num_threads(THREADS)
        self.task = self.setup_task(options)
        models, _ = checkpoint_utils.load_model_ensemble([options["checkpoint"]], task=self.task)
        self.model = models[0].eval()
        # what fairseq-generate passes: the settings of this run, not those of the training
        self.model.prepare_for_inference_(
            Namespace(task=self.task.cfg, generation=GenerationConfig())
        )
        if options.get("half"):  # what `--fp16` does
            self.model.half()
        self.encoder = EncoderProbe(self.model.encoder)
        self.vocabulary = len(self.task.target_dictionary)
        self.versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__}

    def setup_task(self, options: dict[str, Any]):
        raise NotImplementedError

    def build_generator(self, request: Request):
        raise NotImplementedError

    def source_state_bytes(self, generator, sample: dict[str, Any]) -> int:
        raise NotImplementedError

    def generation_options(self, request: Request) -> Namespace:
        """Exactly `request.length` tokens: </s> is barred before the last position and forced
        there."""
        words = request.length - 1
        lengths = {"max_len_a": 0, "max_len_b": words, "min_len": words}
        return Namespace(**{"beam": request.beam, "nbest": 1, **lengths, **request.search})

    def sample(self, sources: list[list[int]]) -> dict[str, Any]:
        """Without ids: by these, stock fairseq's diverse beam search would look up rows of the batch."""
        tokens = torch.tensor(padded(sources, left=True))  # [b, n]
        lengths = tokens.ne(PAD).sum(dim=1)
        return {"id": None, "net_input": {"src_tokens": tokens, "src_lengths": lengths}}

    def ageing(self, request: Request):
        """What makes the state of a generation older, for `parts`."""
        return age_nothing

    def state_bytes(self, generator) -> int | None:
        """Of a generation that is over, at its peak."""
        return None

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        generator = self.build_generator(request)
        sample = self.sample(sources)
        if request.op not in ("decode", "parts"):
            self.encoder.forget()
        if request.op in ("decode", "parts", "sources"):
            self.encoder.remember(sample["net_input"]["src_tokens"])
        if request.op == "sources":
            return Answer(parts=self.encoder.facts)
        if request.op == "parts":
            return self.answer_in_parts(request, generator, sample)
        if request.op == "source_state":
            return Answer(source_state_bytes=self.source_state_bytes(generator, sample))
        self.encoder.seconds = 0.0
        clock = StepClock(generator.model)
        started = time.perf_counter()
        hypotheses = generator.generate([self.model], sample)
        return Answer(
            seconds=time.perf_counter() - started,
            encoder_seconds=None if request.op == "decode" else self.encoder.seconds,
            step_seconds=clock.step_seconds(),
            state_bytes=self.state_bytes(generator),
            tokens=[without_eos(best[0]["tokens"].tolist()) for best in hypotheses],
        )

    def answer_in_parts(self, request: Request, generator, sample: dict[str, Any]) -> Answer:
        """The peak of memory is then that of decoding; encoding has its own."""
        reset_peak()
        resident = resident_memory()["resident"]
        parts = time_parts(
            generator.model,
            request.length,
            self.ageing(request),
            lambda: generator.generate([self.model], sample),
        )
        return Answer(parts=self.encoder.facts | parts | {"resident_bytes": resident})
