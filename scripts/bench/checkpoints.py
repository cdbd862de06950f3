"""The checkpoints that all systems run: made once from a seed, or the demo's, and converted for each peer.

    python -m bench.checkpoints FORM SOURCE OUTPUT

converts, in the environment of a peer, as the peer's documentation says. SOURCE is a folder of Transformers; for FORM
`transformers` it has `weights.pt` and `config.json`, from which such a folder is made.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environment import BUILD, ROOT, SCRIPTS, peer_python

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
POSITION_OFFSET = 2  # fairseq starts counting positions after the padding index, 1
GPT2_NAMES = {"self_attn_layer_norm": "ln_1", "final_layer_norm": "ln_2", "self_attn.out_proj": "attn.c_proj",
              "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """Seeded random weights in the shapes of a stock architecture, kept under build/ between runs."""

    arch: str
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    vocabulary: int = 50264
    seed: int = 1

    @property
    def is_language_model(self) -> bool:
        return self.arch.startswith("transformer_lm")

    @property
    def folder(self) -> Path:
        """With the dictionaries. Named after what determines the contents: a change of settings makes another."""
        settings = {"vocabulary": self.vocabulary, "seed": self.seed, **self.overrides}
        name = ",".join([self.arch, *(f"{name}={value}" for name, value in settings.items())])
        code = b"".join((SCRIPTS / file).read_bytes() for file in ("make_checkpoint.py", "random_models.py"))
        digest = hashlib.sha256(code + name.encode()).hexdigest()[:12]
        return BUILD / "checkpoints" / f"{self.arch}-{digest}"

    @property
    def model(self) -> Path:
        return self.folder / "model.pt"

    def ensure(self) -> None:
        """Writes the checkpoint unless an earlier run did."""
        if (self.folder / "done").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"making a checkpoint in the shapes of {self.arch}", flush=True)
        command = [sys.executable, str(SCRIPTS / "make_checkpoint.py"), "--arch", self.arch]
        command += ["--output", str(self.folder), "--seed", str(self.seed), "--vocab", str(self.vocabulary)]
        for name, value in self.overrides.items():
            command += ["--set", f"{name}={value}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
        (self.folder / "done").touch()  # last, so that a broken run leaves none

    def converted(self, form: str) -> Path:
        return self.folder / "peers" / form

    def ensure_converted(self, form: str) -> None:
        """Converts the checkpoint for a peer, in its environment, unless an earlier run did."""
        folder = self.converted(form)
        if (folder / "done").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        source = self.converted("weights")
        if form == "transformers":
            source.mkdir(exist_ok=True)
            write_huggingface_weights(self.model, source)
        else:
            source = self.converted("transformers")
            self.ensure_converted("transformers")
            if form == "onnxruntime-int8":
                self.ensure_converted("onnxruntime")
        print(f"converting {self.arch} for {form}", flush=True)
        command = [peer_python(form.partition("-")[0]), "-m", "bench.checkpoints", form, str(source), str(folder)]
        with (folder / "log").open("w") as log:
            if subprocess.run(command, cwd=SCRIPTS, stdout=log, stderr=log).returncode:
                raise RuntimeError(f"converting {self.arch} for {form} failed: see {folder / 'log'}")
        if form == "transformers":
            shutil.rmtree(source)
        (folder / "done").touch()


@dataclass(frozen=True)
class DemoCheckpoint(Checkpoint):
    """The demo's trained model, which the package brings."""

    @property
    def folder(self) -> Path:
        digest = hashlib.sha256(self.model.read_bytes()).hexdigest()[:12]
        return BUILD / "checkpoints" / f"demo-{digest}"

    @property
    def model(self) -> Path:
        return ROOT / "demo" / "model.pt"

    def ensure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("dict.txt", "dict.source.txt", "dict.target.txt"):
            shutil.copyfile(ROOT / "demo" / "dict.txt", self.folder / name)


def write_huggingface_weights(model: Path, folder: Path) -> None:
    """Renames the weights here, where fairseq's checkpoints can be read."""
    import torch
    from fairseq import checkpoint_utils

    import fairseq_el.checkpoints.loading  # noqa: F401  lets torch load a released checkpoint's Namespace
    from fairseq_el.checkpoints.huggingface import bart_to_huggingface

    state = checkpoint_utils.load_checkpoint_to_cpu(str(model))
    cfg = state["cfg"]["model"]
    if "transformer_lm" in cfg._name:
        rename = gpt2_to_huggingface
    elif cfg.encoder_normalize_before:
        rename = mbart_to_huggingface
    else:
        rename = bart_to_huggingface
    weights, settings = rename({name: tensor.float() for name, tensor in state["model"].items()}, cfg)
    torch.save(weights, folder / "weights.pt")
    (folder / "config.json").write_text(json.dumps({"model_type": "bart"} | settings, indent=2))


