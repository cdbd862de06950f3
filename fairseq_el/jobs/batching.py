"""Turns texts into token indices and groups them into batches. Needs the tokenizer and dictionary, not the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairseq.data import Dictionary

from fairseq_el.errors import UserError
from fairseq_el.jobs.presets import Preset
from fairseq_el.text.sentences import one_line
from fairseq_el.text.tokenizer import Tokenizer

TOKENS_PER_BATCH = 12_000  # the default of fairseq-generate
FILLER = "madeupword"  # entries with which fairseq pads a dictionary to a multiple of 8


@dataclass(frozen=True)
class Source:
    """The token indices of a text, without the end of sentence; empty for a blank text."""

    tokens: list[int]
    is_cut: bool  # True if the text was longer and only its beginning is here


class Batcher:
    """Encodes texts and groups them into batches of similar length."""

    def __init__(self, tokenizer: Tokenizer, dictionary: Dictionary, preset: Preset, positions: int):
        """positions: tokens of a text that the model can take, including the preset's `source_suffix`."""
        self.tokenizer = tokenizer
        self.dictionary = dictionary
        self.preset = preset
        self.suffix = self._indices(tokenizer.encode(preset.text().source_suffix))
        self.longest_text = min(positions, preset.text().longest_source or positions) - len(self.suffix)
        if self.longest_text < 1:
            raise UserError(
                f"the preset {preset.name} leaves no room for text in the model's positions: set fewer "
                "max_new_tokens, or a larger longest_source or max_source_positions"
            )

    def encode(self, text: str) -> Source:
        text = one_line(text.encode("utf-8", "replace").decode())  # replaces lone surrogates by question marks
        pieces, is_cut = self.tokenizer.beginning(text, self.longest_text) if text else ([], False)
        if not pieces:
            return Source([], False)
        return Source(self._indices(pieces) + self.suffix, is_cut)

    def batches(self, sources: Sequence[Source]) -> list[list[int]]:
        """Indices of the sources in each batch, longest sources first. Blank sources are left out."""
        sentences = self.preset.options.get("batch_size")
        tokens = self.preset.options.get("max_tokens") or (None if sentences else TOKENS_PER_BATCH)
        indices = sorted(
            (index for index, source in enumerate(sources) if source.tokens),
            key=lambda index: (-len(sources[index].tokens), index),
        )
        batches: list[list[int]] = []
        for index in indices:
            size = len(batches[-1]) + 1 if batches else 0
            longest = len(sources[batches[-1][0]].tokens) + 1 if batches else 0  # with the end of the sentence
            if not batches or (sentences and size > sentences) or (tokens and size * longest > tokens):
                batches.append([])
            batches[-1].append(index)
        return batches

    def is_mostly_unknown(self, source: Source) -> bool:
        """Half is enough: SentencePiece makes a known `▁` and one unknown piece of a word in another script."""
        return 2 * source.tokens.count(self.dictionary.unk()) >= max(len(source.tokens), 1)

    def check_known(self, sources: Iterable[Source]) -> None:
        """Raises a `UserError` if the tokenizer is not the one that the model was trained with.

        A text in another script has many unknown pieces too, whatever the tokenizer. So where most pieces of the
        sources are unknown, the dictionary decides: most of its entries are pieces of the right tokenizer.
        """
        whole = Source([token for source in sources for token in source.tokens], False)
        if self.is_mostly_unknown(whole) and not self._dictionary_fits():
            share = whole.tokens.count(self.dictionary.unk()) / len(whole.tokens)
            raise UserError(
                f"{self.tokenizer.name} does not belong to the model: {share:.0%} of the pieces of the texts are not "
                "in its dictionary; give the folder with the encoding that the model was trained with (--bpe-dir)"
            )

    def _dictionary_fits(self) -> bool:
        symbols = [s for s in self.dictionary.symbols[self.dictionary.nspecial :] if not s.startswith(FILLER)]
        return 2 * sum(map(self.tokenizer.has_piece, symbols)) >= len(symbols)

    def describe_cut(self, cut: int, total: int) -> str:
        longer = "text was" if total == 1 else "texts were"
        return f"{cut:,} of {total:,} {longer} longer than {self.longest_text:,} tokens; only the beginning was read"

    def describe_unknown(self, unknown: int, total: int) -> str:
        consist = "text consists" if total == 1 else "texts consist"
        return (
            f"{unknown:,} of {total:,} {consist} mostly of pieces that the model does not know, for example another "
            "script; expect no useful output for such a text"
        )

    def _indices(self, pieces: Iterable[str]) -> list[int]:
        return [self.dictionary.index(piece) for piece in pieces]
