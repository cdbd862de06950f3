"""Worker for stock fairseq and for fairseq_el, through the interfaces that `fairseq-generate` uses."""

import time
from argparse import Namespace
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any

import torch

# First: it imports fairseq without scikit-learn, for stock fairseq too, and lets torch load released checkpoints.
import fairseq_el.checkpoints.loading  # isort: skip  # noqa: F401
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models.bart import BARTModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from bench.protocol import EOS, PAD, THREADS, Answer, Request, Sentences, in_batches, padded, serve, without_eos
from fairseq_el import __version__
from fairseq_el.plugin.tasks import (
    ELLanguageModelingConfig,
    ELLanguageModelingTask,
    ELTranslationConfig,
    ELTranslationTask,
)


class Clock:
    """Stands in front of one method of one object and notes when its calls began and how long they took."""

    def __init__(self, owner: Any, method: str):
        self.compute = getattr(owner, method)
        self.began: list[float] = []
        self.seconds = 0.0
        setattr(owner, method, self)  # on this instance only; the class stays as it is

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.began.append(time.perf_counter())
        result = self.compute(*args, **options)
        self.seconds += time.perf_counter() - self.began[-1]
        return result

    def step_seconds(self) -> float | None:
        """From one call to the next, without the first, in which K and V are built."""
        steps = [after - before for before, after in pairwise(self.began[1:])]
        return median(steps) if steps else None


