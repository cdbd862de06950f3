"""Texts as a model reads them, and which of them go into a batch together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairseq.data import Dictionary

from fairseq_el.jobs.presets import Preset
from fairseq_el.text.sentences import one_line
from fairseq_el.text.tokenizer import Tokenizer

TOKENS_PER_BATCH = 12_000  # what fairseq-generate takes where nothing is said


@dataclass(frozen=True)
class Source:
    """A text as the model reads it: none of it for blank texts, the beginning of long ones."""

    tokens: list[int]
    is_cut: bool


class SourceReader:
    """Reads texts for a model, without needing it: their pieces, and which texts go into a batch together."""

    def __init__(self, tokenizer: Tokenizer, dictionary: Dictionary, preset: Preset, longest_text: int = 0):
        """longest_text: in tokens, without those that open or close a text."""
        self.tokenizer = tokenizer
        self.dictionary = dictionary
        self.preset = preset
        self.suffix = self._indices(tokenizer.encode(preset.text().source_suffix))
        self.longest_text = longest_text

    def describe_cut(self, cut: int, total: int) -> str:
        longer = "text was" if total == 1 else "texts were"
        limit = f"{self.longest_text:,} tokens"
        return f"{cut:,} of {total:,} {longer} longer than {limit}; only the beginning was read"

    def encode(self, text: str) -> Source:
        text = one_line(text.encode("utf-8", "replace").decode())  # half a character becomes a question mark
        pieces, is_cut = self.tokenizer.beginning(text, self.longest_text) if text else ([], False)
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
