"""Scores a file of summaries or questions against a file of references: `fairseq-el score`."""

import argparse
from pathlib import Path

from fairseq_el.text import rouge
from fairseq_el.text.sentences import read_lines

SENTENCE_MARK = "<n>"


def read_texts(path: Path) -> list[str]:
    return [mark_to_line(line) for line in read_lines(path)]


def mark_to_line(line: str) -> str:
    return "\n".join(part.strip() for part in line.split(SENTENCE_MARK))


def bleu(references: list[str], hypotheses: list[str]) -> str:
    import sacrebleu

    one_line = [[" ".join(text.split()) for text in texts] for texts in (hypotheses, references)]
    return sacrebleu.corpus_bleu(one_line[0], [one_line[1]]).format()


def main(args: argparse.Namespace) -> None:
    """args: of `options.score`."""
    hypotheses, references = read_texts(args.hypotheses), read_texts(args.references)
    scores = rouge.rouge(references, hypotheses, args.rouge_lsum)
    print(f"{len(references):,} pairs: {rouge.describe(scores, args.rouge_bootstrap)}")
    if args.bleu:
        print(bleu(references, hypotheses))
