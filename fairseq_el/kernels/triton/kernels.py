"""Attention of a decoding step as fused kernels: one launch, online softmax, sums in float32.

Notation: b sentences, x beams each, h heads of width d_k, model width d, source length n. Tiles of 16 query rows, the
fewest that tensor cores take. Products of float32 are exact (`input_precision="ieee"`, no TF32).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # softmax by exp2, which the hardware has


@triton.jit
def _online_softmax(scores, running_max, total):
    """One step over a tile of keys. Returns unnormalised weights, and the rescaling of what was summed before."""
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows that have seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return weights, rescale, new_max, total * rescale + tl.sum(weights, 1)


@triton.jit
def el_attention(
    queries, states, begins, ends, out, lse,
    scale, rows, n, d, splits,
    queries_batch_stride, queries_row_stride, states_batch_stride, states_row_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """EL-attention's products with H and the softmax between them. Each program reads its part of H once.

    queries: [b, rows, d], expanded; states: [b, n, d], of which a sentence has those from begins[b] to ends[b]; out:
    [splits, b, rows, d], float32 where there are several splits, which `merge_splits` then adds up; lse:
    [splits, b, rows], log2 of the sum of weights. Grid: (row tiles, b, splits).
    """
    tile, sentence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    in_rows, in_columns = row < rows, column < d
    begin, end = tl.load(begins + sentence).to(tl.int32), tl.load(ends + sentence).to(tl.int32)
    part = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_KEYS) * BLOCK_KEYS
    begin += split * part
    end = tl.minimum(end, begin + part)

    offsets = sentence * queries_batch_stride + row[:, None] * queries_row_stride + column[None, :]
    query = tl.load(queries + offsets, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    base = states + sentence * states_batch_stride
    running_max = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    context = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        in_keys = key < end
        tile_offsets = key[:, None] * states_row_stride + column[None, :]
        hidden = tl.load(base + tile_offsets, mask=in_keys[:, None] & in_columns[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(hidden), input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(in_keys[None, :], scores, float("-inf"))
        weights, rescale, running_max, total = _online_softmax(scores, running_max, total)
        context = tl.dot(
            weights.to(hidden.dtype), hidden, acc=context * rescale[:, None], input_precision="ieee"
        )
    context = context / tl.where(total == 0.0, 1.0, total)[:, None]

    slab = split * tl.num_programs(1) + sentence
    out_offsets = (slab * rows + row)[:, None] * d + column[None, :]
    tl.store(out + out_offsets, context.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
    tl.store(lse + slab * rows + row, running_max + tl.log2(total), mask=in_rows)


@triton.jit
def merge_splits(parts, lses, out, out_lse, all_rows, d, splits, BLOCK_D: tl.constexpr):
    """Joins the results of key splits under one softmax.

    parts: [splits, all rows, d], lses: [splits, all rows]; out: [all rows, d], out_lse: [all rows]. Grid: (all rows,).
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    highest = tl.load(lses + row)
    for split in range(1, splits):
        highest = tl.maximum(highest, tl.load(lses + split * all_rows + row))
    total = 0.0
    context = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(0, splits):
        weight = tl.exp2(tl.load(lses + split * all_rows + row) - highest)
        part = tl.load(parts + (split * all_rows + row) * d + column, mask=column < d, other=0.0)
        context += weight * part
        total += weight
    tl.store(out + row * d + column, (context / total).to(out.dtype.element_ty), mask=column < d)
    tl.store(out_lse + row, highest + tl.log2(total))


