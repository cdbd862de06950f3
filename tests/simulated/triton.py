"""The Triton kernels on the simulated device: counted as launches, and computed on host memory.

By Triton's interpreter, if asked, or by torch, which is faster and needs no Triton.
"""

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fairseq_el.kernels import fallback
from fairseq_el.kernels.formats import Slots
from simulated.costs import unique_bytes
from simulated.device import SimulatedDevice
from simulated.tensor import leaves_of, mapped, on_host


class SimulatedKernels:
    """Takes the place of `TritonKernels`."""

    def __init__(self, device: SimulatedDevice, interpreted: bool = False):
        self.device = device
        self.interpreted = interpreted

    def supports_heads(self, d_k: int) -> bool:
        return True

    def supports_states(self, dtype: torch.dtype, d: int) -> bool:
        return True

    def el_attention(self, queries, states, span, scale: float = 1.0):
        flops = 4 * queries.numel() * states.size(1)
        return self._run("el_attention", flops, queries, states, span, scale)

    def decoder_attention(
        self, queries, num_heads, scale, prefix=None, span=None, slots=None, prompt=None, biases=None
    ):
        keys = (prefix[0].size(3) if prefix else 0) + (slots.used if slots else 0)
        flops = 4 * queries.numel() * keys
        return self._run("attention", flops, queries, num_heads, scale, prefix, span, slots, prompt, biases)

    def _run(self, name: str, flops: int, *arguments):
        tensors = [x for x in leaves_of(arguments) if isinstance(x, Tensor)]
        if not all(tensor.is_cuda for tensor in tensors):
            raise RuntimeError(f"Triton's {name} was given a tensor on the CPU")
        no_numbers = any(on_host(tensor).is_meta for tensor in tensors)

        def numbers(x):
            return on_host(x).to("meta") if no_numbers and isinstance(x, Tensor) else on_host(x)

        data = mapped(numbers, tuple(Parts(x) if isinstance(x, Slots) else x for x in arguments))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            found = getattr(self, f"_{name}")(*data)
        results = found if isinstance(found, tuple) else (found,)
        moved = sum(unique_bytes(on_host(tensor)) for tensor in tensors) + sum(map(unique_bytes, results))
        self.device.count_kernel(name, flops, moved)
        return mapped(self.device.hold, found)

    def _el_attention(self, queries, states, span, scale):
        if self.interpreted:
            return triton_kernels().el_attention(queries, states, span, scale)
        position = torch.arange(states.size(1), device=states.device)
        mask = (position < span[0][:, None]) | (position >= span[1][:, None])
        scores = torch.bmm(scale * queries.float(), states.float().mT).masked_fill(mask[:, None], float("-inf"))
        context = torch.bmm(scores.softmax(-1), states.float()).to(queries.dtype)
        return context, scores.logsumexp(-1) / math.log(2)

    def _attention(self, queries, num_heads, scale, prefix, span, slots, prompt, biases):
        slots = None if slots is None else Slots(*slots)
        if self.interpreted:
            return triton_kernels().decoder_attention(queries, num_heads, scale, prefix, span, slots, prompt, biases)
        mask = None
        if prefix is not None:
            position = torch.arange(prefix[0].size(3), device=queries.device)
            mask = (position < span[0][:, None]) | (position >= span[1][:, None])
        slots = slots and slots.written()
        context, _ = fallback.decoder_attention(queries, num_heads, scale, prefix, mask, slots)
        if prompt is None:
            return context
        return self._with_prompt(context, queries, num_heads, scale, slots, prompt, biases)

    def _with_prompt(self, context, queries, num_heads, scale, slots, prompt, biases):
        """Joins attention to slots with what EL-attention found of the prompt."""
        b, x, width = queries.shape
        q = fallback.split_heads(queries * scale, num_heads)
        own = fallback.score_slots(q, slots).float().logsumexp(-1)  # [b, h, x]
        theirs = (prompt[1] * math.log(2)).view(b, x, num_heads).transpose(1, 2)
        prompt_context = prompt[0]
        if biases is not None:
            theirs = theirs + (q * biases[0].view(num_heads, 1, -1)).sum(-1)
            prompt_context = prompt_context + biases[1]
        share = torch.sigmoid(theirs - own).transpose(1, 2).unsqueeze(-1)  # [b, x, h, 1]
        mixed = share * prompt_context.view(b, x, num_heads, -1) + (1 - share) * context.view(b, x, num_heads, -1)
        return mixed.reshape(b, x, width).to(queries.dtype)


class Parts(tuple):
    """The fields of a named tuple, which `mapped` can take apart and put together."""


def triton_kernels():
    from fairseq_el.kernels.triton.launch import TritonKernels

    return TritonKernels(capability=80, processors=1)


