"""Text in, summaries out: `Summarizer.load("demo", preset="xsum")(["long text ..."])`.

A model folder holds the checkpoint `model.pt`, its dictionary (`dict.txt`, or one for each side), and what
turns text into pieces: `sentencepiece.model`, or `encoder.json` and `vocab.bpe` of GPT-2's encoding.
"""

import gc
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from fairseq_el.jobs import presets
from fairseq_el.jobs.batching import Source, SourceReader
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.model_loading import load_model
from fairseq_el.jobs.presets import Preset
from fairseq_el.models.conversion import is_accelerated
from fairseq_el.plugin.tasks import ELGeneration
from fairseq_el.text.sentences import one_line, split_sentences
from fairseq_el.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NEED_MORE_THAN_TEXT = ("constraints", "lm_path", "prefix_size", "score_reference")  # options of fairseq-generate
ON_ERROR = ("abort", "skip")  # what becomes of the others when a text can't be summarised


def as_summary(text: str, preset: Preset) -> str:
    """What a model wrote, on one line, and cut to the sentences that the preset keeps."""
    keep = preset.text().keep_sentences
    return one_line(text) if keep is None else " ".join(split_sentences(text)[:keep])


def one_by_one(preset: Preset) -> Preset:
    """The preset such that the sums of a text depend on nothing but the text.

    Its own batch, and a form of attention that is not chosen by how fast the machine is found to be.
    """
    fixed: dict[str, Any] = {"batch_size": 1, "max_tokens": None}
    if preset.options.get("el_attention", "auto") == "auto":
        fixed["el_attention"] = "never"
    return preset.changed(**fixed)


# ---- generating


def build_generator(task: FairseqTask, model: BaseFairseqModel, preset: Preset) -> SequenceGenerator:
    """The task's, stopped by NaN."""
    if not isinstance(task, ELGeneration):
        return task.build_generator(FiniteEnsemble([model]), preset.generation())
    generator = task.build_generator([model], preset.generation())
    generator.model.checks_finite = True
    return generator


def report_problem(where: str, problem: str, on_error: str, advice: str = "") -> None:
    """The text that can't be summarised ends the run, or is skipped with a warning."""
    if on_error == "abort":
        raise UserError(f"{where} can't be summarised: {problem}{advice}")
    logger.warning(f"{where} was skipped: {problem}")


class Outcome(NamedTuple):
    """What became of some texts of a batch."""

    places: range  # in the batch
    summaries: list[str]
    problem: str = ""  # why a text, then the only one, got "" instead of a summary


