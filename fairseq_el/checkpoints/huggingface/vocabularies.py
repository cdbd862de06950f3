"""fairseq's dictionaries from Transformers' vocabularies, and BART's the other way."""

import re
from collections.abc import Iterable
from pathlib import Path

from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_el.errors import UserError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # the first rows of every fairseq model
END_OF_TEXT = "<|endoftext|>"  # the last entry of GPT-2's vocabulary
NO_PIECE = re.compile(r"<.*>|\[.*\]|madeupword\d+")  # entries of BART's vocabulary that no text is encoded as
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+")
# The language codes of mBART, and those that mBART-50 adds, in the order of their embeddings.
MBART_LANGUAGES = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
""".split()
MBART50_LANGUAGES = """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN
    te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
""".split()


def gpt2_encoder(merges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """GPT-2's `encoder.json`, which follows from its merges: bytes, merged pieces, end of text."""
    merged = ("".join(pair) for pair in merges)
    pieces = dict.fromkeys([*bytes_to_unicode().values(), *merged, END_OF_TEXT])
    return {piece: number for number, piece in enumerate(pieces)}


def gpt2_symbols(vocabulary: dict[str, int], rows: int, end: int) -> list[str]:
    """fairseq's dictionary for GPT-2, special symbols aside: the numbers that `--bpe gpt2` writes.

    The end of text has none, as it is fairseq's </s>.
    """
    beyond = [piece for piece, number in vocabulary.items() if number >= rows]
    if beyond:
        raise UserError(
            f"the vocabulary has {beyond[0]!r} as number {vocabulary[beyond[0]]}, but the model has "
            f"{rows:,} rows: use the vocabulary that belongs to the weights"
        )
    return [str(number) for number in range(rows) if number != end]


def bart_symbols(vocabulary: dict[str, int], merges: Iterable[tuple[str, str]], rows: int) -> list[str]:
    """fairseq's dictionary for BART, special symbols aside, from Transformers' vocabulary.

    Both number rows alike; but fairseq names them after the numbers pieces have in GPT-2. Rows
    without a name get one, entries beyond the rows (<mask>, in models for summaries) have none.
    """
    encoder = gpt2_encoder(merges)
    unmade = [piece for piece in vocabulary if piece not in encoder and not NO_PIECE.fullmatch(piece)]
    if unmade:
        raise UserError(
            f"the merges do not make {len(unmade):,} tokens of the vocabulary, such as {min(unmade)[:20]!r}: get the "
            "two files again that belong together"
        )
    return [str(encoder.get(piece, piece)) for piece in named_rows(vocabulary, rows)]


def named_rows(vocabulary: dict[str, int], rows: int) -> list[str]:
    """The token of each row but those of special symbols. Rows without a token get a made-up one."""
    pieces = {number: piece for piece, number in vocabulary.items()}
    for number, symbol in enumerate(SPECIAL_SYMBOLS):
        if pieces.get(number) != symbol:
            raise UserError(
                f"the vocabulary has {pieces.get(number)!r} as number {number}, where BART's has "
                f"{symbol}: use the vocabulary that belongs to the weights"
            )
    unnamed = (f"madeupword{n:04d}" for n in range(rows))
    fillers = (name for name in unnamed if name not in vocabulary)
    return [pieces.get(n) or next(fillers) for n in range(len(SPECIAL_SYMBOLS), rows)]


def mbart_symbols(vocabulary: dict[str, int], rows: int) -> list[str]:
    """fairseq's dictionary for mBART, special symbols aside: language codes are in brackets."""
    return [f"[{piece}]" if LANGUAGE.fullmatch(piece) else piece for piece in named_rows(vocabulary, rows)]


def mbart_vocabulary(path: Path, rows: int) -> dict[str, int]:
    """Indices of mBART's tokens from its SentencePiece model: special symbols, pieces, language codes, <mask>."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path} is not a complete SentencePiece model: copy or download it again") from error
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    if pieces[:3] != ["<unk>", "<s>", "</s>"]:
        raise UserError(f"{path} is not mBART's, which begins with <unk>, <s> and </s>: use the model's own")
    for languages in (MBART_LANGUAGES, MBART_LANGUAGES + MBART50_LANGUAGES):
        tokens = [*SPECIAL_SYMBOLS, *pieces[3:], *languages, "<mask>"]
        if len(tokens) == rows:
            return {token: number for number, token in enumerate(tokens)}
    raise UserError(
        f"{path} has {len(pieces):,} pieces and the model {rows:,} tokens, which is neither mBART's nor mBART-50's "
        "number: put the model's tokenizer.json there"
    )


def bart_vocabulary(symbols: Iterable[str], encoder: dict[str, int]) -> dict[str, int]:
    """Transformers' vocabulary for BART, from fairseq's dictionary with its special symbols."""
    pieces = {str(number): piece for piece, number in encoder.items()}
    vocabulary = {}
    for number, symbol in enumerate(symbols):
        if symbol.isdecimal() and symbol not in pieces:
            raise UserError(
                f"the dictionary has an entry {symbol}, which encoder.json does not know: use the "
                "files that the model was trained with"
            )
        vocabulary[pieces.get(symbol, symbol)] = number
    vocabulary.setdefault("<mask>", len(vocabulary))  # tokenizers of BART want it
    return vocabulary
