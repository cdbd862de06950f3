"""Rough estimates of how long measurements take on two cores with AVX2, for time plans and progress bars.

Speeds are those at which BART-large ran on such a machine; no result depends on them.
"""

from bench.protocol import Request
from bench.tasks import Model

FLOPS_PER_SECOND = 115e9
STOCK_OVERHEAD, OVERHEAD = 1.5, 1.1  # over the arithmetic of linear layers
BYTES_PER_SECOND = {"stock": 10e9, "el": 20e9}
TIMED_STEPS = ((0.5, 3), (1.5, 2))  # as in parts.py: steps up to so many seconds, how many at either end


def source_seconds(model: Model, length: float) -> float:
    """Seconds to encode one source, or to prefill one prompt; assumes an encoder as deep as the decoder."""
    flops = length * model.layers * (2 * 12 * model.width**2 + 4 * length * model.width)
    return flops / FLOPS_PER_SECOND


def build_seconds(model: Model, request: Request) -> float:
    """Seconds to build K and V in the first step."""
    if request.attention == "always" or model.is_language_model:
        return 0.0
    copies = request.beam if request.multi_head else 1
    flops = 4 * request.batch * copies * request.source_length * model.width**2 * model.layers
    return flops / FLOPS_PER_SECOND


def step_seconds(model: Model, request: Request, is_stock: bool, position: int) -> float:
    """Seconds of the decoding step at this position."""
    rows, n, d, layers = request.batch * request.beam, request.source_length, model.width, model.layers
    if request.multi_head == "no-cache":
        rows *= position + 1
    weights = layers * 14 * d * d + model.vocabulary * d
    overhead = STOCK_OVERHEAD if is_stock else OVERHEAD
    dense = max(2 * rows * weights * overhead / FLOPS_PER_SECOND, weights * (16e-11 if is_stock else 5e-11 * 4))
    if request.multi_head == "no-cache":
        return dense + build_seconds(model, request)
    copies = request.beam if request.multi_head or (is_stock and not model.shares_cache) else 1
    past = 4 * 2 * layers * d * rows * position  # bytes of keys and values of the beams
    if is_stock:  # which it copies
        past *= 4
    speed = BYTES_PER_SECOND["stock" if is_stock else "el"]
    if request.attention == "always":
        attend = 4 * model.heads * rows * n * d * layers / FLOPS_PER_SECOND
    else:
        source = 0 if is_stock and model.is_language_model else n
        attend = 4 * 2 * layers * d * request.batch * copies * source / speed
    return 0.01 + dense + attend + past / speed


def steps_of(model: Model, request: Request, is_stock: bool) -> int:
    prompt = request.source_length - 1 if is_stock and model.is_language_model else 0
    return prompt + request.length


def decoding_seconds(model: Model, request: Request, is_stock: bool) -> float:
    """Seconds of all steps, or of those that `parts` times."""
    steps = steps_of(model, request, is_stock)
    early, late = (step_seconds(model, request, is_stock, position) for position in (1, steps))
    if request.op == "parts":
        timed = next((count for limit, count in TIMED_STEPS if early < limit), 1)
        return build_seconds(model, request) + early + min(steps, timed) * (early + late)
    return build_seconds(model, request) + steps * (early + late) / 2


def request_seconds(model: Model, request: Request, is_stock: bool) -> float:
    """Without the sources for `parts`: they are encoded once for many requests, and planned separately."""
    source = 0.0
    if request.op == "generate" and not (is_stock and model.is_language_model):
        source = request.batch * source_seconds(model, request.source_length)
    return source + decoding_seconds(model, request, is_stock)


def loading_seconds(model: Model) -> float:
    """Seconds to load one worker."""
    return 5 + 45e-9 * model.parameters
