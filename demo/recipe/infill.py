"""Stage 3: the easier task that training begins with.

Usage: infill.py PIECES OUT. For each training pair, OUT/train.* holds the pair itself with its
source cut short, and two segments of its source with spans replaced by <mask>, to be restored, as
BART is pre-trained. OUT/valid.* holds the validation pairs with their sources cut short.
"""

import random
import sys
from pathlib import Path

SHORT_SOURCE = 56  # pieces
SEGMENTS_PER_SOURCE = 2
SEGMENT_PIECES = 8, 24  # shortest, longest
MASKED_SHARE = 0.25
MEAN_SPAN = 2.5  # pieces behind one <mask>

Pieces = list[str]


def read(path: Path) -> list[Pieces]:
    with path.open(encoding="utf-8") as lines:
        return [line.split() for line in lines]


def write(path: Path, texts: list[Pieces]) -> None:
    path.write_text("".join(" ".join(pieces) + "\n" for pieces in texts), encoding="utf-8")


def cut_segment(source: Pieces, rng: random.Random) -> Pieces:
    """A stretch of the source, of random length, which begins with a word where there is one."""
    length = rng.randint(*SEGMENT_PIECES)
    if len(source) <= length:
        return source
    word_starts = [i for i, piece in enumerate(source[:-length]) if piece.startswith("▁")]
    start = rng.choice(word_starts or [0])
    return source[start : start + length]


def mask_spans(segment: Pieces, rng: random.Random) -> Pieces:
    """Replace spans, about a quarter of all pieces, by one <mask> each."""
    to_mask = round(len(segment) * MASKED_SHARE)
    masked = []
    position = 0
    while position < len(segment):
        if to_mask > 0 and rng.random() < MASKED_SHARE / MEAN_SPAN:
            span = max(1, int(rng.expovariate(1 / MEAN_SPAN)))
            span = min(span, to_mask, len(segment) - position)
            masked.append("<mask>")
            to_mask -= span
            position += span
        else:
            masked.append(segment[position])
            position += 1
    return masked


def main(pieces: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(3)
    mixed = []
    sources, targets = read(pieces / "train.source"), read(pieces / "train.target")
    for source, target in zip(sources, targets, strict=True):
        mixed.append((source[:SHORT_SOURCE], target))
        for _ in range(SEGMENTS_PER_SOURCE):
            segment = cut_segment(source, rng)
            mixed.append((mask_spans(segment, rng), segment))
    rng.shuffle(mixed)
    write(out / "train.source", [source for source, _ in mixed])
    write(out / "train.target", [target for _, target in mixed])
    write(out / "valid.source", [source[:SHORT_SOURCE] for source in read(pieces / "valid.source")])
    write(out / "valid.target", read(pieces / "valid.target"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
