"""Convert checkpoints from and to Hugging Face's format.

From a Hugging Face folder with GPT-2, BART, mBART, M2M-100 or NLLB to a fairseq checkpoint, or BART back.

    fairseq-el convert HUGGING_FACE_FOLDER OUTPUT
    fairseq-el convert --reverse FAIRSEQ_FOLDER_OR_CHECKPOINT OUTPUT

Or pack the weights of any model, as `summarize` would when it loads it:

    fairseq-el convert --precision int8 MODEL OUTPUT

The first reads config.json, model.safetensors (in one file or several) or pytorch_model.bin, and vocab.json with
merges.txt, sentencepiece.bpe.model or tokenizer.json. It writes model.pt, dict.txt, and GPT-2's encoder.json and
vocab.bpe, or SentencePiece's model. The second needs model.pt, dict.txt, encoder.json and vocab.bpe, and writes what
BartForConditionalGeneration and BartTokenizer of Transformers load. Nothing is downloaded.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, help="folder to read, or with --reverse a checkpoint")
    add("output", type=Path, help="folder to write to")
    add("--precision", choices=("fp16", "fp32", "bf16", "int8"), help="of the weights (default: as they are stored; "
        "with --packed what is exact). bf16 and int8 are --packed")  # fmt: skip
    add("--packed", action="store_true", help="from any model to a packed folder, which loads faster, for CPUs")
    add("--bpe-dir", metavar="FOLDER", help="with --packed: the tokenizer's files (default: the model's folder)")
    add("--reverse", action="store_true", help="from a fairseq BART (its checkpoint, or a folder with model.pt) to a "
        "Hugging Face folder")  # fmt: skip
