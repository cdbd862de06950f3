"""Lines of text files, and sentences in running English text: ROUGE-Lsum compares them one by one, and some
summaries are the first few."""

import re
from collections.abc import Iterator
from pathlib import Path

from fairseq_el.errors import UserError

# A stop, the quotation marks and brackets that close with it, and the gap behind. In text with spaces between
# all tokens, as some copies of CNN/DailyMail are, the closing marks ' and '' stand apart.
STOP = re.compile(r"""(?P<stop>[.!?…]+)(?:["'”’)\]]|\s'{1,2}(?=\s))*(?P<gap>\s+)""")
OPENING = "\"'`“‘([ "
# Followed by a name or a number, so never the end of a sentence.
TITLES = frozenset(
    "adm brig capt cmdr col cpl det dr fr ft gen gens gov govs hon insp lt maj messrs mr mrs ms mt mx no nos "
    "pres prof pvt rep reps rev sen sens sgt st supt v vs".split()
)
# These may end a sentence, and so may initials (J.), acronyms (U.S.) and hours (p.m.).
ABBREVIATIONS = frozenset(
    "al apr approx assn aug ave blvd bros cf co corp dec dept dist est etc feb fig inc jan jr jul jun ltd "
    "mar mfg nov oct ph plc rd sept sep sq sr univ".split()
)
# Words that tell a new sentence from a name after one of those.
OPENERS = frozenset(
    "a after all also although an and another any as at because before both but by despite during each "
    "even every few for from had has have he her here his how however i if in instead it its just last later "
    "like many meanwhile more most my no nobody none nor not now of officials on once one only or other "
    "others our over people police she since so some still such that the their then there these they this "
    "those though through to today two under until we what when where whether which while who why with yet "
    "you your".split()
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line, without space around them.

    A line break ends a sentence. Otherwise a sentence ends with a full stop, question or exclamation mark, if
    a capital letter or a digit follows and what the mark belongs to is not a title (Mr., Lt.); after other
    abbreviations, initials and acronyms only before a word that seldom is part of a name (The, He, But).
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
    if not any(letter.isalpha() for letter in before):  # the number of an item in a list
        return False
    word = before.split()[-1].lstrip(OPENING)
    if not word.endswith(".") or word.endswith(".."):
        return True
    word = word[:-1].lower().rsplit("-", 1)[-1]
    if word in TITLES:
        # "No." is also a word of its own; it abbreviates "number" where a number follows.
        return word in ("no", "nos") and not following[0].isdigit()
    if word in ABBREVIATIONS or re.fullmatch(r"[a-z]|[a-z]+(\.[a-z]+)+", word):
        return re.split(r"\W", following, maxsplit=1)[0].lower() in OPENERS
    return True


def one_line(text: str) -> str:
    """Line breaks of any kind become spaces: a carriage return in an article would make two lines of it."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file without their ends. A line that is not UTF-8 is named in a `UserError`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"line {number} of {path} is not UTF-8 (byte {error.start + 1}): convert the file, "
                    "for example with iconv -f latin1 -t utf-8"
                ) from error
