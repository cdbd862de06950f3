"""Text as pieces, and back."""

from collections.abc import Sequence

from fairseq.data.encoders.gpt2_bpe import GPT2BPE

from fairseq_el.text.vocabulary import Encoding

CHARACTERS_PER_TOKEN = 8  # more than texts have


class Tokenizer:
    """Text as pieces, and back."""

    def __init__(self, encoding: Encoding):
        self.encoding = encoding

    def encode(self, text: str) -> list[str]:
        return self.encoding.encode(text).split()

    def beginning(self, text: str, longest: int) -> tuple[list[str], bool]:
        """The first pieces of a text, and whether there are more.

        Encodes little more than these: GPT-2's encoding takes time quadratic in the length of a word.
        """
        size = CHARACTERS_PER_TOKEN * longest
        while True:
            part = text if len(text) <= size else text[:size].rsplit(maxsplit=1)[0]  # at the end of a word
            if part is not text and len(part) < size // 2:  # after it come as many spaces, or a word as long
                part = text[:size]
            pieces = self.encode(part)
            if len(pieces) > longest or part is text:
                return pieces[:longest], len(pieces) > longest
            size *= 4

    def decode(self, pieces: Sequence[str]) -> str:
        if isinstance(self.encoding, GPT2BPE):  # fails on entries that only pad the dictionary
            known = self.encoding.bpe.decoder
            pieces = [p for p in pieces if p in ("<unk>", "<mask>") or (p.isdecimal() and int(p) in known)]
        return self.encoding.decode(" ".join(pieces))
