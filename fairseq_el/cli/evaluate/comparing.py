"""Prints what differs between two systems: `fairseq-el evaluate --compare`."""

import logging
import textwrap

from fairseq_el.cli.evaluate.statistics import Comparison
from fairseq_el.cli.evaluate.variant import Variant

EXAMPLES = 5
WIDTH = 110


def warn_of_ngrams(variants: list[Variant]) -> None:
    ours, options = not all(variant.stock for variant in variants), variants[0].preset.options
    if ours and any(v.stock for v in variants) and options.get("no_repeat_ngram_size"):
        if not options.get("el_stock_ngrams"):
            logging.warning(
                "stock fairseq ignores --no-repeat-ngram-size without its CUDA extension, and its summaries differ "
                "for that reason alone; with --el-stock-ngrams fairseq_el ignores it too"
            )


def print_comparison(comparison: Comparison, references: list[str]) -> None:
    print(f"\n{identical_sentence(comparison)}\n")
    print_scores(comparison)
    if differing := comparison.most_different(EXAMPLES):
        print(f"\nThe summaries that differ most, of {len(references) - comparison.identical:,} that differ:")
    for i in differing:
        print(f"\ntext {i + 1}, {comparison.pairs[i].similarity:.0%} of the words in common")
        named = {"reference": references[i]}
        for system in (comparison.first, comparison.second):
            named[f"{system.name}, ROUGE-1 {system.scores['ROUGE-1'][i]:.1f}"] = system.summaries[i]
        for name, text in named.items():
            print(textwrap.fill(f"{name}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    "))


def print_scores(comparison: Comparison) -> None:
    kinds = list(comparison.first.estimates)
    rows = [["", *kinds]]
    for system in (comparison.first, comparison.second):
        rows.append([system.name, *map(str, system.estimates.values())])
    changes = (comparison.differences.get(kind) for kind in kinds)
    rows.append(["difference", *("" if change is None else f"{change:+}" for change in changes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(map(str.ljust, cells, widths)).rstrip())
    print("In brackets: 95% intervals, from resampling the texts; of the difference, text by text.")


def identical_sentence(comparison: Comparison) -> str:
    identical, count = comparison.identical, len(comparison.pairs)
    names = f"{comparison.first.name} and {comparison.second.name}"
    return f"{names}: {identical:,} of {count:,} summaries are identical ({identical / count:.1%})."
