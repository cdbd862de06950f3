"""Turns BART or GPT-2 weights into a Transformers folder and CTranslate2 models; for the peers' Python.

    python -m bench.convert WEIGHTS CONFIG OUTPUT

WEIGHTS is a state dict and CONFIG a JSON file as `fairseq_el.checkpoints.huggingface.bart_to_huggingface` and
`bench.gpt2_weights.gpt2_to_huggingface` make them.
"""

import json
import sys
from pathlib import Path

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def token_name(index: int) -> str:
    """A name for each token: the benchmark deals in numbers, CTranslate2 in strings."""
    return SPECIAL[index] if index < len(SPECIAL) else f"w{index}"


class NumberedTokens:
    """What CTranslate2's converter asks of a tokenizer."""

    bos_token, _, eos_token, unk_token = SPECIAL

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return {token_name(index): index for index in range(self.vocabulary)}

    def convert_ids_to_tokens(self, index: int) -> str:
        return token_name(index)


def write_transformers(weights: Path, config: Path, output: Path) -> None:
    import torch
    import transformers

    settings = json.loads(config.read_text())
    if settings.pop("model_type", "bart") == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    else:
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**settings))
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.save_pretrained(output)


def write_ctranslate2(transformers_folder: Path, output: Path, quantization: str) -> None:
    from ctranslate2.converters import TransformersConverter

    vocabulary = json.loads((transformers_folder / "config.json").read_text())["vocab_size"]

    class Converter(TransformersConverter):
        def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
            return NumberedTokens(vocabulary)

    Converter(str(transformers_folder)).convert(str(output), quantization=quantization, force=True)


def main(weights: Path, config: Path, output: Path) -> None:
    write_transformers(weights, config, output / "transformers")
    for quantization in ("float32", "int8"):
        folder = output / f"ctranslate2-{quantization}"
        write_ctranslate2(output / "transformers", folder, quantization)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
