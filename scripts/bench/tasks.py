"""The workloads: the paper's models and tasks, how long real texts are, and the demo's texts with their scores."""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.checkpoints import Checkpoint, DemoCheckpoint
from bench.environment import ROOT
from bench.protocol import EOS, FIRST_WORD, Request
from fairseq_el.jobs import presets
from fairseq_el.models.costs import Shape

COUNTS = Path(__file__).with_name("lengths.json")
SQUAD_SOURCE, SQUAD_OUTPUT = 149.4, 11.5  # means that the paper gives
DISTINCT_SENTENCES = 8
SEARCH_OPTIONS = ("lenpen", "diverse_beam_groups", "diverse_beam_strength")
KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
LONGEST = 190  # pieces, as the demo cuts them


# ---- lengths


@functools.cache
def all_lengths(name: str, cut: int | None = None) -> tuple[int, ...]:
    """In ascending order; longer ones are cut to `cut` tokens.

    `lengths.json` counts texts by their length in GPT-2's BPE tokens, opening and closing token included, sources cut
    at 1,024: 128 articles of CNN/DailyMail and what BART-large fine-tuned on it wrote for them (beam 4), 239 articles
    of XSum and 256 of its reference summaries.
    """
    counts = json.loads(COUNTS.read_text())[name]
    lengths = sorted(int(length) for length, texts in counts.items() for _ in range(texts))
    return tuple(min(length, cut) if cut else length for length in lengths)


def mean(name: str, cut: int | None = None) -> float:
    return fmean(all_lengths(name, cut))


def middle_batch(name: str, sentences: int) -> tuple[int, ...]:
    """The batch of average length when texts are sorted by length before they are put into batches, as fairseq does:
    so many neighbours in that order whose mean is nearest to the mean of all."""
    lengths, wanted = all_lengths(name), mean(name)
    batches = [lengths[start : start + sentences] for start in range(len(lengths) - sentences + 1)]
    return min(batches, key=lambda batch: abs(fmean(batch) - wanted))


def near(average: float, sentences: int) -> tuple[int, ...]:
    """So many whole numbers as near to an average as their sum can be."""
    total = round(average * sentences)
    small, larger = divmod(total, sentences)
    return tuple(small + (index < larger) for index in range(sentences))


# ---- models and tasks


@functools.cache
def options_of(preset: str, search: str) -> dict[str, Any]:
    """Plans ask for them hundreds of times."""
    return presets.load(preset, search).options


@dataclass(frozen=True)
class Model:
    """A checkpoint, and of its shape what memory and time depend on."""

    title: str
    checkpoint: Checkpoint
    layers: int  # of the decoder
    heads: int
    width: int
    vocabulary: int
    is_language_model: bool = False
    shares_cache: bool = True  # between beams, in stock fairseq 0.12

    def shape(self, batch: int, beam: int, length: int) -> Shape:
        return Shape(batch, beam, length, self.heads, self.width)


@dataclass(frozen=True)
class Task:
    """What is asked of a model: sources as long as a batch of average length has them, outputs of average length."""

    name: str
    title: str
    model: Model
    preset: str
    source_lengths: tuple[int, ...]
    output_length: int  # with the closing token
    searches: tuple[str, ...] = ("beam", "diverse", "greedy")
    op: str = "generate"

    @property
    def longest_source(self) -> int:
        return max(self.source_lengths)

    @property
    def mean_source(self) -> float:
        return sum(self.source_lengths) / len(self.source_lengths)

    def beam(self, search: str) -> int:
        return options_of(self.preset, search)["beam"]

    def search_options(self, search: str) -> dict[str, Any]:
        """Blocking n-grams is left out: stock fairseq ignores it on a CPU."""
        chosen = options_of(self.preset, search)
        return {name: chosen[name] for name in SEARCH_OPTIONS if name in chosen}

    def request(self, batch: int, search: str = "beam", **options: Any) -> Request:
        found = {"beam": self.beam(search), "length": self.output_length, "search": self.search_options(search)}
        return Request(self.op, batch, self.source_lengths, **(found | options))


LIKE_GPT2 = {
    "activation_fn": "gelu_accurate",
    "decoder_learned_pos": True,
    "no_scale_embedding": True,
    "share_decoder_input_output_embed": True,
    "tokens_per_sample": 1024,
    "max_target_positions": 1024,
}
TRANSFORMER = Model(
    "Transformer 270M",
    Checkpoint("transformer_vaswani_wmt_en_de_big", vocabulary=30522),
    layers=6, heads=16, width=1024, vocabulary=30522, shares_cache=False,
)  # fmt: skip
BART = Model(
    "BART-large", Checkpoint("bart_large"),
    layers=12, heads=16, width=1024, vocabulary=50264,
)  # fmt: skip
GPT2_SMALL = Model(
    "GPT-2 small", Checkpoint("transformer_lm_gpt", LIKE_GPT2), layers=12, heads=12, width=768,
    vocabulary=50264, is_language_model=True, shares_cache=False,
)  # fmt: skip
GPT2_MEDIUM = Model(
    "GPT-2 medium", Checkpoint("transformer_lm_gpt2_small", LIKE_GPT2), layers=24, heads=16, width=1024,
    vocabulary=50264, is_language_model=True, shares_cache=False,
)  # fmt: skip


