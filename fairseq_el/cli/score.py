"""Score a file of summaries or questions against a file of references, as `--scoring rouge` does.

    python scripts/score.py test.hypo test.target                    ROUGE-1, ROUGE-2, ROUGE-L
    python scripts/score.py test.hypo test.references --lsum         ROUGE-Lsum, for CNN/DailyMail
    python scripts/score.py test.hypo test.target --bleu             sacrebleu's BLEU too, for questions

Both files hold one text a line. Where a line has several sentences, `<n>` between them says where ROUGE-Lsum
is to part them; lines without are split by rule.
"""

import argparse
import sys
from pathlib import Path

from fairseq_el.errors import UserError, explain
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hypotheses", type=Path, metavar="HYP")
    parser.add_argument("references", type=Path, metavar="REF")
    parser.add_argument("--lsum", action="store_true", help="ROUGE-Lsum instead of ROUGE-L")
    parser.add_argument("--bootstrap", action="store_true", help="add 95%% confidence intervals to ROUGE")
    parser.add_argument("--bleu", action="store_true", help="also BLEU")
    args = parser.parse_args()
    try:
        hypotheses, references = read_texts(args.hypotheses), read_texts(args.references)
        scores = rouge.rouge(references, hypotheses, args.lsum)
    except (UserError, OSError) as error:
        sys.exit(f"score: error: {explain(error) or error}")
    print(f"{len(references):,} pairs: {rouge.describe(scores, args.bootstrap)}")
    if args.bleu:
        print(bleu(references, hypotheses))


if __name__ == "__main__":
    main()
