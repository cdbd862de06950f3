"""Converts text to pieces and back."""

from collections.abc import Sequence

from fairseq.data.encoders.gpt2_bpe import GPT2BPE

from fairseq_el.text.vocabulary import Encoding, TokenizersEncoding

CHARACTERS_PER_TOKEN = 8  # more than real texts have


class Tokenizer:
    """Converts text to pieces and back."""

    def __init__(self, encoding: Encoding, name: str = "the tokenizer"):
        """name: for messages, such as the names of its files."""
        self.encoding = encoding
        self.name = name

    def encode(self, text: str) -> list[str]:
        return self.encoding.encode(text).split()

    def beginning(self, text: str, longest: int) -> tuple[list[str], bool]:
        """The first pieces of a text, and whether there are more.

        Encodes little more than these: GPT-2's encoding takes time quadratic in the length of a word.
        """
        size = CHARACTERS_PER_TOKEN * longest
        while True:
            part = text if len(text) <= size else text[:size].rsplit(maxsplit=1)[0]  # split no word
            if part is not text and len(part) < size // 2:  # a word or a run of spaces is that long
                part = text[:size]
            pieces = self.encode(part)
            if len(pieces) > longest or part is text:
                return pieces[:longest], len(pieces) > longest
            size *= 4

    def has_piece(self, piece: str) -> bool:
        if isinstance(self.encoding, GPT2BPE):
            return piece.isdecimal() and int(piece) in self.encoding.bpe.decoder
        if isinstance(self.encoding, TokenizersEncoding):
            return self.encoding.tokenizer.token_to_id(piece) is not None
        return not self.encoding.sp.IsUnknown(self.encoding.sp.PieceToId(piece))

    def decode(self, pieces: Sequence[str]) -> str:
        if isinstance(self.encoding, GPT2BPE):  # it fails on the padding entries of a dictionary
            known = self.encoding.bpe.decoder
            pieces = [p for p in pieces if p in ("<unk>", "<mask>") or (p.isdecimal() and int(p) in known)]
        return self.encoding.decode(" ".join(pieces))
