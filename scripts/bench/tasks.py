"""The workloads: the paper's models and tasks, how long real texts are, and the demo's texts with their scores."""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.checkpoints import Checkpoint, DemoCheckpoint
from bench.environment import ROOT
from bench.protocol import EOS, FIRST_WORD, Request
from fairseq_el.jobs import presets
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.models.costs import Shape
from fairseq_el.text.rouge import rouge

COUNTS = Path(__file__).with_name("lengths.json")
# Sources of a batch of average length when texts are sorted by length before they are put into batches, as fairseq
# does: eight neighbours in that order whose mean is nearest to the mean of all. SQuAD's is a mean that the paper gives.
CNNDM_SOURCES = (608, 611, 613, 622, 642, 647, 653, 661)
XSUM_SOURCES = (458, 460, 460, 462, 465, 465, 465, 469)
SQUAD_SOURCES = (150, 150, 150, 149, 149, 149, 149, 149)
PROMPT = 437  # mean of CNN/DailyMail's articles, cut at the 512 tokens of the preset
LONGEST = 190  # tokens, as the demo cuts its texts
SEARCH_OPTIONS = ("lenpen", "diverse_beam_groups", "diverse_beam_strength")


# ---- lengths


@functools.cache
def all_lengths(name: str) -> tuple[int, ...]:
    """In ascending order.

    `lengths.json` counts texts by their length in GPT-2's BPE tokens, opening and closing token included, sources cut
    at 1,024: 128 articles of CNN/DailyMail and what BART-large fine-tuned on it wrote for them (beam 4), 239 articles
    of XSum and 256 of its reference summaries.
    """
    counts = json.loads(COUNTS.read_text())[name]
    return tuple(sorted(int(length) for length, texts in counts.items() for _ in range(texts)))


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


LIKE_GPT2 = {"activation_fn": "gelu_accurate", "decoder_learned_pos": True, "no_scale_embedding": True,
             "share_decoder_input_output_embed": True, "tokens_per_sample": 1024,
             "max_target_positions": 1024}  # fmt: skip
TRANSFORMER = Model("Transformer 270M", Checkpoint("transformer_vaswani_wmt_en_de_big", vocabulary=30522), layers=6,
                    heads=16, width=1024, vocabulary=30522, shares_cache=False)  # fmt: skip
BART = Model("BART-large", Checkpoint("bart_large"), layers=12, heads=16, width=1024, vocabulary=50264)
GPT2_SMALL = Model("GPT-2 small", Checkpoint("transformer_lm_gpt", LIKE_GPT2), layers=12, heads=12, width=768,
                   vocabulary=50264, is_language_model=True, shares_cache=False)  # fmt: skip
GPT2_MEDIUM = Model("GPT-2 medium", Checkpoint("transformer_lm_gpt2_small", LIKE_GPT2), layers=24, heads=16, width=1024,
                    vocabulary=50264, is_language_model=True, shares_cache=False)  # fmt: skip
NEW_TOKENS = 60  # of GPT-2, whose preset stops at 200, for which stock fairseq takes minutes


def gpt2_task(name: str, model: Model) -> Task:
    """Prompts of one length, as stock fairseq counts the tokens of an output from the prompt's beginning."""
    return Task(name, "CNN/DailyMail", model, "gpt2_cnndm", (PROMPT,) * 8, NEW_TOKENS, searches=("beam", "greedy"))


def paper_tasks() -> tuple[Task, ...]:
    """Outputs are as long as real ones on average."""
    return (
        Task("squad", "SQuAD 1.1", TRANSFORMER, "squad", SQUAD_SOURCES, 12),
        Task("xsum", "XSum", BART, "xsum", XSUM_SOURCES, 30),
        Task("cnndm", "CNN/DailyMail", BART, "cnndm", CNNDM_SOURCES, 67),
        gpt2_task("gpt2-small", GPT2_SMALL),
        gpt2_task("gpt2-medium", GPT2_MEDIUM),
    )


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
        self.batcher = Summarizer.load("demo", "demo").batcher
        sides = ((ROOT / "demo" / f"test.{side}").read_text(encoding="utf-8") for side in ("source", "target"))
        sources, targets = (side.splitlines()[:count] for side in sides)
        encoded = [[*self.batcher.encode(text).tokens[: LONGEST - 1], EOS] for text in sources]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        self.tokens, self.references = ([side[index] for index in order] for side in (encoded, targets))

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.tokens))

    def text(self, tokens: list[int]) -> str:
        symbols = self.batcher.dictionary.symbols
        return self.batcher.tokenizer.decode([symbols[t] for t in tokens if FIRST_WORD <= t < len(symbols)])

    def scores(self, outputs: list[list[int]]) -> dict[str, float]:
        """Means of F1, in percent."""
        return {kind: float(f.mean()) for kind, f in rouge(self.references, list(map(self.text, outputs))).items()}
