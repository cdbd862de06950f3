"""Runs `fairseq-generate`, and makes texts of what it prints."""

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from fairseq_el.cli.evaluate.data import Data
from fairseq_el.cli.evaluate.variant import Variant
from fairseq_el.cli.fairseq_command import fairseq
from fairseq_el.errors import UserError
from fairseq_el.jobs.model_files import ModelFiles
from fairseq_el.jobs.results import as_summary
from fairseq_el.text.sentences import one_line
from fairseq_el.text.tokenizer import Tokenizer

BAR = "{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


@dataclass
class Output:
    """What `fairseq-generate` printed, in pieces with spaces between them, by sentence."""

    sources: dict[int, str] = field(default_factory=dict)
    targets: dict[int, str] = field(default_factory=dict)
    hypotheses: dict[int, str] = field(default_factory=dict)
    sentences_per_second: float = 0.0
    peak_bytes: int = 0

    def read(self, line: str) -> bool:
        """True if the line was a hypothesis."""
        if match := re.match(r"S-(\d+)\t(.*)", line):
            self.sources[int(match[1])] = match[2]
        elif match := re.match(r"T-(\d+)\t(.*)", line):
            self.targets[int(match[1])] = match[2]
        elif match := re.match(r"H-(\d+)\t\S+\t(.*)", line):
            self.hypotheses[int(match[1])] = match[2]
            return True
        elif match := re.search(r"Translated .* \(([\d.]+) sentences/s", line):
            self.sentences_per_second = float(match[1])
        elif match := re.match(r"(?:stock|fairseq_el) \| peak source state: (\d+) bytes", line):
            self.peak_bytes = int(match[1])
        return False


def generate(
    args: argparse.Namespace, variant: Variant, files: ModelFiles, data: Data, log: Path, title: str = ""
) -> Output:
    output = Output()
    with tqdm(total=data.sentences, desc=title, bar_format=BAR, mininterval=0.5) as bar:
        bar.set_postfix_str("loading")

        def on_line(line: str) -> None:
            if output.read(line):
                bar.set_postfix_str("", refresh=False)
                bar.update()

        fairseq(
            ["fairseq-generate", data.folder.resolve(), "--path", files.checkpoint.resolve(),
             "--gen-subset", data.subset, "--no-progress-bar", *variant.arguments(args)],
            log=log,
            on_line=on_line,
        )  # fmt: skip
    if len(output.hypotheses) != data.sentences or not output.sentences_per_second or not output.peak_bytes:
        raise UserError(
            f"fairseq-generate left out {data.sentences - len(output.hypotheses):,} of {data.sentences:,} "
            f"sentences, its speed or its peak of memory: see {log}"
        )
    return output


# ---- texts, in the order of the data


def summaries_of(output: Output, variant: Variant, vocabulary: Tokenizer) -> list[str]:
    summaries = []
    for i in range(len(output.hypotheses)):
        # the hypotheses of a language model begin with the prompt
        prompt = len(output.sources[i].split()) if variant.is_language_model else 0
        pieces = output.hypotheses[i].split()[prompt:]
        summaries.append(as_summary(vocabulary.decode(pieces), variant.preset))
    return summaries


def references_of(output: Output, data: Data, vocabulary: Tokenizer) -> list[str]:
    return data.references or texts_of(output.targets, vocabulary)


def texts_of(pieces: dict[int, str], vocabulary: Tokenizer) -> list[str]:
    return [one_line(vocabulary.decode(pieces[i].split())) for i in range(len(pieces))]
