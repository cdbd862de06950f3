"""Languages of a multilingual model: their symbols in its dictionary, and the codes that users give for them."""

from collections.abc import Iterable

from fairseq.data import Dictionary

from fairseq_el.checkpoints.huggingface.vocabularies import code_of
from fairseq_el.errors import UserError

ANY_REGION = "xx"  # in codes of mBART
# Two letters, and the three that NLLB has for the same language.
THREE_LETTERS = dict(
    pair.split(":")
    for pair in """
    af:afr am:amh ar:arb as:asm az:azj ba:bak be:bel bg:bul bm:bam bn:ben bo:bod bs:bos ca:cat cs:ces cy:cym da:dan
    de:deu dz:dzo ee:ewe el:ell en:eng eo:epo es:spa et:est eu:eus fa:pes ff:fuv fi:fin fj:fij fo:fao fr:fra ga:gle
    gd:gla gl:glg gn:grn gu:guj ha:hau he:heb hi:hin hr:hrv ht:hat hu:hun hy:hye id:ind ig:ibo is:isl it:ita ja:jpn
    jv:jav ka:kat kg:kon ki:kik kk:kaz km:khm kn:kan ko:kor ks:kas ku:kmr ky:kir lb:ltz lg:lug li:lim ln:lin lo:lao
    lt:lit lv:lvs mg:plt mi:mri mk:mkd ml:mal mn:khk mr:mar ms:zsm mt:mlt my:mya nb:nob ne:npi nl:nld nn:nno no:nob
    ns:nso ny:nya oc:oci om:gaz or:ory pa:pan pl:pol ps:pbt pt:por qu:quy rn:run ro:ron ru:rus rw:kin sa:san sc:srd
    sd:snd sg:sag si:sin sk:slk sl:slv sm:smo sn:sna so:som sq:als sr:srp ss:ssw st:sot su:sun sv:swe sw:swh ta:tam
    te:tel tg:tgk th:tha ti:tir tk:tuk tl:tgl tn:tsn tr:tur ts:tso tt:tat tw:twi ug:uig uk:ukr ur:urd uz:uzn vi:vie
    wo:wol xh:xho yi:ydd yo:yor zh:zho zu:zul
    """.split()
)


def symbols_of(dictionary: Dictionary) -> dict[str, str]:
    """The symbol of each language by its code."""
    return {code: symbol for symbol in dictionary.symbols if (code := code_of(symbol))}


def resolve(code: str, known: Iterable[str], option: str) -> str:
    """The code of the model for a language that a user names: `en` is also `en_XX` or `eng_Latn`.

    known: codes of the model; option: for messages, `source_lang` or `target_lang`.
    """
    known = list(known)
    if code in known:
        return code
    found = [other for other in known if fits(code, other)]
    if len(found) == 1:
        return found[0]
    problem = f"has {'several languages' if found else 'no language'} {code!r}" if code else "is for several languages"
    listed = ", ".join(found or known)
    raise UserError(f"the model {problem}: name one with {option} (--{option.replace('_', '-')}), one of {listed}")


def fits(wanted: str, code: str) -> bool:
    """True for codes of one language; a region or script counts where both codes have one of the same kind."""
    (one, one_part), (other, other_part) = map(parts, (wanted, code))
    comparable = len(one_part) == len(other_part) and ANY_REGION not in (one_part, other_part)
    return one == other and not (comparable and one_part != other_part)


def parts(code: str) -> tuple[str, str]:
    """Language, in three letters where there are such, and region or script."""
    language, _, part = code.lower().replace("-", "_").partition("_")
    return THREE_LETTERS.get(language, language), part
