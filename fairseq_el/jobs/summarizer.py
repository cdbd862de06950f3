"""Text in, summaries out: `Summarizer.load("demo", preset="xsum")(["long text ..."])`.

A model folder holds the checkpoint `model.pt`, its dictionary (`dict.txt`, or one for each side), and what
turns text into pieces: `sentencepiece.model`, or `encoder.json` and `vocab.bpe` of GPT-2's encoding.
"""

import gc
import hashlib
import logging
import re
import threading
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.encoders.gpt2_bpe import GPT2BPE
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.models import BaseFairseqModel
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_el.checkpoints import validation
from fairseq_el.checkpoints.meta_init import precision_of
from fairseq_el.errors import UserError, explain, is_from_fairseq, is_out_of_memory, not_from_fairseq
from fairseq_el.generation.non_finite import FiniteEnsemble, NotFinite
from fairseq_el.jobs import presets
from fairseq_el.jobs.presets import Preset
from fairseq_el.models.conversion import is_accelerated
from fairseq_el.plugin.tasks import (
    ELGeneration,
    ELLanguageModelingConfig,
    ELLanguageModelingTask,
    ELTranslationConfig,
    ELTranslationTask,
)
from fairseq_el.resources import resource
from fairseq_el.text.sentences import one_line, split_sentences
from fairseq_el.text.vocabulary import load_dictionary, load_encoding

logger = logging.getLogger(__name__)

SENTENCEPIECE_FILES = ("sentencepiece.model", "sentencepiece.bpe.model")
GPT2_FILES = ("encoder.json", "vocab.bpe")
TOKENS_PER_BATCH = 12_000  # what fairseq-generate takes where nothing is said
CHARACTERS_PER_TOKEN = 8  # more than texts have
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


# ---- the files of a model


@dataclass(frozen=True)
class ModelFiles:
    checkpoint: Path
    encoding: tuple[Path, ...]  # one file of SentencePiece, or two of GPT-2's encoding

    @classmethod
    def find(cls, model: str | Path, encoding: str | Path | None = None) -> "ModelFiles":
        """model: a folder, a checkpoint in one, or `demo`; encoding: where that is, if not in the folder."""
        path = Path(model)
        if not path.exists() and str(model) == "demo":
            path = resource("demo")
        checkpoint = path / "model.pt" if path.is_dir() else path
        if not checkpoint.is_file():
            raise UserError(
                f"there is no checkpoint {checkpoint}: give a folder with a model.pt, or the file itself"
            )
        return cls(checkpoint, find_encoding(Path(encoding) if encoding else checkpoint.parent))

    def dictionary(self, side: str) -> Path:
        """side: `source` or `target`, or the name of a language."""
        for name in (f"dict.{side}.txt", "dict.txt"):
            if (self.checkpoint.parent / name).is_file():
                return self.checkpoint.parent / name
        raise UserError(
            f"{self.checkpoint.parent} has no dict.{side}.txt or dict.txt: put the one that came with the "
            "checkpoint there"
        )

    def digest(self) -> str:
        """Of all that summaries depend on."""
        whole = hashlib.sha256()
        for path in (self.checkpoint, *sorted(self.checkpoint.parent.glob("dict*.txt")), *self.encoding):
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    whole.update(part)
        return whole.hexdigest()

    def build_encoding(self) -> SentencepieceBPE | GPT2BPE:
        return load_encoding(self.encoding)


def find_encoding(place: Path) -> tuple[Path, ...]:
    """place: a folder, or a file of SentencePiece."""
    if place.is_file():
        return (place,)
    for names in (*((name,) for name in SENTENCEPIECE_FILES), GPT2_FILES):
        files = tuple(place / name for name in names)
        if all(file.is_file() for file in files):
            return files
    raise UserError(
        f"{place} has neither {SENTENCEPIECE_FILES[0]} nor {' and '.join(GPT2_FILES)}, which turn text into "
        "what the model reads: put them there, or name their folder (--bpe)"
    )


