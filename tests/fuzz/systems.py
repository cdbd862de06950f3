"""Runs a case with stock fairseq and with ours: models are built in memory from the same random weights."""

import functools
from argparse import Namespace
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.token_generation_constraints import pack_constraints
from torch import Tensor, nn

from fairseq_el.models.conversion import has_el_form, to_el_form
from fairseq_el.plugin.tasks import (
    ELLanguageModelingConfig,
    ELLanguageModelingTask,
    ELTranslationConfig,
    ELTranslationTask,
)
from fuzz.cases import Case, ModelCase

Hypotheses = list[list[dict]]
FUSED = ModelCase(
    "transformer_lm",
    0,
    {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_input_dim": 16, "decoder_output_dim": 16,
     "decoder_ffn_embed_dim": 16, "decoder_attention_heads": 2, "max_target_positions": 64},
    seed=7,
)  # fmt: skip
"""The language model that a search mixes in."""


# ---- models


@functools.cache
def make_dictionary(words: int) -> Dictionary:
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def build_model(case: ModelCase) -> BaseFairseqModel:
    """A stock model with random weights."""
    defaults = vars(TransformerLanguageModelConfig()) if case.is_language_model else {}
    args = Namespace(**(defaults | {"arch": case.family} | case.settings))
    ARCH_CONFIG_REGISTRY[case.family](args)
    dictionary = make_dictionary(case.vocabulary)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        model = ARCH_MODEL_REGISTRY[case.family].build_model(args, task)
        randomise(model, case, dictionary.pad())
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, case: ModelCase, pad: int) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=case.spread)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        if case.fp16_exact:
            parameter.copy_(parameter.half())
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0


def prepare(models: list[BaseFairseqModel], case: Case) -> None:
    """As fairseq-generate does."""
    options = case.search.options
    config = Namespace(
        generation=Namespace(beam=options["beam"], print_alignment=options.get("print_alignment")), task=None
    )
    for model in models:
        if case.prepared:
            model.prepare_for_inference_(config)
        elif hasattr(model.decoder, "need_attn"):
            model.decoder.need_attn = bool(options.get("print_alignment"))


# ---- inputs


def make_sample(case: Case) -> dict:
    """As fairseq's data sets collate: sources end with </s>, prompts begin with it and are padded behind."""
    eos, pad = 2, 1
    rows = [[eos, *text] if case.is_language_model else [*text, eos] for text in case.sources]
    longest = max(map(len, rows))
    padded = []
    for row in rows:
        padding = [pad] * (longest - len(row))
        padded.append(padding + row if case.left_pad else row + padding)
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "id": torch.arange(len(rows)),
        "net_input": {"src_tokens": torch.tensor(padded), "src_lengths": lengths},
    }


def make_prefix(case: Case, sample: dict) -> Tensor | None:
    if case.is_language_model:  # as its task does
        return sample["net_input"]["src_tokens"][:, 1:]
    if case.prefixes is None or not any(case.prefixes):
        return None
    longest = max(map(len, case.prefixes))
    return torch.tensor([[*prefix, *[1] * (longest - len(prefix))] for prefix in case.prefixes])


def make_constraints(case: Case) -> Tensor | None:
    if case.constraints is None:
        return None
    return pack_constraints([[torch.tensor(phrase) for phrase in phrases] for phrases in case.constraints])


def allowed_tokens(case: Case, sentence: int, tokens: Tensor) -> list[int]:
    """A few words that follow from the last token, and the end of the text."""
    vocabulary = case.models[0].vocabulary
    first = int(tokens[-1]) * 7
    return [2, *(4 + (first + number) % vocabulary for number in range(case.search.allowed_tokens))]


# ---- systems


def build_generator(task: FairseqTask, models: list[BaseFairseqModel], case: Case) -> SequenceGenerator:
    search = case.search
    extra = dict(search.extra)
    if search.fusion is not None:
        fused = ModelCase(FUSED.family, case.models[0].vocabulary, FUSED.settings, FUSED.seed)
        extra |= {"lm_model": build_model(fused), "lm_weight": search.fusion}
    allowed = functools.partial(allowed_tokens, case) if search.kind == "allowed" else None
    return task.build_generator(
        models, Namespace(**search.options), extra_gen_cls_kwargs=extra, prefix_allowed_tokens_fn=allowed
    )


