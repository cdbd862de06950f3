"""Reads lines of text files, and splits English text into sentences, for ROUGE-Lsum and for `keep_sentences`."""

import re
from collections.abc import Iterator
from pathlib import Path

from fairseq_el.errors import UserError

# A stop, closing quotation marks and brackets, and the space after them. In text with spaces between all tokens, such
# as some copies of CNN/DailyMail, there is a space before the closing marks ' and ''.
STOP = re.compile(r"""(?P<stop>[.!?…]+)(?:["'”’)\]]|\s'{1,2}(?=\s))*(?P<gap>\s+)""")
OPENING = "\"'`“‘([ "
# A name or a number follows, so these never end a sentence.
TITLES = frozenset(
    "adm brig capt cmdr col cpl det dr fr ft gen gens gov govs hon insp lt maj messrs mr mrs ms mt mx no nos "
    "pres prof pvt rep reps rev sen sens sgt st supt v vs".split()
)
# These may end a sentence, and so may initials (J.), acronyms (U.S.) and hours (p.m.).
ABBREVIATIONS = frozenset(
    "al apr approx assn aug ave blvd bros cf co corp dec dept dist est etc feb fig inc jan jr jul jun ltd "
    "mar mfg nov oct ph plc rd sept sep sq sr univ".split()
)
# Words that begin a sentence but seldom a name.
OPENERS = frozenset(
    "a after all also although an and another any as at because before both but by despite during each "
    "even every few for from had has have he her here his how however i if in instead it its just last later "
    "like many meanwhile more most my no nobody none nor not now of officials on once one only or other "
    "others our over people police she since so some still such that the their then there these they this "
    "those though through to today two under until we what when where whether which while who why with yet "
    "you your".split()
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, stripped.

    A line break ends a sentence. So does a full stop, question or exclamation mark before a capital letter or a digit,
    unless it belongs to a title (Mr., Lt.). After other abbreviations, initials and acronyms the next word must be one
    that seldom begins a name (The, He, But).
    """
    sentences = []
    for line in text.splitlines():
        start = 0
        for match in STOP.finditer(line):
            if _ends_sentence(line[start : match.end("stop")], line[match.end() :]):
                sentences.append(line[start : match.start("gap")])
                start = match.end()
        sentences.append(line[start:])
    return [sentence.strip() for sentence in sentences if sentence.strip()]


def _ends_sentence(before: str, after: str) -> bool:
    following = after.lstrip(OPENING)
    if not following or not (following[0].isupper() or following[0].isdigit()):
        return False
    if not any(letter.isalpha() for letter in before):  # the number of a list item
        return False
    word = before.split()[-1].lstrip(OPENING)
    if not word.endswith(".") or word.endswith(".."):
        return True
    word = word[:-1].lower().rsplit("-", 1)[-1]
    if word in TITLES:
        # "No." abbreviates "number" only before a number.
        return word in ("no", "nos") and not following[0].isdigit()
    if word in ABBREVIATIONS or re.fullmatch(r"[a-z]|[a-z]+(\.[a-z]+)+", word):
        return re.split(r"\W", following, maxsplit=1)[0].lower() in OPENERS
    return True


def one_line(text: str) -> str:
    """The text with line breaks of any kind replaced by spaces."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file without line ends. Raises a `UserError` for a line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"line {number} of {path} is not UTF-8 (byte {error.start + 1}): convert the file, "
                    "for example with iconv -f latin1 -t utf-8"
                ) from error
