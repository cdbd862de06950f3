"""Text as pieces, and back."""

from collections.abc import Sequence

from fairseq.data.encoders.gpt2_bpe import GPT2BPE
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

CHARACTERS_PER_TOKEN = 8  # more than texts have


class Tokenizer:
    """Text as pieces, and back."""

    def __init__(self, encoding: SentencepieceBPE | GPT2BPE, name: str = "the tokenizer"):
        """name: for messages, such as the names of its files."""
        self.encoding = encoding
        self.name = name

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

    def has_piece(self, piece: str) -> bool:
        if isinstance(self.encoding, GPT2BPE):
            return piece.isdecimal() and int(piece) in self.encoding.bpe.decoder
        return not self.encoding.sp.IsUnknown(self.encoding.sp.PieceToId(piece))

    def decode(self, pieces: Sequence[str]) -> str:
        if isinstance(self.encoding, GPT2BPE):  # which fails on the entries that only fill a dictionary up
            known = self.encoding.bpe.decoder
            pieces = [p for p in pieces if p in ("<unk>", "<mask>") or (p.isdecimal() and int(p) in known)]
        return self.encoding.decode(" ".join(pieces))
