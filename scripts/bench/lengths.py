"""How long real sources and outputs are, so that batches of random words are as long as batches of real ones.

`lengths.json` counts texts by their length in GPT-2's BPE tokens, opening and closing token included, sources cut
at 1,024: 128 articles of CNN/DailyMail and what BART-large fine-tuned on it wrote for them (beam 4), 239 articles
of XSum and 256 of its reference summaries. Of SQuAD 1.1 the paper gives means.
"""

import functools
import json
from pathlib import Path
from statistics import fmean

COUNTS = Path(__file__).with_name("lengths.json")
SQUAD_SOURCE, SQUAD_OUTPUT = 149.4, 11.5


@functools.cache
def all_lengths(name: str, cut: int | None = None) -> tuple[int, ...]:
    """In ascending order; longer ones are cut to `cut` tokens."""
    counts = json.loads(COUNTS.read_text())[name]
    lengths = sorted(int(length) for length, texts in counts.items() for _ in range(texts))
    return tuple(min(length, cut) if cut else length for length in lengths)


def mean(name: str, cut: int | None = None) -> float:
    return fmean(all_lengths(name, cut))


def middle_batch(name: str, sentences: int) -> tuple[int, ...]:
    """The batch of average length when texts are sorted by length before they are put into batches, as fairseq does:
    so many neighbours in that order whose mean is nearest to the mean of all."""
    lengths, wanted = all_lengths(name), mean(name)
    batches = [lengths[start : start + sentences] for start in range(len(lengths) - sentences + 1)]
    return min(batches, key=lambda batch: abs(fmean(batch) - wanted))


def near(average: float, sentences: int) -> tuple[int, ...]:
    """So many whole numbers as near to an average as their sum can be."""
    total = round(average * sentences)
    small, larger = divmod(total, sentences)
    return tuple(small + (index < larger) for index in range(sentences))
