"""Dictionaries and encodings as fairseq has them, from files that may be damaged.

fairseq takes such files on trust: some damage ends in an exception at the first text that meets it, and some in
pieces that the model was not trained on.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig
from fairseq.data.encoders.gpt2_bpe_utils import Encoder, bytes_to_unicode
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

from fairseq_el.errors import UserError, not_a_dictionary

MARK = b"\xef\xbb\xbf"  # of byte order, with which some editors begin a file


def load_dictionary(path: Path) -> Dictionary:
    with path.open("rb") as file:
        if file.read(len(MARK)) == MARK:
            raise UserError(f"{path} begins with a byte-order mark, which would be part of its first word: remove it")
    try:
        return Dictionary.load(str(path))
    except OSError:
        raise
    except Exception as error:  # whatever fairseq makes of it, it has one cause
        raise UserError(" ".join(not_a_dictionary(str(path), error).split())) from error


def build_dictionary(symbols: Iterable[str]) -> Dictionary:
    """symbols: without fairseq's special ones."""
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


class GPT2Encoding(GPT2BPE):
    """GPT-2's encoding from tokens and merges in memory."""

    def __init__(self, tokens: dict[str, int], merges: list[tuple[str, str]]):
        self.bpe = Encoder(tokens, merges)


class TokenizersEncoding:
    """The pieces that a tokenizer.json makes, by the library `tokenizers`."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UserError(
                f"{path} needs the package tokenizers: install it, or put the model's sentencepiece.bpe.model there"
            ) from error
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no class of its own
            raise UserError(f"{path} is not a tokenizer's file: copy or download it again") from error

    def encode(self, text: str) -> str:
        return " ".join(self.tokenizer.encode(text, add_special_tokens=False).tokens)

    def decode(self, text: str) -> str:
        return text.replace(" ", "").replace("\u2581", " ").strip()


Encoding: TypeAlias = SentencepieceBPE | GPT2BPE | TokenizersEncoding


def load_encoding(files: Sequence[Path]) -> Encoding:
    """files: one of SentencePiece, encoder.json and vocab.bpe of GPT-2's encoding, or a tokenizer.json."""
    if len(files) == 1:
        return TokenizersEncoding(files[0]) if files[0].suffix == ".json" else load_sentencepiece(files[0])
    encoder, merges = files
    check_gpt2(read_pieces(encoder), read_merges(merges), encoder, merges)
    return GPT2BPE(GPT2BPEConfig(gpt2_encoder_json=str(encoder), gpt2_vocab_bpe=str(merges)))


def gpt2_encoding(tokens: dict[str, int], merges: list[tuple[str, str]], files: Sequence[Path]) -> GPT2BPE:
    """files: where these are from, for messages."""
    check_gpt2(tokens, merges, files[0], files[-1])
    return GPT2Encoding(tokens, merges)


def load_sentencepiece(path: Path) -> SentencepieceBPE:
    try:
        return SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(path)))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path} is not a whole model of SentencePiece: get it again ({error})") from error


def read_pieces(path: Path) -> dict[str, int]:
    """The numbers of pieces, in which each of them stands for one piece."""
    try:
        pieces: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: get it again ({error})") from error
    numbers = list(pieces.values()) if isinstance(pieces, dict) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise UserError(f"{path} is not a list of pieces, each with a number of its own: get it again")
    return pieces


def read_merges(path: Path) -> list[tuple[str, ...]]:
    """As fairseq reads them, which goes by the ends of lines: the first says the version."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: get it again") from error
    merges = [tuple(line.split()) for line in lines[1:-1]]
    if not lines[0].startswith("#version") or lines[-1] or not all(len(merge) == 2 for merge in merges):
        raise UserError(
            f"{path} is not a whole file of merges, with a #version in its first line and two pieces in each other: "
            "get it again"
        )
    return merges


def check_gpt2(pieces: dict[str, int], merges: Sequence[tuple[str, ...]], encoder: Path, vocab: Path) -> None:
    """Raise a `UserError` unless each text can be encoded, all pieces can come up, and all can be decoded."""
    letters = set(bytes_to_unicode().values())
    merged = {"".join(merge) for merge in merges}
    if missing := (letters | merged) - pieces.keys():
        raise UserError(
            f"{encoder} lacks {len(missing):,} pieces that {vocab.name} makes, such as {min(missing)[:20]!r}: get the "
            "two files again that belong together"
        )
    # Words in brackets are for people's own use; GPT-2's <|endoftext|> is one.
    own = {piece for piece in pieces if (piece[:1], piece[-1:]) in (("<", ">"), ("[", "]"))}
    if unmade := pieces.keys() - letters - merged - own:
        raise UserError(
            f"{vocab} does not make {len(unmade):,} pieces of {encoder.name}, such as {min(unmade)[:20]!r}: get the "
            "two files again that belong together"
        )
    if strange := {piece for piece in pieces if not letters.issuperset(piece)}:
        raise UserError(f"{encoder} has pieces that stand for no bytes, such as {min(strange)[:20]!r}: get it again")
