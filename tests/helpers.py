"""What several tests use: the demo set, systems to compare, the command in this process, small models, tables."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from omegaconf import OmegaConf

from fairseq_el.cli.main import main
from fairseq_el.jobs.summarizer import Summarizer
from make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
LONGEST_SOURCE = 190  # pieces, in configs/demo.yaml
TEXTS = (DEMO / "test.source").read_text(encoding="utf-8").splitlines()[:24]
REFERENCES = (DEMO / "test.target").read_text(encoding="utf-8").splitlines()[:24]
GREEDY = ["--model", DEMO, "--preset", "demo", "--search", "greedy"]
ARTICLES = ["The cat sat there.\nIt slept.", "Rain in the afternoon.", "another text " * 60]


# ---- systems


def run_command(*words, cwd=ROOT, **options) -> subprocess.CompletedProcess:
    """A command line of fairseq's, or of this project's scripts, as a user types it."""
    command = [str(word) for word in words]
    if command[0].startswith("fairseq-"):
        command[0] = str(Path(sys.executable).with_name(command[0]))
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, **options)


class System:
    """A task with models loaded by it: stock fairseq's or ours."""

    def __init__(self, task_class, config_class, data: Path, paths, **options):
        config = config_class(
            data=str(data), source_lang="source", target_lang="target", train_subset="train",
            dataset_impl=None, required_seq_len_multiple=1, **options,
        )  # fmt: skip
        self.task = task_class.setup_task(OmegaConf.structured(config))
        self.models, _ = checkpoint_utils.load_model_ensemble([str(p) for p in paths], task=self.task)
        for model in self.models:
            model.float()

    def batches(self, batch_size: int = 32):
        if "test" not in self.task.datasets:
            self.task.load_dataset("test")
        return self.task.get_batch_iterator(
            self.task.dataset("test"), max_sentences=batch_size, max_positions=(512, 128),
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)  # fmt: skip

    def generate(
        self, batch_size: int = 32, seed: int = 1, longest: int = 512, inference=None, **search
    ) -> list[list[dict]]:
        """Hypotheses of the whole set (less sources over `longest` tokens) in its order.

        `search` is what a command line would say.
        """
        search = {"max_len_b": 30, **search}
        extra = {k: search.pop(k) for k in ("lm_model", "lm_weight") if k in search}
        generator = self.task.build_generator(
            self.models, argparse.Namespace(**search), extra_gen_cls_kwargs=extra
        )
        torch.manual_seed(seed)
        found = {}
        for sample in self.batches(batch_size):
            if sample["net_input"]["src_tokens"].size(1) > longest:
                continue
            ids = sample["id"].tolist()
            if search.get("diverse_beam_groups", 0) > 0:
                # stock fairseq looks up batch rows by sentence id here, and fails; rows it can count itself
                sample["id"] = None
            arguments = inference(sample) if inference else {}
            hypotheses = self.task.inference_step(generator, self.models, sample, **arguments)
            found.update(zip(ids, hypotheses))
        self.generator = generator
        return [found[i] for i in sorted(found)]


def assert_same_hypotheses(ours, theirs, tolerance: float = 1e-4) -> None:
    """Token for token, in the same order of merit, scores within the tolerance."""
    assert len(ours) == len(theirs) > 0
    for number, (mine, other) in enumerate(zip(ours, theirs)):
        assert [h["tokens"].tolist() for h in mine] == [h["tokens"].tolist() for h in other], number
        for h, g in zip(mine, other):
            for scores in ("score", "positional_scores"):
                torch.testing.assert_close(h[scores], g[scores], atol=tolerance, rtol=0, equal_nan=True)


# ---- jobs


def job(folder: Path, texts, *options) -> list:
    """A command that summarises texts from `in` to `out`."""
    return [*GREEDY, "--input", write_lines(folder / "in", texts), "--output", folder / "out", *options]


def write_lines(path: Path, lines) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


LOAD, LOADED = Summarizer.load, {}


def load_once(*model_and_preset, **options):
    """Loading takes longer than most of these tests."""
    key = f"{model_and_preset} {options}"
    if key not in LOADED:
        LOADED[key] = LOAD(*model_and_preset, **options)
    return LOADED[key]


def exit_of(script, words, monkeypatch):
    """How a subcommand or a script ends in this process: None, or what it gives to `sys.exit`."""
    package, _, name = script.__name__.rpartition(".")
    words = [str(word) for word in words]
    monkeypatch.setattr(sys, "argv", [name, *words])
    try:
        if package == "fairseq_el.cli":
            main([name, *words])
        else:
            script.main()
    except SystemExit as end:
        return end.code


def interrupted_after(batches: int, monkeypatch):
    """Has `Summarizer` raise KeyboardInterrupt at a batch."""
    calls = []
    generate = Summarizer.generate

    def stopping(self, sources, nbest):
        calls.append(sources)
        if len(calls) > batches:
            raise KeyboardInterrupt
        return generate(self, sources, nbest)

    monkeypatch.setattr(Summarizer, "generate", stopping)


# ---- small models


def write_gpt2_encoding(folder: Path) -> int:
    """All bytes and a few merges; returns the rows of an embedding for it."""
    folder.mkdir(exist_ok=True)
    merges = ["t h", "th e", "Ġ the", "Ġ a", "a t", "i n", "e r", "T L", "D R"]
    symbols = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    (folder / "encoder.json").write_text(json.dumps({symbol: n for n, symbol in enumerate(symbols)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return len(symbols) + 4


def make_language_model(folder: Path) -> Path:
    settings = {
        "decoder_layers": 2, "decoder_embed_dim": 32, "decoder_output_dim": 32, "decoder_input_dim": 32,
        "decoder_ffn_embed_dim": 64, "decoder_attention_heads": 2, "share_decoder_input_output_embed": True,
        "tokens_per_sample": 300, "max_target_positions": 300, "decoder_learned_pos": True,
    }  # fmt: skip
    make_checkpoint("transformer_lm_gpt", folder, vocab=write_gpt2_encoding(folder), settings=settings)
    return folder


# ---- tables of a page


def parse_tables(page: str) -> dict[str, list[dict[str, str]]]:
    """The tables of a Markdown page by their headings, each row by its column names."""
    tables: dict[str, list[dict[str, str]]] = {}
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        header, rule, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
        ]
        assert all(re.fullmatch(r"-+:?", cell) for cell in rule)
        assert rows and all(len(row) == len(header) for row in rows)
        tables[section.splitlines()[0]] = [dict(zip(header, row)) for row in rows]
    return tables


def number(cell: str) -> float:
    return float(re.match(r"-?[\d.]+", cell).group())