def mbart_to_huggingface(state: dict[str, Any], cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A BART with layer normalisation before each block is Transformers' mBART."""
    kept = {name: t for name, t in state.items() if not name.endswith(("version", "_float_tensor"))}
    words, positions = kept["encoder.embed_tokens.weight"], kept["encoder.embed_positions.weight"].clone()
    known = kept["decoder.embed_positions.weight"]
    positions[: len(known)] = known  # as many as the encoder's, which Transformers wants; no output is so long
    kept["decoder.embed_positions.weight"] = positions
    weights = {f"model.{name}": t for name, t in kept.items() if not name.startswith("decoder.output_projection")}
    weights |= dict.fromkeys(("model.shared.weight", "lm_head.weight"), words)
    weights["final_logits_bias"] = words.new_zeros(1, len(words))
    settings = {
        "model_type": "mbart", "vocab_size": len(words), "d_model": cfg.encoder_embed_dim,
        "max_position_embeddings": len(positions) - POSITION_OFFSET,
        "activation_function": cfg.activation_fn, "scale_embedding": not cfg.no_scale_embedding,
        "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        # for CTranslate2's converter, which takes no language code as first token then
        "normalize_before": True, "normalize_embedding": True, "tokenizer_class": "BartTokenizer",
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        for theirs, ours in (
            ("layers", "layers"),
            ("ffn_dim", "ffn_embed_dim"),
            ("attention_heads", "attention_heads"),
        ):
            settings[f"{side}_{theirs}"] = getattr(cfg, f"{side}_{ours}")
    return weights, settings


def gpt2_to_huggingface(state: dict[str, Any], cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens keep their numbers. Transformers stores linear layers as [in, out], and query, key and value as one."""
    import torch

    words = state["decoder.embed_tokens.weight"]
    weights = dict.fromkeys(("transformer.wte.weight", "lm_head.weight"), words)
    weights["transformer.wpe.weight"] = state["decoder.embed_positions.weight"][POSITION_OFFSET:]
    for kind in ("weight", "bias"):
        weights[f"transformer.ln_f.{kind}"] = state[f"decoder.layer_norm.{kind}"]
        for number in range(cfg.decoder_layers):
            ours, theirs = f"decoder.layers.{number}.", f"transformer.h.{number}."
            parts = {there: [f"{ours}{here}.{kind}"] for here, there in GPT2_NAMES.items()}
            parts["attn.c_attn"] = [f"{ours}self_attn.{p}_proj.{kind}" for p in "qkv"]
            for name, sources in parts.items():
                joined = torch.cat([state[source] for source in sources])
                weights[f"{theirs}{name}.{kind}"] = joined.t().contiguous() if joined.dim() > 1 else joined
    settings = {
        "model_type": "gpt2", "vocab_size": len(words), "n_positions": cfg.tokens_per_sample,
        "n_embd": cfg.decoder_embed_dim, "n_inner": cfg.decoder_ffn_embed_dim, "n_layer": cfg.decoder_layers,
        "n_head": cfg.decoder_attention_heads, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    }  # fmt: skip
    return weights, settings


# ---- in the environment of a peer


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


def class_for(library: Any, prefix: str, folder: Path) -> Any:
    """A library's class for this kind of model: it has one for each."""
    kind = "ForCausalLM" if settings_of(folder)["model_type"] == "gpt2" else "ForSeq2SeqLM"
    return getattr(library, f"{prefix}Model{kind}")


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
    import optimum.intel as library

    # without `bits` the library would choose 8-bit weights for large models by itself
    weights = {"load_in_8bit": False}
    if bits:
        weights = {"quantization_config": library.OVWeightQuantizationConfig(bits)}
    model = class_for(library, "OV", source).from_pretrained(source, export=True, compile=False, **weights)
    model.save_pretrained(output)


def to_onnx(source: Path, output: Path) -> None:
    import optimum.onnxruntime as library

    class_for(library, "ORT", source).from_pretrained(source, export=True).save_pretrained(output)


def to_onnx_int8(source: Path, output: Path) -> None:
    """Dynamic quantization for AVX-512 VNNI."""
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
