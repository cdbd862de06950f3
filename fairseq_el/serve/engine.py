"""The models of a worker, with a summarizer for each combination of options that requests ask for."""

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_el.errors import UserError, explain
from fairseq_el.generation.search import LogitBeamSearch
from fairseq_el.generation.state import DecodingState
from fairseq_el.jobs import presets
from fairseq_el.jobs.batching import TOKENS_PER_BATCH, Source
from fairseq_el.jobs.default_preset import default_preset
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.jobs.results import DetailedSummary, Hypothesis, as_summary
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.serve.messages import Batch, Facts, PartDone, Result, Search, SearchFacts, Text, Token
from fairseq_el.serve.settings import ModelSettings

logger = logging.getLogger(__name__)

VARIANTS = 64  # combinations of options whose generators are kept; they share the model's weights
WARM_UP = "A first text, so that no client waits for what the first batch sets up."
Send = Callable[[Any], None]


class BatchCancelled(Exception):
    """No client waits for the batch any more."""


class StreamedText:
    """The tokens of one greedy summary so far, and how much of its text the client has."""

    def __init__(self, job: int):
        self.job = job
        self.tokens: list[int] = []
        self.sent = ""


class TokenStreams:
    """Follows a batch step by step: sends new text of its streamed summaries, and gives the batch up if asked to."""

    def __init__(self, send: Send, check_cancelled: Callable[[], None]):
        self.send = send
        self.check_cancelled = check_cancelled
        self.jobs: dict[int, int] = {}  # of the streamed texts, by the identity of their sources
        self.rows: list[StreamedText | None] = []
        self.first_row = self.part_size = 0
        self.decode: Callable[[list[int]], str] = lambda tokens: ""

    def begin(self, sources: Sequence[Source], decode: Callable[[list[int]], str]) -> None:
        """Before each attempt at a batch: after a failed allocation, its texts begin again."""
        self.rows = [StreamedText(self.jobs[id(s)]) if id(s) in self.jobs else None for s in sources]
        self.first_row = self.part_size = 0
        self.decode = decode

    def on_step(self, step: int, sentences: Tensor | None, tokens: Tensor, eos: int) -> None:
        """sentences: [b], rows of the batch that are not finished; tokens: [b], the best candidate of each."""
        self.check_cancelled()
        if sentences is None or not any(self.rows):
            return
        if step == 0:  # a memory budget may split a batch into parts, which count rows of their own
            self.first_row += self.part_size
            self.part_size = sentences.numel()
        for row, token in zip(sentences.tolist(), tokens.tolist(), strict=True):
            stream = self.rows[self.first_row + row]
            if stream is not None and token != eos:
                stream.tokens.append(token)
                self._send_text(stream)

    def _send_text(self, stream: StreamedText) -> None:
        text = self.decode(stream.tokens)
        if text.startswith(stream.sent) and len(text) > len(stream.sent) and not text.endswith("\ufffd"):
            self.send(Token(stream.job, text[len(stream.sent) :]))
            stream.sent = text


class WatchedSearch(LogitBeamSearch):
    """Beam search that shows each step's best candidates; those of a greedy search are its tokens."""

    def __init__(self, dictionary: Dictionary, state: DecodingState, streams: TokenStreams):
        super().__init__(dictionary, state)
        self.streams = streams

    def step(self, step, logits, scores, prev_output_tokens=None, original_batch_idxs=None, candidate_multiple=2):
        found = super().step(step, logits, scores, prev_output_tokens, original_batch_idxs, candidate_multiple)
        self.streams.on_step(step, original_batch_idxs, found[1][:, 0], self.eos)
        return found


def with_options(task: FairseqTask, options: dict[str, Any]) -> FairseqTask:
    """The task with other settings, for the same model: `el_attention` and `max_new_tokens` are among them."""
    changed = copy.copy(task)
    changed.cfg = copy.copy(task.cfg)
    for name in ("el_attention", "max_new_tokens"):
        if name in options:
            setattr(changed.cfg, name, options[name])
    if hasattr(task, "args"):  # fairseq's task for language models has them there too
        changed.args = changed.cfg
    return changed


class ServedSummarizer(Summarizer):
    """A summarizer over a model that others share, followed by `TokenStreams`."""

    def __init__(self, loaded: Summarizer, preset: Preset, seed: int, streams: TokenStreams):
        task = with_options(loaded.task, preset.task())
        super().__init__(task, loaded.model, loaded.tokenizer, preset, seed)
        self.streams = streams
        if type(self.generator.search) is LogitBeamSearch:
            self.generator.search = WatchedSearch(self.task.target_dictionary, self.generator.state, streams)

    @property
    def can_stream(self) -> bool:
        is_watched = isinstance(self.generator.search, WatchedSearch)
        return is_watched and self.generator.beam_size == 1 and not self.takes_prompts

    def generate(self, sources: Sequence[Source], nbest: int = 1) -> list[list[Hypothesis]]:
        self.streams.begin(sources, self._text_of)
        return super().generate(sources, nbest)

    def _text_of(self, tokens: list[int]) -> str:
        pieces = self.task.target_dictionary.string(torch.tensor(tokens)).split()
        return as_summary(self.tokenizer.decode(pieces), self.preset)


