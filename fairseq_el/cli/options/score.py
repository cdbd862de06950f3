"""Score summaries or questions with ROUGE and BLEU.

    fairseq-el score test.hypo test.target                          ROUGE-1, ROUGE-2, ROUGE-L
    fairseq-el score test.hypo test.references --rouge-lsum         ROUGE-Lsum, for CNN/DailyMail
    fairseq-el score test.hypo test.target --bleu                   sacrebleu's BLEU too, for questions

Both files have one text per line. ROUGE-Lsum splits a text into sentences at <n>, and texts without <n> by rule.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("hypotheses", type=Path, metavar="HYP", help="file of generated texts")
    add("references", type=Path, metavar="REF", help="file of references")
    add("--rouge-lsum", action="store_true", help="ROUGE-Lsum instead of ROUGE-L")
    add("--rouge-bootstrap", action="store_true", help="add 95%% confidence intervals to ROUGE")
    add("--bleu", action="store_true", help="also BLEU")
