"""Stage 1: pairs of (description, synopsis) from Debian's package indexes, split by family.

Usage: pairs.py OUT INDEX [MORE...], where INDEX and MORE are Translation-en files as plain text. Writes
OUT/{train,valid,test}.{source,target}, one text a line. INDEX alone is split; Debian 12's gives the very test
set that lies in demo/. OUT/more.* is the training set with what MORE, the indexes of other releases, and shorter
descriptions add to it, and has nothing to do with the texts held out.
"""

import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TEST_FAMILIES = 1000
VALID_FAMILIES = 600
TRAIN_PAIRS_PER_FAMILY = 6  # so that no large family of packages dominates training
SPLIT_WORDS = 25, 220  # of a description that is split: fewest, most
TRAIN_WORDS = 15, 220  # of one that is added to training
SYNOPSIS_WORDS = 3, 14
COPIED_WORDS = 12  # in a row, shared with a text held out, make a near copy


class Pair(NamedTuple):
    package: str
    description: str
    synopsis: str

    def family(self) -> str:
        """The same for packages whose descriptions begin alike."""
        return re.sub(r"\W+", "", self.description.lower())[:40]

    def word_runs(self) -> set[tuple[str, ...]]:
        """Every stretch of COPIED_WORDS words of the description."""
        words = re.findall(r"\w+", self.description.lower())
        return set(zip(*(words[i:] for i in range(COPIED_WORDS)), strict=False))


def read_index(text: str) -> list[Pair]:
    """Every package's description, its paragraphs joined into one line, and its synopsis."""
    pairs = []
    for record in text.split("\n\n"):
        match = re.search(r"^Description-en: (.*)$((?:\n .*)*)", record, re.MULTILINE)
        package = re.search(r"^Package: (\S+)$", record, re.MULTILINE)
        if match and package:
            # A line with nothing but a full stop separates paragraphs.
            lines = (line for line in match[2].split("\n") if line.strip() != ".")
            description = " ".join(" ".join(lines).split())
            pairs.append(Pair(package[1], description, match[1].strip()))
    return pairs


def has_words(text: str, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= len(text.split()) <= bounds[1]


def keep_usable(pairs: Iterable[Pair], description_words: tuple[int, int] = SPLIT_WORDS) -> list[Pair]:
    """Pairs of a length worth learning from; of those with the same synopsis, the first."""
    first_of_synopsis: dict[str, Pair] = {}
    for pair in pairs:
        if has_words(pair.description, description_words) and has_words(pair.synopsis, SYNOPSIS_WORDS):
            first_of_synopsis.setdefault(pair.synopsis, pair)
    return list(first_of_synopsis.values())


def split_by_family(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Split so that packages whose descriptions begin alike, a family, stay on one side.

    Otherwise the test set would be full of near copies of training texts. A family gives one pair
    to the test or validation set, or several to training.
    """
    families = defaultdict(list)
    for pair in pairs:
        families[pair.family()].append(pair)
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


def new_pairs(more: Iterable[Pair], splits: dict[str, list[Pair]]) -> Iterator[Pair]:
    """Of other releases and of shorter descriptions: what training lacks and what is not held out.

    Held out are the packages of the test and validation sets in any release, their families, their
    synopses, and every near copy of their descriptions.
    """
    held_out = splits["test"] + splits["valid"]
    packages = {pair.package for pair in held_out}
    families = {pair.family() for pair in held_out}
    word_runs = set().union(*(pair.word_runs() for pair in held_out))
    synopses = {pair.synopsis for split in splits.values() for pair in split}
    family_sizes = Counter(pair.family() for pair in splits["train"])
    for pair in keep_usable((pair for pair in more if pair.synopsis not in synopses), TRAIN_WORDS):
        family = pair.family()
        is_held_out = pair.package in packages or family in families or not word_runs.isdisjoint(pair.word_runs())
        if not is_held_out and family_sizes[family] < TRAIN_PAIRS_PER_FAMILY:
            family_sizes[family] += 1
            yield pair


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(out: str, index: str, *more: str) -> None:
    releases = [read_index(Path(name).read_text(encoding="utf-8")) for name in (index, *more)]
    usable = keep_usable(releases[0])
    print(f"{len(releases[0]):,} packages, {len(usable):,} usable pairs")
    splits = split_by_family(usable)
    added = list(new_pairs((pair for release in releases for pair in release), splits))
    splits["more"] = splits["train"] + added
    random.Random(2).shuffle(splits["more"])
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        print(f"  {name}: {len(split):,} pairs")
        write_lines(Path(out, f"{name}.source"), [pair.description for pair in split])
        write_lines(Path(out, f"{name}.target"), [pair.synopsis for pair in split])


if __name__ == "__main__":
    main(*sys.argv[1:])