class Vocabulary:
    """Text as pieces, and back."""

    def __init__(self, encoding: SentencepieceBPE | GPT2BPE):
        self.encoding = encoding

    def encode(self, text: str) -> list[str]:
        return self.encoding.encode(text).split()

    def beginning(self, text: str, longest: int) -> tuple[list[str], bool]:
        """The first pieces of a text, and whether there are more.

        Little more than these is encoded: the time GPT-2's encoding takes for a word grows with its square.
        """
        size = CHARACTERS_PER_TOKEN * longest
        while True:
            part = text if len(text) <= size else text[:size].rsplit(maxsplit=1)[0]  # no word in two
            if part is not text and len(part) < size // 2:  # before a run of spaces, or a word, as long as that
                part = text[:size]
            pieces = self.encode(part)
            if len(pieces) > longest or part is text:
                return pieces[:longest], len(pieces) > longest
            size *= 4

    def decode(self, pieces: Sequence[str]) -> str:
        if isinstance(self.encoding, GPT2BPE):  # which fails on the entries that only fill a dictionary up
            known = self.encoding.bpe.decoder
            pieces = [p for p in pieces if p in ("<unk>", "<mask>") or (p.isdecimal() and int(p) in known)]
        return self.encoding.decode(" ".join(pieces))


# ---- loading


def load_task(preset: Preset, files: ModelFiles, saved: Any, stock: bool) -> tuple[FairseqTask, Any]:
    """The task, ours or fairseq's own, and its configuration: the options that the preset has for it.

    saved: the configuration in the checkpoint.
    """
    name = preset.options.get("task", "translation").removeprefix("el_")
    trained = str(saved.task._name)
    if name not in ("translation", "language_modeling"):
        raise UserError(
            f"the preset {preset.name} is for the task {name}: only translation and language_modeling work"
        )
    if (name == "language_modeling") != ("language_modeling" in trained):
        raise UserError(
            f"{files.checkpoint} was trained for {trained}, but the preset {preset.name} is for {name}: "
            "take another preset or another model"
        )
    if name == "language_modeling":
        if stock:
            raise UserError(
                "stock fairseq can't count tokens from the end of a prompt: leave out --attention stock"
            )
        load_dictionary(files.dictionary("source"))  # says so if there is none, or it is damaged
        language = configured(ELLanguageModelingConfig, preset, files)
        return ELLanguageModelingTask.setup_task(language), language
    config = configured(TranslationConfig if stock else ELTranslationConfig, preset, files)
    named = {side: getattr(saved.task, f"{side}_lang", None) for side in ("source", "target")}
    languages = [str("" if language is None else language) or side for side, language in named.items()]
    if not all(re.fullmatch(r"[\w.@-]{1,99}", language) for language in languages):
        raise UserError(f"the settings in {files.checkpoint} are damaged, they name no languages: get the file again")
    dictionaries = [load_dictionary(files.dictionary(language)) for language in languages]
    return (TranslationTask if stock else ELTranslationTask)(config, *dictionaries), config


def configured(config_class: type, preset: Preset, files: ModelFiles) -> Any:
    known = {field.name for field in fields(config_class)}
    options = {name: value for name, value in preset.task().items() if name in known}
    return config_class(data=str(files.checkpoint.parent), **options)


def load_state(path: Path) -> dict[str, Any]:
    """A checkpoint in today's form, with which fairseq will do nothing but build a model."""
    validation.check_file(path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    settings = state.get("cfg")
    if not is_from_fairseq(state) or not has_settings(settings, "task") or not has_settings(settings, "model"):
        raise UserError(not_from_fairseq(str(path)))
    validation.check_weights(state["model"])
    validation.check_settings(state["cfg"].model, path.stat().st_size)
    return state


def has_settings(settings: Any, name: str) -> bool:
    part = settings.get(name) if isinstance(settings, DictConfig) else None
    return isinstance(part, Namespace) or (isinstance(part, DictConfig) and part.get("_name") is not None)


def load_model(
    files: ModelFiles, preset: Preset, stock: bool, fp16: bool, cpu: bool
) -> tuple[FairseqTask, BaseFairseqModel]:
    state = load_state(files.checkpoint)
    task, config = load_task(preset, files, state["cfg"], stock)
    on_gpu = torch.cuda.is_available() and not cpu
    if not on_gpu and getattr(config, "el_packing", None) == "auto":  # packing takes either precision
        task.vacant_dtype = precision_of(state["model"])
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(files.checkpoint)], task=task, state=state
    )
    del state
    gc.collect()  # fairseq leaves it in a cycle of references, and packing takes as much again
    if fp16:
        model.half()
    if on_gpu:
        model.cuda()
    model.prepare_for_inference_(Namespace(generation=preset.generation(), task=config))
    return task, model


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


RANDOM_NUMBERS = threading.Lock()
"""torch has one source of them for all threads."""