NEW_TOKENS = 60  # of GPT-2, whose preset stops at 200, for which stock fairseq takes minutes


def gpt2_task(name: str, model: Model) -> Task:
    """Prompts of one length, as stock fairseq counts the tokens of an output from the prompt's beginning."""
    preset = options_of("gpt2_cnndm", "beam")
    prompt = round(mean("cnndm_source", cut=preset["longest_source"]))
    return Task(
        name, "CNN/DailyMail", model, "gpt2_cnndm", (prompt,) * DISTINCT_SENTENCES, NEW_TOKENS,
        searches=("beam", "greedy"),
    )  # fmt: skip


def paper_tasks() -> tuple[Task, ...]:
    count = DISTINCT_SENTENCES
    return (
        Task("squad", "SQuAD 1.1", TRANSFORMER, "squad", near(SQUAD_SOURCE, count),
             round(SQUAD_OUTPUT)),
        Task("xsum", "XSum", BART, "xsum", middle_batch("xsum_source", count),
             round(mean("xsum_output"))),
        Task("cnndm", "CNN/DailyMail", BART, "cnndm", middle_batch("cnndm_source", count),
             round(mean("cnndm_output"))),
        gpt2_task("gpt2-small", GPT2_SMALL),
        gpt2_task("gpt2-medium", GPT2_MEDIUM),
    )  # fmt: skip


ENCODER = Task("encoder", "long articles, encoder alone", BART, "cnndm", (930,) * 4, 1, searches=(), op="encode")

# The same at toy size.
TINY = {"encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip
TINY_DECODER = {"decoder_layers": 2, "decoder_embed_dim": 64, "decoder_input_dim": 64, "decoder_output_dim": 64,
                "decoder_ffn_embed_dim": 128, "decoder_attention_heads": 4}  # fmt: skip
TINY_SIZE: dict[str, Any] = dict(layers=2, heads=4, width=64, vocabulary=1000)
TINY_BART = Model("toy BART", Checkpoint("bart_large", TINY, vocabulary=1000), **TINY_SIZE)
TINY_GPT2 = Model(
    "toy GPT-2", Checkpoint("transformer_lm_gpt", LIKE_GPT2 | TINY_DECODER, vocabulary=1000), **TINY_SIZE,
    is_language_model=True, shares_cache=False,
)  # fmt: skip
QUICK_TASKS = (
    Task("cnndm", "CNN/DailyMail", TINY_BART, "cnndm", (30, 31, 32), 12),
    Task("gpt2-small", "CNN/DailyMail", TINY_GPT2, "gpt2_cnndm", (24, 24, 24), 10, searches=("beam", "greedy")),
)

QUICK_ENCODER = replace(ENCODER, model=TINY_BART, source_lengths=(32,) * 2)

DEMO = Task(
    "demo", "package descriptions",
    Model("the demo's model", DemoCheckpoint("bart_base", vocabulary=6004), layers=2, heads=6, width=192,
          vocabulary=6004),
    "demo", (), 31, searches=("beam",),
)  # fmt: skip


# ---- the demo's texts


class DemoTexts:
    """As tokens, in the order of their lengths, as fairseq forms batches; and ROUGE of what systems make of them."""

    def __init__(self, count: int):
        import sentencepiece

        folder = ROOT / "demo"
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
        words = [line.rsplit(" ", 1)[0] for line in (folder / "dict.txt").read_text(encoding="utf-8").splitlines()]
        self.words = ["<s>", "<pad>", "</s>", "<unk>", *words]
        ids = {word: index for index, word in enumerate(self.words)}
        sources, targets = (
            (folder / f"test.{side}").read_text(encoding="utf-8").splitlines()[:count] for side in ("source", "target")
        )
        encoded = [
            [ids.get(piece, 3) for piece in self.pieces.encode(text, out_type=str)[: LONGEST - 1]] + [EOS]
            for text in sources
        ]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        self.tokens = [encoded[index] for index in order]
        self.references = [targets[index] for index in order]

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.tokens))

    def text(self, tokens: list[int]) -> str:
        return self.pieces.decode([self.words[token] for token in tokens if FIRST_WORD <= token < len(self.words)])

    def scores(self, outputs: list[list[int]]) -> dict[str, float]:
        """Means of F1, in percent."""
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(list(KINDS), use_stemmer=True)
        found = [scorer.score(ref, self.text(tokens)) for ref, tokens in zip(self.references, outputs, strict=True)]
        return {title: 100 * sum(f[kind].fmeasure for f in found) / len(found) for kind, title in KINDS.items()}
