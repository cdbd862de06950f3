"""Convert checkpoints from and to Hugging Face's format.

From a Hugging Face folder with GPT-2 or BART to a fairseq checkpoint, or BART back.

    fairseq-el convert HUGGING_FACE_FOLDER OUTPUT
    fairseq-el convert --reverse FAIRSEQ_FOLDER_OR_CHECKPOINT OUTPUT

The first reads config.json, model.safetensors (in one file or several) or pytorch_model.bin, and vocab.json with
merges.txt or tokenizer.json. It writes model.pt, dict.txt, and GPT-2's encoder.json and vocab.bpe. The second needs
those four files, and writes what BartForConditionalGeneration and BartTokenizer of Transformers load. Nothing is
downloaded.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, help="folder to read, or with --reverse a checkpoint")
    add("output", type=Path, help="folder to write to")
    add("--precision", choices=("fp16", "fp32"), help="of the weights (default: as they are stored)")
    add("--reverse", action="store_true", help="from a fairseq BART (its checkpoint, or a folder with model.pt) to a "
        "Hugging Face folder")  # fmt: skip
