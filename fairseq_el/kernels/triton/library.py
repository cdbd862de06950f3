"""Finds out once per device whether the Triton kernels work there."""

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_el.kernels import fallback
from fairseq_el.kernels.formats import Padding, Slots

if TYPE_CHECKING:  # Triton may be missing
    from fairseq_el.kernels.triton.launch import TritonKernels

logger = logging.getLogger(__name__)

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


def kernels_for(x: Tensor) -> "TritonKernels | None":
    """The kernels that take such tensors; None where torch's operations serve."""
    return kernels_on(x.device) if x.is_cuda and x.dtype in PRECISIONS and not x.requires_grad else None


@functools.cache
def kernels_on(device: torch.device) -> "TritonKernels | None":
    try:
        from fairseq_el.kernels.triton.launch import TritonKernels
    except ImportError as error:
        logger.warning(f"falling back to torch for attention on {device} (slower): Triton can't be imported ({error})")
        return None
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    kernels = TritonKernels(10 * major + minor, properties.multi_processor_count)
    try:
        agrees = agrees_with_torch(kernels, device)
    except Exception as error:  # of many kinds: Triton's compiler, the driver, a missing C compiler
        logger.warning(f"falling back to torch for attention on {device} (slower): Triton's kernels fail ({error})")
        return None
    if not agrees:
        logger.warning(f"falling back to torch for attention on {device} (slower): Triton's kernels are wrong there")
        return None
    logger.info(f"attention on {device} runs Triton's kernels")
    return kernels


def agrees_with_torch(kernels: "TritonKernels", device: torch.device) -> bool:
    """One small case each, in single precision."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 20, 64), (2, 40, 64), (2, 2, 32, 40), (2, 2, 32, 40)
    queries, states, keys, values = (torch.randn(shape, generator=draw).to(device) for shape in shapes)
    span = torch.tensor([0, 3]).to(device), torch.tensor([40, 37]).to(device)
    position = torch.arange(40, device=device)
    mask = (position < span[0].unsqueeze(1)) | (position >= span[1].unsqueeze(1))
    pairs = [
        (
            kernels.decoder_attention(queries, 2, 0.2, (keys, values), span, slots(queries, keys, values)),
            fallback.decoder_attention(queries, 2, 0.2, (keys, values), mask, slots(queries, keys, values))[0],
        )
    ]
    if kernels.supports_states(torch.float32, 64):
        ours, _ = kernels.el_attention(queries, states, span)
        pairs.append((ours, fallback.el_attention(queries, states, Padding(mask, span).mask)[0]))
    return all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in pairs)


def slots(queries: Tensor, keys: Tensor, values: Tensor) -> Slots:
    """40 slots, of which every other one is some row's past."""
    x = queries.size(1)
    beam_mask = (torch.arange(40, device=queries.device) + torch.arange(x, device=queries.device)[:, None]) % 2 == 0
    return Slots(keys.mT.contiguous(), values.mT.contiguous(), beam_mask.expand(2, x, 40).contiguous(), 40)