class Engine:
    """Does the work of a worker. send: to the front; check_cancelled: raises `BatchCancelled`."""

    def __init__(self, settings: ModelSettings, send: Send, check_cancelled: Callable[[], None]):
        started = time.monotonic()
        self.settings = settings
        self.send = send
        self.streams = TokenStreams(send, check_cancelled)
        files = ModelFiles.find(settings.model, settings.bpe_dir)
        name = settings.preset or default_preset(files)
        self.presets = {
            search: presets.load(name, search).changed(**settings.changes) for search in presets.searches(name)
        }
        presets.load(name, settings.search)  # raises if there is no such search
        self.loaded = {
            precision: Summarizer.load(
                settings.model, self.presets[settings.search], bpe_dir=settings.bpe_dir, precision=precision,
                cpu=settings.cpu, seed=settings.seed, threads=settings.threads,
            )
            for precision in settings.precisions
        }  # fmt: skip
        self.variant = functools.lru_cache(VARIANTS)(self._build_variant)
        self.facts = self._facts(started)

    def _facts(self, started: float) -> Facts:
        """Summarizes a text with each search and precision on the way, which sets up threads, kernels and caches."""
        searches, can_stream = {}, False
        for precision in self.loaded:
            for search in self.presets:
                served = self.variant(Search(search, precision))
                served(WARM_UP)
                generator = served.generator
                relative = generator.max_len_a or served.takes_prompts
                searches[search] = SearchFacts(
                    generator.beam_size, generator.min_len, None if relative else int(generator.max_len_b)
                )
                can_stream = can_stream or served.can_stream
        preset = self.presets[self.settings.search]
        size = preset.options.get("batch_size")
        first = next(iter(self.loaded.values()))
        return Facts(
            model=str(self.settings.model),
            preset=preset.name,
            searches=searches,
            precisions=tuple(self.loaded),
            attention=str(preset.options.get("el_attention", "auto")),
            longest_text=first.batcher.longest_text,
            batch_size=size,
            max_tokens=preset.options.get("max_tokens") or (None if size else TOKENS_PER_BATCH),
            streams=can_stream,
            threads=torch.get_num_threads(),
            load_seconds=time.monotonic() - started,
        )

    def _build_variant(self, search: Search) -> ServedSummarizer:
        loaded = self.loaded[search.precision]
        changes: dict[str, Any] = {"el_attention": search.attention, "beam": search.beam, "min_len": search.min_len}
        if search.max_len is not None and loaded.takes_prompts:
            changes["max_new_tokens"] = search.max_len
        elif search.max_len is not None:
            changes |= {"max_len_a": 0, "max_len_b": search.max_len}
        wanted = {name: value for name, value in changes.items() if value is not None}
        preset = self.presets[search.search].changed(el_precision=search.precision, **wanted)
        preset = preset.changed(nbest=None)  # each text has its own
        return ServedSummarizer(loaded, preset, self.settings.seed, self.streams)

    def run(self, batch: Batch) -> None:
        """Sends each part of a batch when it is done."""
        left = {text.job: text for text in batch.texts}
        try:
            self._run(batch, left)
        except BatchCancelled:
            self.send(PartDone([], True))
        except Exception as error:
            kind = "invalid" if isinstance(error, UserError) else "failed"
            problem = explain(error)
            if problem is None:
                logger.exception("a batch failed")
                kind, problem = "internal", "the server failed on this text; its log says why"
            self.send(PartDone([Result(job, {}, problem, kind) for job in left], True))

    def _run(self, batch: Batch, left: dict[int, Text]) -> None:
        """left: texts without a result, from which those that get one are taken."""
        served = self.variant(batch.search)
        if any(text.streams for text in batch.texts) and not served.can_stream:
            raise UserError("summaries can be streamed from greedy search of models with an encoder only")
        sources = [served.batcher.encode(text.text) for text in batch.texts]
        self.streams.jobs = {
            id(source): text.job for source, text in zip(sources, batch.texts, strict=True) if text.streams
        }
        if blanks := [blank(text) for text, source in zip(batch.texts, sources, strict=True) if not source.tokens]:
            self._finish(blanks, left)
        for indices in served.batcher.batches(sources):
            texts, part_sources = [batch.texts[index] for index in indices], [sources[index] for index in indices]
            profile = served.generator.profile
            profile.peak_source_bytes = profile.peak_beam_bytes = 0
            started = time.monotonic()
            for part in served.outcomes(part_sources, max(text.nbest for text in texts)):
                measured = {
                    "model_seconds": time.monotonic() - started,
                    "batch_texts": len(texts),
                    "source_state_bytes": profile.peak_source_bytes,
                    "beam_state_bytes": profile.peak_beam_bytes,
                }
                results = [
                    self._result(served, texts[index], part_sources[index], hypotheses, part.problem, measured)
                    for index, hypotheses in zip(part.indices, part.hypotheses, strict=True)
                ]
                self._finish(results, left)

    def _finish(self, results: list[Result], left: dict[int, Text]) -> None:
        for result in results:
            del left[result.job]
        self.send(PartDone(results, is_last=not left))

    def _result(
        self, served: Summarizer, text: Text, source: Source, hypotheses: list[Hypothesis], problem: str,
        measured: dict[str, Any],
    ) -> Result:  # fmt: skip
        found = DetailedSummary.of(hypotheses[: text.nbest])
        fields = {
            "summary": found.summary,
            "score": found.score,
            "alternatives": [{"summary": other.summary, "score": other.score} for other in found.alternatives],
            "source_tokens": len(source.tokens),
            "summary_tokens": len(found.tokens),
            "truncated": source.is_cut,
            "mostly_unknown": served.batcher.is_mostly_unknown(source),
        }
        return Result(text.job, fields | measured, problem, "failed" if problem else "ok")


def blank(text: Text) -> Result:
    """The empty summary of a blank text."""
    empty: dict[str, Any] = {"summary": "", "score": None, "alternatives": [], "source_tokens": 0, "summary_tokens": 0}
    measured = {"model_seconds": 0.0, "batch_texts": 0, "source_state_bytes": 0, "beam_state_bytes": 0}
    return Result(text.job, {**empty, "truncated": False, "mostly_unknown": False, **measured})
