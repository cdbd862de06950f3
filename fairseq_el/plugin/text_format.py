"""Translation with special tokens around the source and at the start of the target.

fairseq-train reads `text </s>` and starts targets with `</s>`. Models from Transformers were trained with other special
tokens: BART has `<s> text </s>`; mBART, M2M-100 and NLLB have codes of the source's and the target's language. A
checkpoint that `fairseq-el convert` wrote says so in two settings of its task, `source_format` and `target_start`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data import Dictionary, data_utils
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.plugin.tasks import ELTranslationTask
from fairseq_el.text.languages import resolve, symbols_of

TEXT = "{text}"
LANGUAGES = {"{source_lang}": "source_lang", "{target_lang}": "target_lang"}


@dataclass(frozen=True)
class TextFormat:
    """Indices of special tokens."""

    prefix: list[int]  # before the text
    suffix: list[int]  # after the text
    start: int  # what the decoder reads first
    forced: list[int]  # what the target begins with; not scored

    @classmethod
    def parse(cls, settings: Any, languages: dict[str, str], source: Dictionary, target: Dictionary) -> "TextFormat":
        """settings: of the checkpoint's task; languages: `source_lang` and `target_lang`, if not those in settings."""
        languages = {name: languages.get(name) or getattr(settings, name, None) or "" for name in LANGUAGES.values()}
        symbols, starts = (str(getattr(settings, name, "")).split() for name in ("source_format", "target_start"))
        if symbols.count(TEXT) != 1 or not starts or TEXT in starts:
            raise UserError("the checkpoint's settings source_format and target_start are damaged: get it again")
        framed = [row_of(symbol, languages, source) for symbol in symbols]
        start, *forced = [row_of(symbol, languages, target) for symbol in starts]
        text = symbols.index(TEXT)
        return cls(framed[:text], framed[text + 1 :], start, forced)

    def frame(self, sample: dict[str, Any], dictionary: Dictionary, left_pad: bool) -> dict[str, Any]:
        """A sample of sources `text </s>` [b, n] as one of framed sources [b, n + special tokens - 1]."""
        sources = sample["net_input"]["src_tokens"]
        rows = [
            torch.cat([row.new_tensor(self.prefix), row[row.ne(dictionary.pad())][:-1], row.new_tensor(self.suffix)])
            for row in sources
        ]
        tokens = data_utils.collate_tokens(rows, dictionary.pad(), left_pad=left_pad)
        lengths = sources.new_tensor([len(row) for row in rows])
        return sample | {"net_input": sample["net_input"] | {"src_tokens": tokens, "src_lengths": lengths}}

    def without_forced(self, hypothesis: dict[str, Any], generator: SequenceGenerator) -> dict[str, Any]:
        """The hypothesis without the forced tokens and what they add to its score."""
        count = len(self.forced)
        score = hypothesis["positional_scores"][:count].sum()
        if generator.normalize_scores:
            score = score / len(hypothesis["tokens"]) ** generator.len_penalty
        kept = {name: hypothesis[name][count:] for name in ("tokens", "positional_scores")}
        return hypothesis | kept | {"score": hypothesis["score"] - score}


def row_of(symbol: str, languages: dict[str, str], dictionary: Dictionary) -> int:
    """-1 for the text itself."""
    if symbol == TEXT:
        return -1
    if symbol in LANGUAGES:
        name = LANGUAGES[symbol]
        known = symbols_of(dictionary)
        symbol = known[resolve(languages[name], known, name)]
    return dictionary.index(symbol)


class FormattedTranslationTask(TranslationTask):
    """fairseq's `translation` with a `TextFormat`."""

    text_format: TextFormat

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
        text_format = self.text_format
        sample = text_format.frame(sample, self.source_dictionary, self.cfg.left_pad_source)
        sources: Tensor = sample["net_input"]["src_tokens"]
        forced = sources.new_tensor(text_format.forced).expand(sources.size(0), -1)
        prefix_tokens = forced if prefix_tokens is None else torch.cat([forced, prefix_tokens], dim=1)
        with torch.no_grad():
            found = generator.generate(
                models,
                sample,
                prefix_tokens=prefix_tokens if prefix_tokens.size(1) else None,
                constraints=constraints,
                bos_token=text_format.start,
            )
        scored = [[text_format.without_forced(h, generator) for h in hypotheses] for hypotheses in found]
        return [sorted(hypotheses, key=lambda h: h["score"], reverse=True) for hypotheses in scored]


class ELFormattedTranslationTask(ELTranslationTask, FormattedTranslationTask):
    """The same, generating with EL-attention."""
