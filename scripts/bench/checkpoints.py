"""The checkpoints that all systems run: made once from a seed, or the demo's, and converted for each peer."""

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

POSITION_OFFSET = 2  # fairseq starts counting positions after the padding index, 1
GPT2_NAMES = {
    "self_attn_layer_norm": "ln_1",
    "final_layer_norm": "ln_2",
    "self_attn.out_proj": "attn.c_proj",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}


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
        """Named after what determines the contents, so that a change of settings is never overlooked."""
        settings = {"vocabulary": self.vocabulary, "seed": self.seed, **self.overrides}
        name = ",".join([self.arch, *(f"{name}={value}" for name, value in settings.items())])
        digest = hashlib.sha256((SCRIPTS / "make_checkpoint.py").read_bytes() + name.encode()).hexdigest()[:12]
        return BUILD / "checkpoints" / f"{self.arch}-{digest}"

    @property
    def model(self) -> Path:
        return self.folder / "model.pt"

    @property
    def data(self) -> Path:
        """The folder with the dictionaries."""
        return self.folder

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
        command = [peer_python(form.partition("-")[0]), "-m", "bench.convert", form, str(source), str(folder)]
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
        "model_type": "mbart",
        "vocab_size": len(words),
        "d_model": cfg.encoder_embed_dim,
        "max_position_embeddings": len(positions) - POSITION_OFFSET,
        "activation_function": cfg.activation_fn,
        "scale_embedding": not cfg.no_scale_embedding,
        "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        # for CTranslate2's converter, which takes no language code as first token then
        "normalize_before": True, "normalize_embedding": True, "tokenizer_class": "BartTokenizer",
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        settings |= {
            f"{side}_layers": getattr(cfg, f"{side}_layers"),
            f"{side}_ffn_dim": getattr(cfg, f"{side}_ffn_embed_dim"),
            f"{side}_attention_heads": getattr(cfg, f"{side}_attention_heads"),
        }
    return weights, settings


def gpt2_to_huggingface(state: dict[str, Any], cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens keep their numbers. Transformers stores linear layers as [in, out], and query, key and value as one."""
    import torch

    words = state["decoder.embed_tokens.weight"]
    weights = {
        "transformer.wte.weight": words,
        "lm_head.weight": words,
        "transformer.wpe.weight": state["decoder.embed_positions.weight"][POSITION_OFFSET:],
    }
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
        "model_type": "gpt2",
        "vocab_size": len(words),
        "n_positions": cfg.tokens_per_sample,
        "n_embd": cfg.decoder_embed_dim,
        "n_inner": cfg.decoder_ffn_embed_dim,
        "n_layer": cfg.decoder_layers,
        "n_head": cfg.decoder_attention_heads,
        "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    }  # fmt: skip
    return weights, settings
