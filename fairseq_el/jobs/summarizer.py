"""Text in, summaries out: `Summarizer.load("demo")("long text ...")`.

A model folder holds the checkpoint `model.pt`, its dictionary (`dict.txt`, or one for each side), and the files of its
tokenizer: `sentencepiece.model`, or `encoder.json` and `vocab.bpe` of GPT-2's encoding.
"""

import gc
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from fairseq.data import data_utils
from fairseq.models import BaseFairseqModel
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_el.errors import UserError, explain, is_out_of_memory
from fairseq_el.generation.non_finite import FiniteEnsemble, NotFinite
from fairseq_el.generation.sampling import TextSampling
from fairseq_el.jobs import multilingual, presets, search_checks
from fairseq_el.jobs.batching import Batcher, Source
from fairseq_el.jobs.default_preset import default_preset
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.model_loading import load_model
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.results import Decoder, DetailedSummary, Hypothesis
from fairseq_el.models.conversion import is_accelerated
from fairseq_el.plugin.tasks import ELGeneration, settings_of
from fairseq_el.plugin.text_format import FormattedTranslationTask
from fairseq_el.text.sentences import one_line
from fairseq_el.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ON_ERROR = ("abort", "skip")  # what happens when a text can't be processed


def build_generator(task: FairseqTask, model: BaseFairseqModel, preset: Preset, seed: int) -> SequenceGenerator:
    """The task's generator, which raises `NotFinite` for NaN, and samples each text on its own."""
    if isinstance(task, ELGeneration):
        generator = task.build_generator([model], preset.generation())
        generator.model.checks_finite = True
    else:
        generator = task.build_generator(FiniteEnsemble([model]), preset.generation())
    if isinstance(generator.search, Sampling):
        generator.search = TextSampling(task.target_dictionary, generator.search, seed)
    return generator


