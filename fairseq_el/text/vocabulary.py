"""Loads fairseq's dictionaries and encodings, and checks their files.

fairseq does not check them: a damaged file fails later at some text, or gives pieces that the model was not trained on.
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

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a file


def load_dictionary(path: Path) -> Dictionary:
    with path.open("rb") as file:
        if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK:
            raise UserError(f"{path} begins with a byte-order mark, which would be part of its first word: remove it")
    try:
        return Dictionary.load(str(path))
    except OSError:
        raise
    except Exception as error:  # fairseq raises many kinds, all for the same reason
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
        raise UserError(f"{path} is not a complete SentencePiece model: get it again ({error})") from error


def read_pieces(path: Path) -> dict[str, int]:
    """The ids of pieces in encoder.json, which must be different for all."""
    try:
        pieces: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: get it again ({error})") from error
    numbers = list(pieces.values()) if isinstance(pieces, dict) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise UserError(f"{path} is not a table of pieces, each with its own id: get it again")
    return pieces


def read_merges(path: Path) -> list[tuple[str, ...]]:
    """The merges in vocab.bpe, line by line as fairseq reads them. The first line has the version."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: get it again") from error
    merges = [tuple(line.split()) for line in lines[1:-1]]
    if not lines[0].startswith("#version") or lines[-1] or not all(len(merge) == 2 for merge in merges):
        raise UserError(
            f"{path} is not a complete file of merges (#version in the first line, two pieces in each other line): "
            "get it again"
        )
    return merges


def check_gpt2(pieces: dict[str, int], merges: Sequence[tuple[str, ...]], encoder: Path, vocab: Path) -> None:
    """Raises a `UserError` unless every text can be encoded and decoded, and every piece can occur."""
    letters = set(bytes_to_unicode().values())
    merged = {"".join(merge) for merge in merges}
    if missing := (letters | merged) - pieces.keys():
        raise UserError(
            f"{encoder} lacks {len(missing):,} pieces that {vocab.name} makes, such as {min(missing)[:20]!r}: get "
            "both files again, from one source"
        )
    # Users add special tokens in brackets; GPT-2's <|endoftext|> is one.
    own = {piece for piece in pieces if (piece[:1], piece[-1:]) in (("<", ">"), ("[", "]"))}
    if unmade := pieces.keys() - letters - merged - own:
        raise UserError(
            f"{vocab} does not make {len(unmade):,} pieces of {encoder.name}, such as {min(unmade)[:20]!r}: get "
            "both files again, from one source"
        )
    if strange := {piece for piece in pieces if not letters.issuperset(piece)}:
        raise UserError(f"{encoder} has pieces that encode no bytes, such as {min(strange)[:20]!r}: get it again")