def generate(generator: SequenceGenerator, case: Case) -> Hypotheses:
    sample = make_sample(case)
    arguments = {
        "prefix_tokens": make_prefix(case, sample), "constraints": make_constraints(case), "bos_token": case.bos_token
    }  # fmt: skip
    torch.manual_seed(case.seed)
    return generator.generate(None, sample, **arguments)


def run_ours(case: Case) -> Hypotheses:
    dictionary = make_dictionary(case.models[0].vocabulary)
    options = {
        "el_attention": case.attention,
        "el_memory_budget": None if case.budget is None else str(case.budget),
        "el_stock_ngrams": not case.search.working_ngrams,
    }
    if case.is_language_model:
        task = ELLanguageModelingTask(ELLanguageModelingConfig(**options), dictionary)
    else:
        task = ELTranslationTask(ELTranslationConfig(**options), dictionary, dictionary)
    models = [build_model(model) for model in case.models]
    models = [to_el_form(model) if has_el_form(model) else model for model in models]
    prepare(models, case)
    return generate(build_generator(task, models, case), case)


def run_stock(case: Case, noise: float = 0.0, seed: int = 0, as_stock: bool = False) -> Hypotheses:
    """noise: most that is added to or taken from each log-probability. as_stock: without `limit_each_text`."""
    dictionary = make_dictionary(case.models[0].vocabulary)
    if case.is_language_model:
        task = LanguageModelingTask(LanguageModelingConfig(), dictionary)
    else:
        task = TranslationTask(TranslationConfig(), dictionary, dictionary)
    models = [build_model(model) for model in case.models]
    prepare(models, case)
    generator = build_generator(task, models, case)
    if noise:
        add_noise(generator.model, noise, seed)
    if case.search.working_ngrams and generator.repeat_ngram_blocker is not None:
        generator.repeat_ngram_blocker = PlainNGramBlock(case.search.options["no_repeat_ngram_size"])
    if case.is_language_model and not as_stock:
        limit_each_text(generator)
    return generate(generator, case)


def add_noise(ensemble: EnsembleModel, size: float, seed: int) -> None:
    forward, random = ensemble.forward_decoder, torch.Generator().manual_seed(seed)

    def noisy(*args, **options):
        scores, attention = forward(*args, **options)
        return scores + size * (2 * torch.rand(scores.shape, generator=random) - 1), attention

    ensemble.forward_decoder = noisy


def limit_each_text(generator: SequenceGenerator) -> None:
    """Makes a least length, suppressed tokens and n-gram blocking hold behind each prompt of a batch, and not before.

    In stock fairseq the first two hold behind the longest prompt only, so a text depends on what else is in its batch,
    and the third rules out prompts that repeat themselves.
    """
    stock, block = generator._prefix_tokens, generator.repeat_ngram_blocker

    def prefix_tokens(step, lprobs, scores, tokens, prefix, beam_size):
        lprobs, tokens, scores = stock(step, lprobs, scores, tokens, prefix, beam_size)
        free = prefix[:, step].eq(generator.pad).repeat_interleave(beam_size)
        if step < generator.min_len:
            lprobs[free, generator.eos] = -torch.inf
        if generator.token_indices_to_suppress is not None:
            lprobs[free.nonzero(), generator.token_indices_to_suppress] = -torch.inf
        if isinstance(block, PlainNGramBlock):
            block.forced = step, ~free
        return lprobs, tokens, scores

    generator._prefix_tokens = prefix_tokens


class PlainNGramBlock(nn.Module):
    """Blocks repeated n-grams, row by row."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.forced: tuple[int, Tensor] | None = None  # a step, and the rows that a prompt forces in it

    def forward(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        for row, text in enumerate(tokens[:, : step + 1].tolist()):
            if self.forced is not None and self.forced[0] == step and self.forced[1][row]:
                continue
            start = len(text) + 1 - self.size
            for at in range(start):
                if text[at : at + self.size - 1] == text[start:]:
                    lprobs[row, text[at + self.size - 1]] = -torch.inf
        return lprobs
