"""The systems that are compared: what each needs, and how its worker is started."""

from dataclasses import dataclass, field
from typing import Any

from bench.checkpoints import Checkpoint


@dataclass(frozen=True)
class SystemKind:
    """A peer has an `environment` of its own, and the `form` of weights that `convert.py` makes for it."""

    name: str
    title: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    form: str | None = None

    def worker_options(self, checkpoint: Checkpoint | None) -> dict[str, Any]:
        if checkpoint is None:
            return self.options
        facts = {"language_model": checkpoint.is_language_model, "vocabulary": checkpoint.vocabulary}
        if self.form:
            return facts | {"model": str(checkpoint.converted(self.form))} | self.options
        return facts | {"checkpoint": str(checkpoint.model), "data": str(checkpoint.data)} | self.options


FAIRSEQ, GENERATE, CT2 = "bench.worker_fairseq", "bench.worker_transformers", "bench.worker_ctranslate2"
EXACT, BF16, INT8 = "el", "el-bf16", "el-int8"
OURS = (EXACT, BF16, INT8)


def peer(name: str, title: str, form: str, **options: Any) -> SystemKind:
    environment = form.partition("-")[0]
    if environment == "ctranslate2":
        return SystemKind(name, title, CT2, options, environment, form)
    return SystemKind(name, title, GENERATE, {"library": environment, **options}, environment, form)


SYSTEMS = {
    kind.name: kind
    for kind in (
        SystemKind("stock", "stock fairseq", FAIRSEQ),
        SystemKind("stock-copied", "stock fairseq, cache copied per beam", FAIRSEQ, {"copied": True}),
        SystemKind("stock-fp16", "stock fairseq `--fp16`", FAIRSEQ, {"half": True}),
        SystemKind(EXACT, "fairseq_el", FAIRSEQ, {"precision": "auto"}),
        SystemKind("el-fp32", "fairseq_el, fp32 weights", FAIRSEQ, {"precision": "fp32"}),
        SystemKind(BF16, "fairseq_el bf16", FAIRSEQ, {"precision": "bf16"}),
        SystemKind(INT8, "fairseq_el int8", FAIRSEQ, {"precision": "int8"}),
        peer("transformers", "Transformers float32", "transformers", dtype="float32"),
        peer("transformers-bf16", "Transformers bf16", "transformers", dtype="bfloat16"),
        peer("transformers-compile", "Transformers float32, torch.compile", "transformers", dtype="float32",
             compile=True),
        peer("ctranslate2", "CTranslate2 float32", "ctranslate2-float32", compute_type="float32"),
        peer("ctranslate2-int8", "CTranslate2 int8", "ctranslate2-int8", compute_type="int8"),
        peer("ctranslate2-workers", "CTranslate2 float32, 2 workers", "ctranslate2-float32", compute_type="float32",
             workers=2),
        peer("ctranslate2-int8-workers", "CTranslate2 int8, 2 workers", "ctranslate2-int8", compute_type="int8",
             workers=2),
        peer("openvino", "OpenVINO default (bf16 where the CPU has it)", "openvino"),
        peer("openvino-f32", "OpenVINO float32", "openvino", hints={"INFERENCE_PRECISION_HINT": "f32"}),
        peer("openvino-int8", "OpenVINO 8-bit weights", "openvino-int8"),
        peer("onnxruntime", "ONNX Runtime float32", "onnxruntime"),
        peer("onnxruntime-int8", "ONNX Runtime int8", "onnxruntime-int8"),
        SystemKind("operations", "operations", "bench.operations"),
    )
}  # fmt: skip

FLOAT = (EXACT, "el-fp32", "stock", "stock-copied", "transformers", "transformers-compile", "ctranslate2",
         "ctranslate2-workers", "openvino-f32", "onnxruntime")  # fmt: skip


def is_float(system: str) -> bool:
    """Whether it computes in single precision, with weights that lose nothing."""
    return system in FLOAT