@triton.jit
def attention(
    queries, shared_keys, shared_values, begins, ends,
    slot_keys, slot_values, beam_mask, new_keys, new_values,
    prompt_context, prompt_lse, key_bias, value_bias, out,
    scale, x, h, n, capacity, used, queries_row_stride, new_row_stride,
    D_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_NEW: tl.constexpr,
    HAS_PROMPT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Multi-head attention of x rows a sentence, under one softmax, to what its rows share and to slots.

    queries: [b, x, h * d_k]; shared keys and values: [b, h, d_k, n], of which a sentence has those from begins[b] to
    ends[b]; slot keys and values: [b, h, capacity, d_k], of which the first `used` count; beam_mask: [b, x, capacity],
    True where a row may not look. With HAS_NEW the newest x slots are not written yet: their keys and values are
    new_keys and new_values, [b, x, h * d_k], and are written here. With HAS_PROMPT, `el_attention` has attended to a
    prompt: prompt_context: [b, x, h * d_k], after the value projection without its bias, prompt_lse: [b, x * h]; its
    scores lack the product with the key's bias. out: [b, x, h * d_k]. Grid: (b * h, row tiles).
    """
    # Over 50 lines: one launch is one function, and the parts share the running softmax in registers.
    sentence, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    row, column = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    in_rows, in_columns = row < x, column < D_K
    in_tile = in_rows[:, None] & in_columns[None, :]
    rows = sentence * x + row
    of_head = head * D_K + column[None, :]
    query = tl.load(queries + rows[:, None] * queries_row_stride + of_head, mask=in_tile, other=0.0)
    running_max = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    context = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    factor = scale * LOG2_E

    if HAS_SHARED:
        begin, end = tl.load(begins + sentence).to(tl.int32), tl.load(ends + sentence).to(tl.int32)
        shared_base = (sentence * h + head) * D_K * n
        for start in range(begin, end, BLOCK_KEYS):
            key = start + tl.arange(0, BLOCK_KEYS)
            seen = key < end
            tile = shared_base + column[:, None] * n + key[None, :]  # [d_k, keys]
            in_keys = in_columns[:, None] & seen[None, :]
            keys = tl.load(shared_keys + tile, mask=in_keys, other=0.0)
            scores = tl.where(seen[None, :], tl.dot(query, keys, input_precision="ieee") * factor, float("-inf"))
            weights, rescale, running_max, total = _online_softmax(scores, running_max, total)
            values = tl.load(shared_values + tile, mask=in_keys, other=0.0)
            context = tl.dot(
                weights.to(values.dtype), tl.trans(values), acc=context * rescale[:, None], input_precision="ieee"
            )

    if HAS_SLOTS:
        slot_base = (sentence * h + head) * capacity
        written = used
        if HAS_NEW:
            written = used - x
        for start in range(0, written, BLOCK_KEYS):
            key = start + tl.arange(0, BLOCK_KEYS)
            in_keys = key < written
            tile = (slot_base + key)[:, None] * D_K + column[None, :]  # [keys, d_k]
            keys = tl.load(slot_keys + tile, mask=in_keys[:, None] & in_columns[None, :], other=0.0)
            hidden = tl.load(
                beam_mask + rows[:, None] * capacity + key[None, :], mask=in_rows[:, None] & in_keys[None, :], other=1
            )
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
            scores = tl.where(hidden == 0, scores, float("-inf"))
            weights, rescale, running_max, total = _online_softmax(scores, running_max, total)
            values = tl.load(slot_values + tile, mask=in_keys[:, None] & in_columns[None, :], other=0.0)
            context = tl.dot(
                weights.to(values.dtype), values, acc=context * rescale[:, None], input_precision="ieee"
            )
        if HAS_NEW:  # a row sees its own newest slot alone
            source = rows[:, None] * new_row_stride + of_head
            target = (slot_base + written + row)[:, None] * D_K + column[None, :]
            keys = tl.load(new_keys + source, mask=in_tile, other=0.0)
            values = tl.load(new_values + source, mask=in_tile, other=0.0)
            tl.store(slot_keys + target, keys, mask=in_tile)
            tl.store(slot_values + target, values, mask=in_tile)
            hidden = tl.load(beam_mask + rows * capacity + written + row, mask=in_rows, other=1)
            score = tl.sum(query.to(tl.float32) * keys.to(tl.float32), 1) * factor
            score = tl.where(hidden == 0, score, float("-inf"))
            weights, rescale, running_max, total = _online_softmax(score[:, None], running_max, total)
            context = context * rescale[:, None] + weights * values.to(tl.float32)

    if HAS_PROMPT:
        shift = tl.load(prompt_lse + rows * h + head, mask=in_rows, other=float("-inf"))
        prompt = tl.load(prompt_context + rows[:, None] * (h * D_K) + of_head, mask=in_tile, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(key_bias + head * D_K + column, mask=in_columns, other=0.0).to(tl.float32)
            shift += tl.sum(query.to(tl.float32) * bias[None, :], 1) * factor
            prompt += tl.load(value_bias + head * D_K + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        weights, rescale, running_max, total = _online_softmax(shift[:, None], running_max, total)
        context = context * rescale[:, None] + weights * prompt

    context = context / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + rows[:, None] * (h * D_K) + of_head, context.to(out.dtype.element_ty), mask=in_tile)
