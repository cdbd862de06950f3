"""What a summarizer returns: summaries with scores, tokens and alternatives."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fairseq.data import Dictionary
from torch import Tensor

from fairseq_el.jobs.presets import Preset
from fairseq_el.text.sentences import one_line, split_sentences
from fairseq_el.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Hypothesis:
    """One output of the search.

    score: fairseq's, the sum of the tokens' log-probabilities divided by length ** lenpen; None if there is no
    summary, because the text is blank or was skipped. tokens: dictionary symbols of the whole output, with `</s>` at
    its end; token_scores: their log-probabilities. A preset that keeps few sentences shortens only the summary.
    """

    summary: str = ""
    score: float | None = None
    tokens: list[str] = field(default_factory=list)
    token_scores: list[float] = field(default_factory=list)

    @property
    def translation(self) -> str:
        """The same as `summary`, for a `Translator`."""
        return self.summary


@dataclass(frozen=True)
class DetailedSummary(Hypothesis):
    """The best hypothesis for a text, and the next best ones as `alternatives`."""

    alternatives: list[Hypothesis] = field(default_factory=list)

    @classmethod
    def of(cls, hypotheses: Sequence[Hypothesis]) -> "DetailedSummary":
        """hypotheses: best first; none for a text without a summary."""
        if not hypotheses:
            return cls()
        return cls(**vars(hypotheses[0]), alternatives=list(hypotheses[1:]))


class Decoder:
    """Turns hypotheses of fairseq's generators into text."""

    def __init__(self, tokenizer: Tokenizer, dictionary: Dictionary, preset: Preset, unwritten: Collection[int] = ()):
        """unwritten: tokens that are no text, such as those of languages."""
        self.unwritten = set(unwritten)
        self.tokenizer = tokenizer
        self.dictionary = dictionary
        self.preset = preset

    def decode(self, found: dict[str, Tensor], prompt_length: int = 0) -> Hypothesis:
        """prompt_length: tokens at the beginning that the model did not generate."""
        tokens = found["tokens"][prompt_length:].cpu()
        scores = found["positional_scores"][prompt_length:]
        return Hypothesis(
            as_summary(self.tokenizer.decode(self._pieces(tokens)), self.preset),
            float(found["score"]),
            [self.dictionary[token] for token in tokens.tolist()],
            scores.tolist(),
        )

    def _pieces(self, tokens: Tensor) -> list[str]:
        return self.dictionary.string(tokens, extra_symbols_to_ignore=self.unwritten).split()


def as_summary(text: str, preset: Preset) -> str:
    """The output of a model on one line, cut to the sentences that the preset keeps."""
    keep = preset.text().keep_sentences
    return one_line(text) if keep is None else " ".join(split_sentences(text)[:keep])
