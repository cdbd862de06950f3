"""Show versions, the machine and its kernels, and problems with their remedies.

    fairseq-el info
    fairseq-el info --model bart.large.cnn
    fairseq-el info --device cuda

Prints versions, the CPU and its features, threads and memory, whether the kernels are compiled and pass their check,
and measured peaks. With --model also the precision of the weights and the form of attention that would be chosen. With
--device cuda also, in about a minute, whether the GPU computes what the CPU does, and how fast: a text to report.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder with model.pt, a checkpoint, or demo (default: none)")
    add("--device", choices=("cuda",), help="check this device too (default: none)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
