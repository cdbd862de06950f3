"""Make fairseq's data from CNN/DailyMail, XSum or SQuAD 1.1.

It has the dictionary and the encoding of stock BART.

    fairseq-el prepare cnndm --input cnn_dailymail/3.0.0 --output cnndm --bpe-dir gpt2_bpe
    fairseq-el evaluate --preset cnndm --model bart.large.cnn --data cnndm/bin

The input is a folder with the files of the data set at Hugging Face (parquet, arrow or JSON lines), or with text files
such as test.source and test.target, one text per line. Nothing is downloaded. The output folder gets

    test.source, test.target    the text, one pair per line, without pairs of which one side is empty
    test.references             for CNN/DailyMail, the target with <n> between its sentences (score --rouge-lsum)
    bpe/                        the text in GPT-2's encoding
    bin/                        the same for fairseq-train and fairseq-generate
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    splits = ("train", "valid", "test")
    add("dataset", choices=("cnndm", "xsum", "squad"), help="which data set")
    add("--input", type=Path, required=True, metavar="DIR", help="folder with the data set")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    add("--bpe-dir", type=Path, default=Path("gpt2_bpe"), metavar="DIR", help="folder with encoder.json, vocab.bpe and "
        "dict.txt (default: gpt2_bpe)")  # fmt: skip
    add("--splits", nargs="+", choices=splits, default=list(splits), help="only these (default: all that exist)")
