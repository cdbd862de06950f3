"""fairseq's dictionaries from Transformers' vocabularies, and BART's the other way."""

import re
from collections.abc import Iterable
from pathlib import Path

from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_el.errors import UserError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # the first rows of every fairseq model
END_OF_TEXT = "<|endoftext|>"  # the last entry of GPT-2's vocabulary
NO_PIECE = re.compile(r"<.*>|\[.*\]|madeupword\d+")  # entries of BART's vocabulary that no text is encoded as
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+")  # in Transformers' vocabularies of mBART and NLLB
# In fairseq's dictionaries: [en_XX] of mBART, __en__ of M2M-100 and __eng_Latn__ of NLLB.
LANGUAGE_SYMBOL = re.compile(rf"\[({LANGUAGE.pattern})\]|__([a-z]{{2,3}}|{LANGUAGE.pattern})__")
# The language codes of mBART, and those that mBART-50 adds, in the order of their embeddings.
MBART_LANGUAGES = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
""".split()
MBART50_LANGUAGES = """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN
    te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
""".split()
# Those of M2M-100, of its models for WMT21, and of NLLB.
M2M100_LANGUAGES = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy
    id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru
    sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
""".split()
WMT21_LANGUAGES = "en ha is ja cs ru zh de".split()
NLLB_LANGUAGES = """
    ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab
    ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl
    bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn
    cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn
    est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn
    gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn
    ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab
    kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn
    kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn
    lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn
    mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn
    nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab quy_Latn
    ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn
    sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn
    szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn
    tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn
    vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn
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


def code_of(symbol: str) -> str | None:
    """The language that a symbol of fairseq's dictionary stands for."""
    match = LANGUAGE_SYMBOL.fullmatch(symbol)
    return match and (match[1] or match[2])


def language_symbol(kind: str, code: str) -> str:
    """The symbol of a language in fairseq's dictionary. kind: the `model_type` in config.json."""
    return f"[{code}]" if kind == "mbart" else f"__{code}__"


def multilingual_symbols(kind: str, vocabulary: dict[str, int], rows: int) -> list[str]:
    """fairseq's dictionary for mBART, M2M-100 or NLLB, special symbols aside."""
    pieces = named_rows(vocabulary, rows)
    if any(map(LANGUAGE_SYMBOL.fullmatch, pieces)):  # those of M2M-100 are as in fairseq
        return pieces
    return [language_symbol(kind, piece) if LANGUAGE.fullmatch(piece) else piece for piece in pieces]


def m2m100_vocabulary(pieces: dict[str, int], path: Path, languages: Iterable[str], rows: int) -> dict[str, int]:
    """Indices of M2M-100's tokens: the pieces in vocab.json, then the languages."""
    added = [token for code in languages if (token := language_symbol("m2m_100", code)) not in pieces]
    vocabulary = pieces | {token: index for index, token in enumerate(added, start=len(pieces))}
    if len(vocabulary) > rows:
        raise UserError(
            f"{path} has {len(pieces):,} pieces, which with {len(added)} languages is more than the model's {rows:,} "
            "rows: use the vocabulary that belongs to the weights"
        )
    return vocabulary


def sentencepiece_vocabulary(kind: str, path: Path, rows: int) -> dict[str, int]:
    """Indices of the tokens of mBART or NLLB from the SentencePiece model: special symbols, pieces, language codes,
    <mask>. NLLB has rows without a token behind these."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path} is not a complete SentencePiece model: copy or download it again") from error
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    if pieces[:3] != ["<unk>", "<s>", "</s>"]:
        raise UserError(f"{path} is not a translation model's, which begins with <unk>, <s> and </s>: use its own")
    is_mbart = kind == "mbart"
    for languages in (MBART_LANGUAGES, MBART_LANGUAGES + MBART50_LANGUAGES) if is_mbart else (NLLB_LANGUAGES,):
        tokens = [*SPECIAL_SYMBOLS, *pieces[3:], *languages, "<mask>"]
        if len(tokens) == rows or (not is_mbart and len(tokens) < rows):
            return {token: number for number, token in enumerate(tokens)}
    known = "neither mBART's nor mBART-50's number" if is_mbart else "not enough for the languages of NLLB"
    raise UserError(
        f"{path} has {len(pieces):,} pieces and the model {rows:,} tokens, which is {known}: put the model's "
        "tokenizer.json there"
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