@contextmanager
def explained_errors(checkpoint: Path) -> Iterator[None]:
    """Raises a `UserError` for failures of loading that a user can act on."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = explain(error)
        if message is None and isinstance(error, OmegaConfBaseException):  # mistakes in presets are `UserError`s
            message = f"the settings in {checkpoint} are damaged: get it again ({str(error).splitlines()[0]})"
        if message is None:
            raise
        raise UserError(message) from error


def report_problem(where: str, problem: str, on_error: str, advice: str = "") -> None:
    """Ends the run with an error, or warns that the text was skipped."""
    if on_error == "abort":
        raise UserError(f"{where} can't be processed: {problem}{advice}")
    logger.warning(f"{where} was skipped: {problem}")


class Outcome(NamedTuple):
    """The results of a part of a batch."""

    indices: range  # in the batch
    hypotheses: list[list[Hypothesis]]  # of each text, best first
    problem: str = ""  # why a text, which is then the only one, has no hypotheses


class Summarizer:
    """A model with a tokenizer, a batcher and a preset. Threads may share one; their batches take turns."""

    def __init__(
        self,
        task: FairseqTask,
        model: BaseFairseqModel,
        tokenizer: Tokenizer,
        preset: Preset,
        seed: int = 1,
    ):
        self.task = task
        self.model = model
        self.tokenizer = tokenizer
        self.preset = preset
        self.takes_prompts = not hasattr(model, "encoder")
        self.generator = build_generator(task, model, preset, seed)
        self.batcher = Batcher(tokenizer, task.source_dictionary, preset, self._source_positions())
        forced = task.text_format.forced if isinstance(task, FormattedTranslationTask) else []
        unwritten = {*self.generator.symbols_to_strip_from_output, *forced}
        self.decoder = Decoder(tokenizer, task.target_dictionary, preset, unwritten)
        self._check_settings()
        self.turn = threading.Lock()
        self.has_warned = False  # about memory

    @classmethod
    def load(
        cls,
        model: str | Path,
        preset: str | Path | Preset | None = None,
        search: str = "beam",
        *,
        bpe_dir: str | Path | None = None,
        stock: bool = False,
        precision: str | None = None,
        fp16: bool = False,
        cpu: bool = False,
        seed: int = 1,
        threads: int | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> "Summarizer":
        """model: a folder (see above), a checkpoint in one, or `demo`, the model that comes with the package.

        preset, search: a file in `configs/` by its name, or any such file, and one of its ways to search (default: see
        `default_preset`).
        bpe_dir: folder of the tokenizer's files (default: the folder of the model).
        stock: use fairseq's own attention and generator, to compare.
        precision: on a CPU, `auto`, which is exact, `fp32` or `fp16` of the weights, or faster and not exact, `bf16` or
        `int8` (default: that of the preset, else `auto`).
        threads: of torch, from now on in this process (default: unchanged).
        deterministic: the same scores to the last bit, whatever else is summarised, with how many threads and in how
        many processes: one text at a time, in one thread, from now on in this process.
        options: changes to the preset, by fairseq's names: `beam=2`, `nbest=2`, `el_attention="always"`.
        """
        files = ModelFiles.find(model, bpe_dir)
        if not isinstance(preset, Preset):
            preset = presets.load(cls.default_preset(files) if preset is None else preset, search)
        if precision is not None:
            options["el_precision"] = precision
        preset = preset.changed(**options)
        if deterministic:
            preset, threads = preset.deterministic(), 1
        search_checks.check_options(preset.options, preset.name)
        if threads is not None:
            torch.set_num_threads(threads)
        with explained_errors(files.checkpoint):
            task, loaded = load_model(files, preset, stock, fp16, cpu)
            tokenizer = Tokenizer(files.build_encoding(), " and ".join(map(str, files.encoding)))
            summarizer = cls(task, loaded, tokenizer, preset, seed)
        if stock and preset.options.get("no_repeat_ngram_size"):
            logger.warning(
                "stock fairseq ignores no_repeat_ngram_size without its CUDA extension; to compare token for "
                "token, run fairseq_el with el_stock_ngrams"
            )
        return summarizer

    @classmethod
    def default_preset(cls, files: ModelFiles) -> str:
        return default_preset(files)

    @property
    def nbest(self) -> int:
        """Hypotheses of each text that the preset asks for."""
        return self.preset.options.get("nbest", 1)

    @overload
    def __call__(self, texts: str, on_error: str = "abort") -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, texts: Iterable[str], on_error: str = "abort") -> list[str]: ...
    def __call__(self, texts: str | Iterable[str], on_error: str = "abort") -> str | list[str]:
        """The summary of a text, or of each text in a list; "" for blank texts.

        on_error: with `skip`, texts that can't be summarised get "" and a warning instead of an error.
        """
        if isinstance(texts, str):
            return self([texts], on_error)[0]
        return [found.summary for found in self.detailed(texts, 1, on_error)]

    @overload
    def detailed(  # type: ignore[overload-overlap]  # a str is an iterable of str, too
        self, texts: str, nbest: int | None = None, on_error: str = "abort"
    ) -> DetailedSummary: ...
    @overload
    def detailed(
        self, texts: Iterable[str], nbest: int | None = None, on_error: str = "abort"
    ) -> list[DetailedSummary]: ...
    def detailed(
        self, texts: str | Iterable[str], nbest: int | None = None, on_error: str = "abort"
    ) -> DetailedSummary | list[DetailedSummary]:
        """Summaries with scores, tokens and alternatives.

        nbest: hypotheses of each text, at most the beam (default: those of the preset).
        """
        if isinstance(texts, str):
            return self.detailed([texts], nbest, on_error)[0]
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error is one of {', '.join(ON_ERROR)}, not {on_error!r}")
        nbest = self.nbest if nbest is None else nbest
        search_checks.check_nbest(nbest, self.generator.beam_size)
        sources = [self.batcher.encode(text) for text in texts]
        self.batcher.check_known(sources)
        found = [DetailedSummary()] * len(sources)
        for batch in self.batcher.batches(sources):
            for part in self.outcomes([sources[index] for index in batch], nbest):
                for index, hypotheses in zip(part.indices, part.hypotheses, strict=True):
                    found[batch[index]] = DetailedSummary.of(hypotheses)
                if part.problem:
                    report_problem(f"text {batch[part.indices[0]] + 1}", part.problem, on_error)
        self._warn_about(sources)
        return found

    def outcomes(self, sources: Sequence[Source], nbest: int) -> Iterator[Outcome]:
        """Generates one batch of sources, none of them blank.

        If memory runs short, or a score is NaN, the batch is halved until it goes through, down to one text, which
        then fails alone. Each part is returned before the next begins, so that nothing finished is lost.
        """
        waiting = [range(len(sources))]
        while waiting:
            indices = waiting.pop()
            part = self._attempt(indices, [sources[index] for index in indices], nbest)
            if part.problem and len(indices) > 1:
                middle = len(indices) // 2
                waiting += [indices[middle:], indices[:middle]]
            else:
                yield part

    def generate(self, sources: Sequence[Source], nbest: int = 1) -> list[list[Hypothesis]]:
        """The hypotheses of each source of one batch, none of them blank; best first."""
        with self.turn:
            found = self.task.inference_step(self.generator, [self.model], self._sample(sources))
        if not all(found):
            raise UserError("the model gives no token a probability: its weights are damaged, get them again")
        prompts = [len(source.tokens) if self.takes_prompts else 0 for source in sources]
        return [
            [self.decoder.decode(hypothesis, prompt) for hypothesis in hypotheses[:nbest]]
            for hypotheses, prompt in zip(found, prompts, strict=True)
        ]

    def _attempt(self, indices: range, sources: Sequence[Source], nbest: int) -> Outcome:
        try:
            return Outcome(indices, self.generate(sources, nbest))
        except NotFinite as error:
            problem = str(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                if is_accelerated(self.model):
                    raise
                raise UserError(f"stock fairseq, which runs this model, fails on it: {one_line(str(error))}") from error
            problem = "there is not enough memory for it, even alone"
            self._warn_about_memory(len(indices))
        # Only here: until the except block ends, the traceback holds all tensors of the attempt.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return Outcome(indices, [[] for _ in indices], problem)

    def _warn_about_memory(self, size: int) -> None:
        if size > 1 and not self.has_warned:
            self.has_warned = True
            logger.warning(
                f"memory does not suffice for {size} texts at a time, which are split; smaller batches (batch_size, "
                "max_tokens) or an el_memory_budget avoid failed attempts"
            )

    def _warn_about(self, sources: Sequence[Source]) -> None:
        if cut := sum(source.is_cut for source in sources):
            logger.warning(self.batcher.describe_cut(cut, len(sources)))
        if unknown := sum(map(self.batcher.is_mostly_unknown, sources)):
            logger.warning(self.batcher.describe_unknown(unknown, len(sources)))

    def _source_positions(self) -> int:
        """Tokens of a text that fit in the model's positions, without those that begin or end it."""
        if self.takes_prompts:
            new_tokens = getattr(self.task.args, "max_new_tokens", None) or 1
            return self.generator.max_len - 1 - new_tokens
        special = len(multilingual.framed(self.task, [self.task.source_dictionary.eos()]))
        return min(settings_of(self.task).max_source_positions, self.model.max_positions()[0]) - special

    def _check_settings(self) -> None:
        generator, longest = self.generator, self.batcher.longest_text
        search_checks.check_groups(generator)
        if not self.takes_prompts:
            search_checks.check_lengths(generator, longest)
        if is_accelerated(self.model):
            length = longest + len(self.batcher.suffix) + 1
            most = min(int(generator.max_len_a * length + generator.max_len_b), generator.max_len - 1)
            new_tokens = (getattr(generator, "max_new_tokens", None) or most) + 1
            budget = self.preset.options.get("el_memory_budget")
            search_checks.check_budget(budget, self.model, generator.beam_size, length, new_tokens)

    def _sample(self, sources: Sequence[Source]) -> dict[str, dict[str, Tensor]]:
        """Sources as fairseq's data sets collate them, [b, n]: with </s> at the end and padding in front, or, for
        language models, the other way round."""
        dictionary = self.task.source_dictionary
        if self.takes_prompts:
            opening = dictionary.bos() if self.task.args.add_bos_token else dictionary.eos()
            rows, left_pad = [[opening, *source.tokens] for source in sources], False
        else:
            rows = [multilingual.framed(self.task, [*source.tokens, dictionary.eos()]) for source in sources]
            left_pad = settings_of(self.task).left_pad_source
        tokens = data_utils.collate_tokens([torch.tensor(row) for row in rows], dictionary.pad(), left_pad=left_pad)
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(row) for row in rows])
        return {"net_input": {"src_tokens": tokens.to(device), "src_lengths": lengths.to(device)}}

