"""`fairseq-el info --device cuda`: whether this package does on a GPU what it promises. Takes about a minute."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fairseq_el.errors import UserError
from fairseq_el.jobs.summarizer import Summarizer
from fairseq_el.kernels import fallback, ops
from fairseq_el.kernels.formats import KeyValues, Padding
from fairseq_el.kernels.triton import library
from fairseq_el.models.attention import ELAttention
from fairseq_el.models.costs import Shape, measure_machine
from fairseq_el.resources import resource

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2}
TIE = 1.1  # forms whose times differ by less are both right
TEXTS = 8
SYNCHRONISING = "called a synchronizing CUDA operation"


@dataclass(frozen=True)
class Sizes:
    """Of the attention that is timed."""

    heads: int = 16
    width: int = 1024
    length: int = 822
    beam: int = 4
    batches: tuple[int, ...] = (1, 8, 32)
    repeats: int = 20


BART_LARGE = Sizes()  # on CNN/DailyMail


@torch.no_grad()
def check(device: torch.device, sizes: Sizes = BART_LARGE) -> tuple[dict[str, Any], list[str]]:
    """Lines by name, and problems with their remedies."""
    if not torch.cuda.is_available():
        raise UserError("there is no GPU that torch can use: install a build of torch with CUDA, and check nvidia-smi")
    found, problems = check_kernels(device, sizes)
    for section in (check_demo(device), check_forms(device, sizes)):
        found |= section[0]
        problems += section[1]
    return found, problems


# ---- kernels


def check_kernels(device: torch.device, sizes: Sizes) -> tuple[dict[str, Any], list[str]]:
    major, minor = torch.cuda.get_device_capability(device)
    found: dict[str, Any] = {"GPU": f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"}
    kernels = library.kernels_on(device)
    if kernels is None:
        found["kernels"] = "torch"
        return found, ["Triton's kernels can't be used, torch is slower: pip install triton, see the log"]
    found["kernels"] = "Triton"
    problems = []
    for name, dtype in PRECISIONS.items():
        layer, states, queries = attention_layer(device, dtype, 2, sizes)
        padding = Padding.of(states, None)
        key_values = layer.build_key_values(states)
        # the largest difference between our kernels and torch
        el = difference(ops.el_attention, fallback.el_attention, states[:, :20].clone(), states, padding)
        heads = difference(
            ops.decoder_attention, fallback.decoder_attention, queries, sizes.heads, layer.scaling, key_values, padding
        )
        found[f"difference from torch, {name}"] = f"EL-attention {el:.1e}, multi-head attention {heads:.1e}"
        if max(el, heads) > TOLERANCE[name]:
            problems.append(f"Triton's kernels differ from torch in {name}: report it, with this text")
    return found, problems


def difference(kernel: Callable, torch_operation: Callable, *arguments: Any) -> float:
    """arguments: of the kernel; the operation takes the mask of the padding, and no slots."""
    ours, _ = kernel(*arguments)
    missing = (None,) if kernel is ops.decoder_attention else ()
    theirs, _ = torch_operation(*(a.mask if isinstance(a, Padding) else a for a in arguments), *missing)
    return float((ours.float() - theirs.float()).abs().max())


def attention_layer(
    device: torch.device, dtype: torch.dtype, batch: int, sizes: Sizes
) -> tuple[ELAttention, Tensor, Tensor]:
    """A layer with random weights, H [b, n, d] and queries [b, x, d]."""
    torch.manual_seed(0)
    d = sizes.width
    layer = ELAttention(d, sizes.heads, kdim=d, vdim=d, encoder_decoder_attention=True).eval().to(dtype).to(device)
    states, queries = torch.randn(batch, sizes.length, d), torch.randn(batch, sizes.beam, d)
    return layer, states.to(dtype).to(device), queries.to(dtype).to(device)


# ---- the demo: the same summaries as on the CPU, and host reads


def check_demo(device: torch.device) -> tuple[dict[str, Any], list[str]]:
    texts = (resource("demo") / "test.source").read_text(encoding="utf-8").splitlines()[:TEXTS]
    expected = Summarizer.load("demo", cpu=True)(texts)
    summarizer = Summarizer.load("demo")
    with CountedReads() as reads:
        summaries = summarizer(texts)
    same = sum(a == b for a, b in zip(summaries, expected))
    found = {
        "demo": f"{same} of {len(texts)} summaries are the CPU's",
        "host reads per step": round(reads.count / summarizer.generator.profile.steps, 1),
    }
    if same == len(texts):
        return found, []
    return found, ["summaries of the demo differ from the CPU's: report it, with this text"]


class CountedReads:
    """Counts where the host waits for the GPU, by torch's sync debug mode."""

    def __enter__(self) -> "CountedReads":
        self.caught = warnings.catch_warnings(record=True)
        self.warnings = self.caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(*error)  # type: ignore[arg-type]
        self.count = sum(SYNCHRONISING in str(warning.message) for warning in self.warnings)


# ---- forms of attention


def check_forms(device: torch.device, sizes: Sizes) -> tuple[dict[str, Any], list[str]]:
    """Times of a layer's step in half precision, and what `auto` would choose."""
    found: dict[str, Any] = {}
    wrong = []
    machine = measure_machine(device, torch.float16, sizes.beam)
    for batch in sizes.batches:
        layer, states, queries = attention_layer(device, torch.float16, batch, sizes)
        padding, key_values = Padding.of(states, None), layer.build_key_values(states)
        el = seconds(lambda: layer.attend_to_states(queries, states, padding), sizes.repeats)  # noqa: B023
        heads = seconds(lambda: attend(layer, queries, key_values, padding), sizes.repeats)  # noqa: B023
        shape = Shape(batch, sizes.beam, sizes.length, sizes.heads, sizes.width, element_size=2)
        prefers_el = machine.el_step(shape) <= machine.multi_head_step(shape)
        chosen, other = (el, heads) if prefers_el else (heads, el)
        right = chosen <= TIE * other
        found[f"attention of a layer, {batch} x {sizes.length} tokens, beam {sizes.beam}"] = (
            f"EL {1e6 * el:.0f} us, K and V {1e6 * heads:.0f} us; auto prefers {'EL' if prefers_el else 'K and V'}, "
            f"{'rightly' if right else 'WRONGLY'}"
        )
        if not right:
            wrong.append(str(batch))
    if not wrong:
        return found, []
    form = "--el-attention always or never, whichever is faster here"
    return found, [f"--el-attention auto misjudges this GPU at batch size {', '.join(wrong)}: give {form}"]


def attend(layer: ELAttention, queries: Tensor, key_values: KeyValues, padding: Padding) -> Tensor:
    return ops.decoder_attention(queries, layer.num_heads, layer.scaling, key_values, padding)[0]


def seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(3 + repeats):  # the first ones compile
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[3:])
