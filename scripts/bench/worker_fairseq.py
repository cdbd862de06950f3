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

from bench.protocol import THREADS, Answer, Request, without_eos


class EncoderProbe:
    """Stands in front of one encoder's `forward`: times it, or hands out what `remember`
    prepared."""

    def __init__(self, encoder: torch.nn.Module):
        self.encoder = encoder
        self.compute = encoder.forward
        self.seconds = 0.0
        self.distinct: tuple[Tensor, Any] | None = None  # sentences [u, n] and their encoder output
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
            lengths = torch.full((distinct.size(0),), distinct.size(1))
            self.distinct = (distinct, self.compute(distinct, src_lengths=lengths))
        # The class's method: on a stock BART that shares K and V, the instance's does nothing.
        self.prepared = type(self.encoder).reorder_encoder_out(self.encoder, self.distinct[1], rows)

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
        """Exactly `request.length` tokens: </s> is barred before the last place and forced
        there."""
        words = request.length - 1
        return Namespace(beam=request.beam, max_len_a=0, max_len_b=words, min_len=words, nbest=1)

    def sample(self, sources: list[list[int]]) -> dict[str, Any]:
        tokens = torch.tensor(sources)  # [b, n]
        lengths = torch.full((len(sources),), tokens.size(1))
        return {
            "id": torch.arange(len(sources)),
            "net_input": {"src_tokens": tokens, "src_lengths": lengths},
        }

    def answer(self, request: Request, sources: list[list[int]]) -> Answer:
        generator = self.build_generator(request)
        sample = self.sample(sources)
        if request.op == "decode":
            self.encoder.remember(sample["net_input"]["src_tokens"])
        else:
            self.encoder.forget()
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
            tokens=[without_eos(best[0]["tokens"].tolist()) for best in hypotheses],
        )
