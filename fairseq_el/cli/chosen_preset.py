"""The preset that a command line asks for."""

import argparse
import sys

import torch

from fairseq_el.checkpoints import packed_file
from fairseq_el.jobs import presets
from fairseq_el.jobs.default_preset import default_preset
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.presets import Preset
from fairseq_el.plugin.options import describe_rounding


def load_preset(args: argparse.Namespace, files: ModelFiles) -> Preset:
    """Prints to standard error, before anything else, what a reduced precision gives up; then which preset is used if
    none was named."""
    name = args.preset or default_preset(files)
    preset = presets.load(name, args.search).changed(**args.changes)
    packed = None if files.huggingface else packed_file.precision_of(files.checkpoint)
    if (rounding := describe_rounding(packed or precision_of(preset))) and runs_on_cpu(args):
        print(f"{args.command}: {rounding}", file=sys.stderr)
    if not args.preset and name not in ("demo", "translation"):
        print(f"{args.command}: using the preset {name}; another can be named with --preset", file=sys.stderr)
    return preset


def precision_of(preset: Preset) -> str:
    return str(preset.options.get("el_precision", "auto"))


def runs_on_cpu(args: argparse.Namespace) -> bool:
    """With our kernels: a precision is of these alone."""
    return not args.stock and (args.cpu or not torch.cuda.is_available())