class TextSampling(Sampling):
    """Sampling whose random numbers follow from the seed and the tokens so far, and so don't depend on what
    else is in the batch: a prompt is continued alike at every call."""

    def __init__(self, dictionary: Dictionary, stock: Sampling, seed: int):
        super().__init__(dictionary, stock.sampling_topk, stock.sampling_topp)
        self.key = str(seed).encode()

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        """lprobs: [b, x, vocabulary], scores: [b, x, step], prev_output_tokens: [b * x, step + 1]."""
        b = lprobs.size(0)
        texts = prev_output_tokens.reshape(b, -1).cpu().numpy()
        random = (
            torch.cuda.default_generators[lprobs.get_device()] if lprobs.is_cuda else torch.default_generator
        )
        found = []
        with RANDOM_NUMBERS:
            before = random.get_state()
            try:
                for row in range(b):
                    digest = hashlib.blake2b(texts[row].tobytes(), key=self.key, digest_size=8).digest()
                    random.manual_seed(int.from_bytes(digest, "little"))
                    found.append(super().step(step, lprobs[row : row + 1], scores[row : row + 1]))
            finally:
                random.set_state(before)
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@dataclass(frozen=True)
class Source:
    """A text as the model reads it: none of it for blank texts, the beginning of long ones."""

    tokens: list[int]
    is_cut: bool


class Outcome(NamedTuple):
    """What became of some texts of a batch."""

    places: range  # in the batch
    summaries: list[str]
    problem: str = ""  # why a text, then the only one, got "" instead of a summary


class SourceReader:
    """Reads texts for a model, without needing it: their pieces, and which texts go into a batch together."""

    def __init__(self, vocabulary: Vocabulary, dictionary: Dictionary, preset: Preset, longest_text: int = 0):
        """longest_text: in tokens, without those that open or close a text."""
        self.vocabulary = vocabulary
        self.dictionary = dictionary
        self.preset = preset
        self.suffix = self._indices(vocabulary.encode(preset.text().source_suffix))
        self.longest_text = longest_text

    def describe_cut(self, cut: int, total: int) -> str:
        longer = "text was" if total == 1 else "texts were"
        limit = f"{self.longest_text:,} tokens"
        return f"{cut:,} of {total:,} {longer} longer than {limit}; only the beginning was read"

    def encode(self, text: str) -> Source:
        text = one_line(text.encode("utf-8", "replace").decode())  # half a character becomes a question mark
        pieces, is_cut = self.vocabulary.beginning(text, self.longest_text) if text else ([], False)
        if not pieces:
            return Source([], False)
        return Source(self._indices(pieces) + self.suffix, is_cut)

    def batches(self, sources: Sequence[Source]) -> list[list[int]]:
        """Places of sources that go through the model together: of similar length, the longest first."""
        sentences = self.preset.options.get("batch_size")
        tokens = self.preset.options.get("max_tokens") or (None if sentences else TOKENS_PER_BATCH)
        places = sorted(
            (place for place, source in enumerate(sources) if source.tokens),
            key=lambda place: (-len(sources[place].tokens), place),
        )
        batches: list[list[int]] = []
        for place in places:
            size = len(batches[-1]) + 1 if batches else 0
            longest = len(sources[batches[-1][0]].tokens) + 1 if batches else 0  # and the end of the sentence
            if not batches or (sentences and size > sentences) or (tokens and size * longest > tokens):
                batches.append([])
            batches[-1].append(place)
        return batches

    def _indices(self, pieces: Iterable[str]) -> list[int]:
        return [self.dictionary.index(piece) for piece in pieces]


class Summarizer(SourceReader):
    """A model with its vocabulary and a preset. Threads may share one; their batches take turns."""

    def __init__(
        self,
        task: FairseqTask,
        model: BaseFairseqModel,
        vocabulary: Vocabulary,
        preset: Preset,
        seed: int = 1,
    ):
        super().__init__(vocabulary, task.source_dictionary, preset)
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
            summarizer = cls(task, loaded, Vocabulary(files.build_encoding()), preset, seed)
        except Exception as error:
            message = explain(error)
            if message is None and isinstance(error, OmegaConfBaseException):  # the preset's are explained already
                message = f"the settings in {files.checkpoint} are damaged: get it again ({str(error).splitlines()[0]})"
            if message is None or isinstance(error, UserError):
                raise
            raise UserError(message) from error
        if stock and preset.options.get("el_block_ngrams"):
            logger.warning(
                "stock fairseq ignores no_repeat_ngram_size without its CUDA extension; to compare token for "
                "token, run fairseq_el without el_block_ngrams"
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
        return SourceReader(self.vocabulary, self.dictionary, self.preset, self.longest_text)

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
        return as_summary(self.vocabulary.decode(pieces), self.preset)