class Summarizer(SourceReader):
    """A model with its vocabulary and a preset. Threads may share one; their batches take turns."""

    def __init__(
        self,
        task: FairseqTask,
        model: BaseFairseqModel,
        tokenizer: Tokenizer,
        preset: Preset,
        seed: int = 1,
    ):
        super().__init__(tokenizer, task.source_dictionary, preset)
        self.task = task
        self.model = model
        self.reads_prompts = not hasattr(model, "encoder")
        self.generator = build_generator(task, model, preset)
        if isinstance(self.generator.search, Sampling):
            self.generator.search = TextSampling(task.target_dictionary, self.generator.search, seed)
        self.longest_text = self._longest_text()
        self._check_lengths()
        self.turn = threading.Lock()
        self.has_warned = False  # of too little memory

    @classmethod
    def load(
        cls,
        model: str | Path,
        preset: str | Path | Preset,
        variant: str = "beam",
        *,
        bpe: str | Path | None = None,
        stock: bool = False,
        fp16: bool = False,
        cpu: bool = False,
        seed: int = 1,
        deterministic: bool = False,
        **options: Any,
    ) -> "Summarizer":
        """model: a folder (see above), a checkpoint in one, or `demo`, which comes with the source code.

        preset, variant: a file in `configs/` by its name, or any such file, and one of its ways to search.
        bpe: where the encoding's files are, if not in the model's folder.
        stock: use fairseq's own attention and generator, to compare.
        deterministic: the same to the last bit whatever else is summarised, with how many threads and in how many
        processes: one text at a time, in one thread, which from then on is all that torch uses in this process.
        options: what to change in the preset, by fairseq's names: `beam=2`, `el_attention="always"`.
        """
        if not isinstance(preset, Preset):
            preset = presets.load(preset, variant)
        preset = preset.changed(**options)
        if deterministic:
            preset = one_by_one(preset)
            torch.set_num_threads(1)
        if unusable := [name for name in NEED_MORE_THAN_TEXT if preset.options.get(name)]:
            raise UserError(f"the preset {preset.name} sets {unusable[0]}, which needs more than texts: leave it out")
        files = ModelFiles.find(model, bpe)
        try:
            task, loaded = load_model(files, preset, stock, fp16, cpu)
            summarizer = cls(task, loaded, Tokenizer(files.build_encoding()), preset, seed)
        except Exception as error:
            message = explain(error)
            if message is None and isinstance(error, OmegaConfBaseException):  # the preset's are explained already
                message = f"the settings in {files.checkpoint} are damaged: get it again ({str(error).splitlines()[0]})"
            if message is None or isinstance(error, UserError):
                raise
            raise UserError(message) from error
        if stock and preset.options.get("no_repeat_ngram_size"):
            logger.warning(
                "stock fairseq ignores no_repeat_ngram_size without its CUDA extension; to compare token for "
                "token, run fairseq_el with el_stock_ngrams"
            )
        return summarizer

    def __call__(self, texts: Iterable[str], on_error: str = "abort") -> list[str]:
        """A summary of each text, in their order; none, that is "", of blank ones.

        on_error: with `skip`, texts that can't be summarised get "" too, and a warning, instead of an error.
        """
        if isinstance(texts, str):
            raise TypeError("texts are given as a list: summarize([text])")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error is one of {', '.join(ON_ERROR)}, not {on_error!r}")
        sources = [self.encode(text) for text in texts]
        summaries = [""] * len(sources)
        for batch in self.batches(sources):
            for part in self.outcomes([sources[place] for place in batch]):
                for place, summary in zip(part.places, part.summaries, strict=True):
                    summaries[batch[place]] = summary
                if part.problem:
                    report_problem(f"text {batch[part.places[0]] + 1}", part.problem, on_error)
        if cut := sum(source.is_cut for source in sources):
            logger.warning(self.describe_cut(cut, len(sources)))
        return summaries

    def reader(self) -> SourceReader:
        """What reads texts, without the model."""
        return SourceReader(self.tokenizer, self.dictionary, self.preset, self.longest_text)

    def outcomes(self, sources: Sequence[Source]) -> Iterator[Outcome]:
        """One batch, none of it a blank text, and all of it together if that can be.

        Short of memory, or with NaN somewhere, it is halved until it goes through, down to one text, which then
        fails alone. Each part is handed out before the next begins, so that nothing finished is lost.
        """
        waiting = [range(len(sources))]
        while waiting:
            places = waiting.pop()
            part = self._attempt(places, [sources[place] for place in places])
            if part.problem and len(places) > 1:
                middle = len(places) // 2
                waiting += [places[middle:], places[:middle]]
            else:
                yield part

    def _attempt(self, places: range, sources: Sequence[Source]) -> Outcome:
        try:
            return Outcome(places, self.summarize(sources))
        except NotFinite as error:
            problem = str(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                if is_accelerated(self.model):
                    raise
                raise UserError(f"stock fairseq, which runs this model, fails on it: {one_line(str(error))}") from error
            problem = "there is not enough memory for it, even alone"
            self._warn_once(len(places))
        # Not before here: the traceback of the error has held all tensors of the attempt.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return Outcome(places, [""] * len(places), problem)

    def _warn_once(self, size: int) -> None:
        if size > 1 and not self.has_warned:
            self.has_warned = True
            logger.warning(
                f"memory does not suffice for {size} texts at a time, which are done in parts; smaller batches "
                "(batch_size, max_tokens) or an el_memory_budget save the vain attempts"
            )

    def summarize(self, sources: Sequence[Source]) -> list[str]:
        """The summaries of one batch, none of them of a blank text."""
        with self.turn:
            found = self.task.inference_step(self.generator, [self.model], self._sample(sources))
        return [self._summary(source, hypotheses) for source, hypotheses in zip(sources, found, strict=True)]

    def _longest_text(self) -> int:
        """In tokens, without those that open or close a text."""
        if self.reads_prompts:
            new_tokens = getattr(self.task.args, "max_new_tokens", None) or 1
            longest = self.generator.max_len - 1 - new_tokens
        else:
            longest = min(self.task.cfg.max_source_positions, self.model.max_positions()[0]) - 1
        longest = min(longest, self.preset.text().longest_source or longest) - len(self.suffix)
        if longest < 1:
            raise UserError(
                f"the preset {self.preset.name} leaves no room for text in the model's positions: set fewer "
                "max_new_tokens, or a larger longest_source or max_source_positions"
            )
        return longest

    def _check_lengths(self) -> None:
        settings = self.generator
        longest = int(settings.max_len_a * self.longest_text + settings.max_len_b)
        if not self.reads_prompts and settings.min_len > min(longest, settings.max_len - 1):
            raise UserError(
                f"summaries of at least min_len {settings.min_len} tokens can't have at most {longest} "
                f"(max_len_b) and fit in the model's {settings.max_len - 1}: set a smaller min_len"
            )
        groups = getattr(settings.search, "num_groups", 1)
        if settings.beam_size % groups:
            raise UserError(f"{settings.beam_size} beams can't be parted into {groups} groups: set another beam")

    def _sample(self, sources: Sequence[Source]) -> dict[str, dict[str, Tensor]]:
        """As fairseq's data sets collate sources, [b, n]: with </s> behind and padding in front, or, for
        language models, the other way round."""
        dictionary = self.task.source_dictionary
        if self.reads_prompts:
            opening = dictionary.bos() if self.task.args.add_bos_token else dictionary.eos()
            rows, pads_in_front = [[opening, *source.tokens] for source in sources], False
        else:
            rows = [[*source.tokens, dictionary.eos()] for source in sources]
            pads_in_front = self.task.cfg.left_pad_source
        tokens = data_utils.collate_tokens(
            [torch.tensor(row) for row in rows], dictionary.pad(), left_pad=pads_in_front
        )
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(row) for row in rows])
        return {"net_input": {"src_tokens": tokens.to(device), "src_lengths": lengths.to(device)}}

    def _summary(self, source: Source, hypotheses: list[dict[str, Tensor]]) -> str:
        if not hypotheses:
            raise UserError("the model gives no token a probability: its weights are damaged, get them again")
        tokens = hypotheses[0]["tokens"].cpu()
        if self.reads_prompts:
            tokens = tokens[len(source.tokens) :]
        pieces = self.task.target_dictionary.string(tokens).split()
        return as_summary(self.tokenizer.decode(pieces), self.preset)
