"""Converts weights for a peer; runs in the environment of that peer.

    python -m bench.convert SYSTEM SOURCE OUTPUT

SOURCE is a folder of Transformers; for SYSTEM `transformers` it has `weights.pt` and `config.json`, from which such a
folder is made. The others are converted as their documentation says.
"""

import json
import sys
from pathlib import Path
from typing import Any

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def token_name(index: int) -> str:
    """A name for each token: the benchmark uses numbers, CTranslate2 strings."""
    return SPECIAL[index] if index < len(SPECIAL) else f"w{index}"


class NumberedTokens:
    """What CTranslate2's converter asks of a tokenizer."""

    bos_token, pad_token, eos_token, unk_token = SPECIAL

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return {token_name(index): index for index in range(self.vocabulary)}

    def convert_ids_to_tokens(self, index: int) -> str:
        return token_name(index)


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def is_language_model(folder: Path) -> bool:
    return settings_of(folder)["model_type"] == "gpt2"


def to_transformers(source: Path, output: Path) -> None:
    import torch
    import transformers

    settings = settings_of(source)
    classes = {
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
        "mbart": (transformers.MBartConfig, transformers.MBartForConditionalGeneration),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }
    configuration, model_class = classes[settings.pop("model_type")]
    model = model_class(configuration(**settings))
    model.load_state_dict(torch.load(source / "weights.pt", weights_only=True), strict=True)
    # whatever length or ending a checkpoint prefers, requests say it themselves
    model.generation_config = transformers.GenerationConfig(
        **{name: settings[name] for name in settings if name.endswith("_token_id") and not name.startswith("forced")}
    )
    model.save_pretrained(output)


def to_ctranslate2(source: Path, output: Path, quantization: str) -> None:
    from ctranslate2.converters import TransformersConverter

    vocabulary = settings_of(source)["vocab_size"]

    class Converter(TransformersConverter):
        def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
            return NumberedTokens(vocabulary)

    Converter(str(source)).convert(str(output), quantization=quantization, force=True)


def to_openvino(source: Path, output: Path, bits: int | None = None) -> None:
    from optimum.intel import OVModelForCausalLM, OVModelForSeq2SeqLM, OVWeightQuantizationConfig

    model_class = OVModelForCausalLM if is_language_model(source) else OVModelForSeq2SeqLM
    # without `bits` the library would choose 8-bit weights for large models by itself
    weights = {"load_in_8bit": False} if bits is None else {"quantization_config": OVWeightQuantizationConfig(bits)}
    model_class.from_pretrained(source, export=True, compile=False, **weights).save_pretrained(output)


def to_onnx(source: Path, output: Path) -> None:
    from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSeq2SeqLM

    model_class = ORTModelForCausalLM if is_language_model(source) else ORTModelForSeq2SeqLM
    model_class.from_pretrained(source, export=True).save_pretrained(output)


def to_onnx_int8(source: Path, output: Path) -> None:
    """Dynamic quantization for AVX-512 VNNI."""
    import shutil

    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    exported = source.parent / "onnxruntime"
    for file in sorted(exported.glob("*.onnx")):
        quantizer = ORTQuantizer.from_pretrained(exported, file_name=file.name)
        settings = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
        quantizer.quantize(save_dir=output, quantization_config=settings, file_suffix="")
    for file in exported.glob("*.json"):
        shutil.copy(file, output)


CONVERT = {
    "transformers": to_transformers,
    "ctranslate2-float32": lambda source, output: to_ctranslate2(source, output, "float32"),
    "ctranslate2-int8": lambda source, output: to_ctranslate2(source, output, "int8"),
    "openvino": to_openvino,
    "openvino-int8": lambda source, output: to_openvino(source, output, bits=8),
    "onnxruntime": to_onnx,
    "onnxruntime-int8": to_onnx_int8,
}


if __name__ == "__main__":
    target, source_folder, output_folder = sys.argv[1:]
    Path(output_folder).mkdir(parents=True, exist_ok=True)
    CONVERT[target](Path(source_folder), Path(output_folder))
