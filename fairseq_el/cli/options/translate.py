"""Translate texts: one per line, or JSON lines.

    fairseq-el translate --model m2m100_418M --source-lang en --target-lang de --input en.txt --output de.txt
    fairseq-el translate --model nllb-200-distilled-600M -s eng_Latn -t swh_Latn --input in.jsonl --output out.jsonl

The model is a folder of Hugging Face (M2M-100, NLLB, mBART-50, mBART) or of fairseq, such as the releases of M2M-100
and mBART-50, or a model for one pair of languages, which then need not be named. Languages have the codes of the model;
short ones such as en do where they are unambiguous (en_XX, eng_Latn). The default preset is translation.

A .jsonl file has one object per line, such as {"id": 7, "text": "..."}; the output has the same objects with
"translation" and its "score" added. Everything else is as in fairseq-el summarize: blank texts keep their position,
interrupted runs continue with --resume, --shard and --engine ray share the work, and all generation options of
fairseq-generate are accepted: --beam 2, --lenpen 1.5.
"""

import argparse

from fairseq_el.cli.options import summarize
from fairseq_el.cli.options.parser import Parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    summarize.add_arguments(parser, "translation", "translations")
    add = parser.add_argument
    add("-s", "--source-lang", metavar="CODE", help="of the texts: a code of the model, or a short one such as en "
        "(default: the model's, if it is for one)")  # fmt: skip
    add("-t", "--target-lang", metavar="CODE", help="to translate into (default: the model's, if it is for one)")


def check(parser: Parser, args: argparse.Namespace, words: list[str]) -> None:
    summarize.check(parser, args, words)
    args.preset = args.preset or "translation"
    named = {"source_lang": args.source_lang, "target_lang": args.target_lang}
    args.changes |= {name: code for name, code in named.items() if code is not None}
