"""Stage 1: pairs of (description, synopsis) from Debian's package index, split by family.

Usage: pairs.py INDEX OUT, where INDEX is a Translation-en file as plain text. Writes
OUT/{train,valid,test}.{source,target}, one text a line. Debian 12's index gives the very test set
that lies in demo/.
"""

import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TEST_FAMILIES = 1000
VALID_FAMILIES = 600
TRAIN_PAIRS_PER_FAMILY = 6  # so that no large family of packages dominates training


class Pair(NamedTuple):
    description: str
    synopsis: str


def read_index(text: str) -> list[Pair]:
    """Every package's description, its paragraphs joined into one line, and its synopsis."""
    pairs = []
    for record in text.split("\n\n"):
        match = re.search(r"^Description-en: (.*)$((?:\n .*)*)", record, re.MULTILINE)
        if match and re.search(r"^Package: \S+$", record, re.MULTILINE):
            # A line with nothing but a full stop separates paragraphs.
            lines = (line for line in match[2].split("\n") if line.strip() != ".")
            description = " ".join(" ".join(lines).split())
            pairs.append(Pair(description, match[1].strip()))
    return pairs


def keep_usable(pairs: list[Pair]) -> list[Pair]:
    """Pairs of a length worth learning from; of those with the same synopsis, the first."""
    first_of_synopsis: dict[str, Pair] = {}
    for pair in pairs:
        if 25 <= len(pair.description.split()) <= 220 and 3 <= len(pair.synopsis.split()) <= 14:
            first_of_synopsis.setdefault(pair.synopsis, pair)
    return list(first_of_synopsis.values())


def split_by_family(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Split so that packages whose descriptions begin alike, a family, stay on one side.

    Otherwise the test set would be full of near copies of training texts. A family gives one pair
    to the test or validation set, or several to training.
    """
    families = defaultdict(list)
    for pair in pairs:
        families[re.sub(r"\W+", "", pair.description.lower())[:40]].append(pair)
    order = sorted(families)
    random.Random(1).shuffle(order)

    ends = TEST_FAMILIES, TEST_FAMILIES + VALID_FAMILIES
    splits = {
        "test": [families[name][0] for name in order[: ends[0]]],
        "valid": [families[name][0] for name in order[ends[0] : ends[1]]],
        "train": [
            pair for name in order[ends[1] :] for pair in families[name][:TRAIN_PAIRS_PER_FAMILY]
        ],
    }
    for split in splits.values():
        random.Random(2).shuffle(split)
    return splits


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(index: str, out: str) -> None:
    records = read_index(Path(index).read_text(encoding="utf-8"))
    usable = keep_usable(records)
    print(f"{len(records):,} packages, {len(usable):,} usable pairs")
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, split in split_by_family(usable).items():
        print(f"  {name}: {len(split):,} pairs")
        write_lines(Path(out, f"{name}.source"), [pair.description for pair in split])
        write_lines(Path(out, f"{name}.target"), [pair.synopsis for pair in split])


if __name__ == "__main__":
    main(*sys.argv[1:])