class FairseqSystem:
    """A fairseq task, model and generator: stock ones, or, with a `precision`, those of fairseq_el."""

    def __init__(self, options: dict[str, Any]):
        torch.set_num_threads(options.get("threads", THREADS))
        self.precision = options.get("precision")
        self.is_language_model = options["language_model"]
        self.copied = options.get("copied", False)
        self.task = self.setup_task(options)
        models, _ = checkpoint_utils.load_model_ensemble([options["checkpoint"]], task=self.task)
        self.model = models[0].eval()
        # what fairseq-generate passes: the settings of this run, not those of the training
        self.model.prepare_for_inference_(Namespace(task=self.settings_of_task(), generation=GenerationConfig()))
        if options.get("half"):  # what `--fp16` does
            self.model.half()
        if self.is_stock:
            check_class(self.model, BARTModel, TransformerModel, TransformerLanguageModel)
        self.vocabulary = len(self.task.target_dictionary)
        self.versions = {"fairseq": version("fairseq-fixed"), "torch": torch.__version__}
        if not self.is_stock:
            self.versions["fairseq_el"] = __version__
        self.settings = "--fp16" if options.get("half") else "" if self.is_stock else f"--el-precision {self.precision}"

    @property
    def is_stock(self) -> bool:
        return self.precision is None

    def settings_of_task(self) -> Any:
        return self.task.cfg if self.task.cfg is not None else self.task.args

    def setup_task(self, options: dict[str, Any]) -> Any:
        data = options["data"]
        if self.is_language_model:
            if self.is_stock:
                return LanguageModelingTask.setup_task(LanguageModelingConfig(data=data))
            settings = {"el_precision": self.precision, "el_unscored_prompts": True}  # peers don't score them either
            return ELLanguageModelingTask.setup_task(ELLanguageModelingConfig(data=data, **settings))
        languages = {"data": data, "source_lang": "source", "target_lang": "target"}
        if self.is_stock:
            return TranslationTask.setup_task(TranslationConfig(**languages))
        return ELTranslationTask.setup_task(ELTranslationConfig(**languages, el_precision=self.precision))

    def build_generator(self, request: Request, prompt: int) -> SequenceGenerator:
        """prompt: tokens of a prompt, which fairseq counts among those of the output."""
        words = max(0, prompt - 1) + request.length - 1
        lengths = {"max_len_a": 0, "max_len_b": words, "min_len": 1 if request.op == "texts" else words}
        options = Namespace(**{"beam": request.beam, "nbest": 1, **lengths, **request.search})
        if not self.is_stock:
            self.settings_of_task().el_attention = request.attention or "auto"
            return self.task.build_generator([self.model], options)
        generator = self.task.build_generator([self.model], options)
        check_class(generator, SequenceGenerator)
        if self.copied or request.multi_head or request.beam == 1:
            self.unshare_cache()
        if request.multi_head == "no-cache":
            generator.model.has_incremental = False
        return generator

    def unshare_cache(self) -> None:
        """Undoes what a generator with beams sets up on the model, and leaves there, for sharing the cache: attention
        that knows of beams, and an encoder whose output is not repeated for them.

        K and V are then built and kept for every beam, as in the paper's baseline, and the encoder's output follows
        the beams. Older releases of fairseq made K and V follow them too; this one knows that rows of the same
        sentence are equal and leaves them in place, so that it is the faster baseline. Only BART shares its cache in
        the first place.
        """
        if isinstance(self.model, BARTModel):
            self.model.set_beam_size(1)
            vars(self.model.encoder).pop("reorder_encoder_out", None)

    @torch.no_grad()
    def generate(self, request: Request, sources: Sentences) -> Answer:
        if self.is_language_model:
            sources = [[EOS, *source[:-1]] for source in sources]
        prompt = len(sources[0]) if self.is_language_model else 0
        generator = self.build_generator(request, prompt)
        if request.op == "encode":
            inputs, started = self.sample(sources)["net_input"], time.perf_counter()
            generator.model.forward_encoder(inputs)
            return {"seconds": time.perf_counter() - started}
        state = self.watch_source_state(generator) if request.op == "source_state" and self.is_stock else None
        encoder = None if self.is_language_model else Clock(self.model.encoder, "forward")
        steps = Clock(generator.model, "forward_decoder")
        started = time.perf_counter()
        tokens = []
        for batch in in_batches(sources, request.batch):
            hypotheses = self.task.inference_step(generator, [self.model], self.sample(batch))
            tokens += [without_eos(best[0]["tokens"].tolist()[max(0, prompt - 1) :]) for best in hypotheses]
        answer = {"seconds": time.perf_counter() - started, "tokens": tokens, "step_seconds": steps.step_seconds()}
        if encoder:
            self.model.encoder.forward = encoder.compute
            answer["encoder_seconds"] = encoder.seconds
        if not self.is_stock:
            profile = generator.profile
            answer |= {"source_bytes": profile.peak_source_bytes, "beam_bytes": profile.peak_beam_bytes}
        elif state:
            answer["source_bytes"] = max(state)
        return answer

    def sample(self, sources: Sentences) -> dict[str, Any]:
        """Without ids: by these, stock fairseq's diverse beam search would look up rows of the batch."""
        tokens = torch.tensor(padded(sources, left=True))  # [b, n]
        return {"id": None, "net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(dim=1)}}

    def watch_source_state(self, generator: SequenceGenerator) -> list[int]:
        """Bytes of the keys and values of stock's encoder-decoder attention after each step."""
        sizes: list[int] = []
        decode = generator.model.forward_decoder

        def measuring(tokens: Any, encoder_outs: Any, incremental_states: Any, temperature: float) -> Any:
            result = decode(tokens, encoder_outs, incremental_states, temperature)
            layers = self.model.decoder.layers
            buffers = [layer.encoder_attn._get_input_buffer(incremental_states[0]) for layer in layers]
            kept = [buffer[name] for buffer in buffers for name in ("prev_key", "prev_value")]
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in kept))
            return result

        generator.model.forward_decoder = measuring
        return sizes


def check_class(found: Any, *classes: type) -> None:
    """That stock fairseq is measured, not what a plugin made of it."""
    if type(found) not in classes:
        raise TypeError(f"expected fairseq's own class, got {type(found).__name__}")


if __name__ == "__main__":
    serve(FairseqSystem)
