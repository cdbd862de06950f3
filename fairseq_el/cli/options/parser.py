"""The parser of all commands, and the options that several commands share."""

import argparse
from typing import NoReturn

from fairseq_el.errors import UserError
from fairseq_el.resources import resource

PRECISIONS = ("auto", "fp32", "fp16", "bf16", "int8")
"""As in kernels.packing, which takes seconds to import."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[-1]}: error: {message} ({self.prog} --help lists the options)\n")


def add_preset_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and which preset for it."""
    add = parser.add_argument
    presets = ", ".join(sorted(path.stem for path in resource("configs").glob("*.yaml")))
    add("--model", required=True, metavar="DIR", help="folder with model.pt, its dictionary and its encoding; or demo, "
        "the model that comes with the package")  # fmt: skip
    add("--bpe-dir", metavar="DIR", help="folder with encoder.json and vocab.bpe, or with sentencepiece.model "
        "(default: the folder of the model)")  # fmt: skip
    add("--preset", help=f"{presets}, or a YAML file like those in configs/ (default: demo for the demo model, "
        "gpt2_cnndm for language models, translation for models with many languages, xsum or cnndm if the name of the "
        "model says so, else plain)")  # fmt: skip
    add("--search", default="beam", metavar="NAME", help="beam, diverse, greedy, or another of the preset's (default: "
        "beam)")  # fmt: skip


def add_attention_argument(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    group.add_argument("--el-attention", choices=("auto", "always", "never"), help="EL-attention always, never, or "
        "where it is faster on this machine (default: that of the preset, else auto)")  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, with which settings."""
    add_preset_arguments(parser)
    add = parser.add_argument
    add("--fp16", action="store_true", help="weights in half precision (default: as in the checkpoint)")
    add("--precision", choices=PRECISIONS, help="on a CPU: auto, fp32 and fp16 are of the weights, auto is exact; bf16 "
        "and int8 are faster, but not exact (default: that of the preset, else auto)")  # fmt: skip
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    add("--seed", type=int, default=1, metavar="N", help="for sampling (default: 1)")
    attention = parser.add_mutually_exclusive_group()
    add_attention_argument(attention)
    attention.add_argument("--stock", action="store_true", help="fairseq's own attention and generator")


def preset_changes(args: argparse.Namespace, words: list[str]) -> dict[str, str]:
    """Options of the preset that the command line changes. `words` are those that the parser does not know."""
    named = ("max_tokens", "el_memory_budget", "el_attention")
    changes = {name: value for name in named if (value := getattr(args, name, None)) is not None}
    if args.precision is not None:
        changes["el_precision"] = args.precision
    return changes | further_options(words)


def further_options(words: list[str]) -> dict[str, str]:
    """`--beam 2 --lenpen=1.5 --el-stock-ngrams` by the names in presets; an option without a value is true."""
    options = {}
    while words:
        word, *words = words
        if not word.startswith("--"):
            raise UserError(f"{word!r} is not an option: options begin with --, the input is given with --input")
        name, has_value, value = word[2:].partition("=")
        if not has_value:
            value, words = (words[0], words[1:]) if words and not words[0].startswith("--") else ("true", words)
        options[name.replace("-", "_")] = value
    return options
