#!/usr/bin/env python3
"""Measure M2M-100 and speech translation beside stock fairseq: whole generations, in turn, with random weights.

    python scripts/task_speed.py --model m2m100 --batch 1 --rounds 3
    python scripts/task_speed.py --model s2t_transformer_s --batch 8 --source 512

adds its rows to docs/results/tasks.json, and replaces those that it measures again. Both systems find hypotheses of the
same number of tokens, and the row says whether they are the same tokens. Sources of speech are four times as many
frames as tokens, which the encoder's convolutions make of them.
"""

import argparse
import json
import statistics
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator

import fairseq_el
from fairseq_el import ELSequenceGenerator
from random_models import enliven
from released_layouts import FRAMES_PER_TOKEN, RELEASES

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "tasks.json"
BEAM, NEW_TOKENS = 5, 24
MODELS = {"m2m100": RELEASES["m2m100_418M"], "s2t_transformer_s": RELEASES["s2t_transformer_s"]}


def build(name: str, dictionary: Dictionary) -> Any:
    """A stock model with weights that are exact in half precision, as those of released checkpoints are."""
    release = MODELS[name]
    args = Namespace(arch=release.arch, **release.settings)
    ARCH_CONFIG_REGISTRY[release.arch](args)
    torch.manual_seed(1)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = ARCH_MODEL_REGISTRY[release.arch].build_model(args, task)
    with torch.no_grad():
        enliven(model)
    return model.half().float().eval()


def generators(name: str, dictionary: Dictionary) -> dict[str, SequenceGenerator]:
    cfg = Namespace(generation=Namespace(beam=BEAM), task=Namespace(el_precision="auto"))
    options: dict[str, Any] = {"beam_size": BEAM, "max_len_b": NEW_TOKENS - 1, "min_len": NEW_TOKENS - 1}
    stock, ours = build(name, dictionary), fairseq_el.accelerate(build(name, dictionary))
    for model in (stock, ours):
        model.prepare_for_inference_(cfg)
    return {
        "stock": SequenceGenerator([stock], dictionary, **options),
        "el": ELSequenceGenerator([ours], dictionary, **options),
    }


def batch_of(name: str, batch: int, source: int, words: int) -> dict[str, Any]:
    """Sources [batch, source] of tokens, or [batch, 4 source, 80] of features."""
    noise = torch.Generator().manual_seed(source)
    if not MODELS[name].is_speech:
        tokens = torch.randint(4, words, (batch, source), generator=noise)
        tokens[:, -1] = 2  # </s>
        return {"net_input": {"src_tokens": tokens, "src_lengths": torch.full((batch,), source)}}
    frames = FRAMES_PER_TOKEN * source
    features = torch.randn(batch, frames, 80, generator=noise)
    return {"net_input": {"src_tokens": features, "src_lengths": torch.full((batch,), frames)}}


def measure(systems: dict[str, SequenceGenerator], sample: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds of each system in turn, the first of them another in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    tokens: dict[str, Any] = {}
    for number in range(rounds):
        for name in list(systems)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            found = systems[name].generate([], sample)
            seconds[name].append(time.perf_counter() - begin)
            tokens[name] = [[hypothesis["tokens"].tolist() for hypothesis in best] for best in found]
    ratios = [stock / el for stock, el in zip(seconds["stock"], seconds["el"], strict=True)]
    return {
        "stock_seconds": round(statistics.median(seconds["stock"]), 4),
        "el_seconds": round(statistics.median(seconds["el"]), 4),
        "faster": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "rounds": rounds,
        "same_tokens": tokens["stock"] == tokens["el"],
    }


def save(rows: list[dict[str, Any]]) -> None:
    keys = ("model", "batch", "source")
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    merged = {tuple(row[key] for key in keys): row for row in [*known, *rows]}
    content = {"beam": BEAM, "new_tokens": NEW_TOKENS, "threads": torch.get_num_threads()}
    content["rows"] = [merged[key] for key in sorted(merged)]  # type: ignore[assignment]
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure models of other tasks beside stock fairseq.")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--source", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dictionary = Dictionary()
    for number in range(MODELS[args.model].rows - len(dictionary)):
        dictionary.add_symbol(str(number))
    systems = generators(args.model, dictionary)
    measure(systems, batch_of(args.model, 1, 16, len(dictionary)), 1)  # compiles what is left to the first call
    for batch in args.batch:
        for source in args.source:
            sample = batch_of(args.model, batch, source, len(dictionary))
            row = {"model": args.model, "batch": batch, "source": source, **measure(systems, sample, args.rounds)}
            print(row, flush=True)
            save([row])


if __name__ == "__main__":
    main()
