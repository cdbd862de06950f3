"""The systems that are compared, and what each needs to start."""

from dataclasses import dataclass, field
from typing import Any

from bench.checkpoints import Checkpoint


@dataclass(frozen=True)
class SystemKind:
    """How one system's worker is started. `needs_peers` says that it lives in the peers'
    environment and takes converted weights; `options` go to the worker as they are."""

    name: str
    title: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    needs_peers: bool = False

    @property
    def is_fairseq(self) -> bool:
        """Whether its worker can time decoding without the encoder."""
        return not self.needs_peers

    def worker_options(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if self.needs_peers:
            model = checkpoint.converted / self.options["folder"]
            return {"model": str(model), "vocabulary": checkpoint.vocabulary, **self.options}
        return {
            "checkpoint": str(checkpoint.model),
            "data": str(checkpoint.data),
            **self.options,
        }


SYSTEMS = {
    kind.name: kind
    for kind in (
        SystemKind("stock", "stock fairseq", "bench.worker_stock", {"copied": False}),
        SystemKind(
            "stock-copied",
            "stock fairseq, cache copied per beam",
            "bench.worker_stock",
            {"copied": True},
        ),
        SystemKind("el", "fairseq_el", "bench.worker_el", {"packing": "auto"}),
        SystemKind("el-fp32", "fairseq_el, fp32 packing", "bench.worker_el", {"packing": "fp32"}),
        SystemKind(
            "ctranslate2-float32",
            "CTranslate2 float32",
            "bench.worker_ctranslate2",
            {"folder": "ctranslate2-float32", "compute_type": "float32"},
            needs_peers=True,
        ),
        SystemKind(
            "ctranslate2-int8",
            "CTranslate2 int8",
            "bench.worker_ctranslate2",
            {"folder": "ctranslate2-int8", "compute_type": "int8"},
            needs_peers=True,
        ),
        SystemKind(
            "transformers",
            "Hugging Face Transformers",
            "bench.worker_transformers",
            {"folder": "transformers"},
            needs_peers=True,
        ),
    )
}

LANGUAGE_SYSTEMS = {
    kind.name: kind
    for kind in (
        SystemKind("stock", "stock fairseq", "bench.worker_language", {"stock": True}),
        SystemKind(
            "el",
            "fairseq_el",
            "bench.worker_language",
            {"stock": False, "packing": "fp32", "unscored": False},
        ),
        SystemKind(
            "el-unscored",
            "fairseq_el, prompts unscored",
            "bench.worker_language",
            {"stock": False, "packing": "fp32", "unscored": True},
        ),
        SystemKind(
            "el-fp16",
            "fairseq_el, prompts unscored, fp16 weights",
            "bench.worker_language",
            {"stock": False, "packing": "auto", "unscored": True},
        ),
        SystemKind(
            "ctranslate2-float32",
            "CTranslate2 float32",
            "bench.worker_ctranslate2_language",
            {"folder": "ctranslate2-float32", "compute_type": "float32"},
            needs_peers=True,
        ),
        SystemKind(
            "transformers",
            "Hugging Face Transformers",
            "bench.worker_transformers_language",
            {"folder": "transformers"},
            needs_peers=True,
        ),
    )
}

# Half-precision arithmetic, which is what stock fairseq makes of `--fp16` on a CPU too.
STOCK_HALF = SystemKind(
    "stock-half", "stock fairseq --fp16", "bench.worker_stock", {"copied": False, "half": True}
)

LANGUAGE_INT8 = SystemKind(
    "ctranslate2-int8",
    "CTranslate2 int8",
    "bench.worker_ctranslate2_language",
    {"folder": "ctranslate2-int8", "compute_type": "int8"},
    needs_peers=True,
)
