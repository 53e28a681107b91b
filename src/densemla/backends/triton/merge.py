"""The merge kernel: live partials of a query row into its output and LSE, by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lookup import CHUNK_TOKENS, length_of, queries_of, request_of_query, split_width, visible_to

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=[
        "batch",
        "total_q",
        "max_total_q",
        "capacity",
        "active_splits",
        "single_split_chunks",
        "heads_each",
    ]
)
def merge(
    partial_output,
    partial_lse,
    output,
    lse,
    cache_seqlens,
    cu_seqlens_q,
    query_cache_seqlens,
    batch,
    total_q,
    max_total_q,
    capacity,
    active_splits,
    single_split_chunks,
    heads_each,
    output_stride,
    output_head_stride,
    lse_stride,
    lse_head_stride,
    num_heads: tl.constexpr,
    kv_lora_rank: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EXPLICIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge ``COLUMNS`` columns of ``heads_each`` rows of one query.

    Rows whose request has one split are already written. Tile shapes fix the order of the sums, so they
    are the plan's and do not depend on the batch.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    groups = (num_heads + heads_each - 1) // heads_each
    row = tl.program_id(0) // groups
    first_head = tl.program_id(0) % groups * heads_each
    request = request_of_query(row, cu_seqlens_q, batch)
    _, last = queries_of(request, cu_seqlens_q, batch, total_q)
    length = length_of(request, cache_seqlens, batch, capacity)
    visible = visible_to(row, last, length, query_cache_seqlens, True, EXPLICIT)
    chunks = (length + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    width = split_width(chunks, active_splits, single_split_chunks)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if chunks <= width:
        return
    # Exactly the splits that this query sees; the others' scratch may hold anything.
    splits = ((visible + CHUNK_TOKENS - 1) // CHUNK_TOKENS + width - 1) // width
    split_stride = max_total_q.to(tl.int64) * num_heads
    query = row.to(tl.int64)
    for index in range(0, tl.minimum(heads_each, num_heads - first_head)):
        head = first_head.to(tl.int64) + index
        first_partial = query * num_heads + head
        top = float("-inf")
        totals = tl.zeros([BLOCK_S], tl.float32)
        sums = tl.zeros([BLOCK_S, COLUMNS], tl.float32)
        for start in range(0, splits, BLOCK_S):
            split = start + tl.arange(0, BLOCK_S)
            rows = first_partial + split * split_stride
            logarithm = tl.load(partial_lse + rows, mask=split < splits, other=float("-inf"))
            values = tl.load(
                partial_output + rows[:, None] * kv_lora_rank + column[None, :],
                mask=(split < splits)[:, None] & (column < kv_lora_rank)[None, :],
                other=0.0,
            ).to(tl.float32)
            new_top = tl.maximum(top, tl.max(logarithm))
            # Where nothing is seen yet there is no finite maximum to subtract.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            keep = tl.exp2((top - shift) * _LOG2_E)
            weight = tl.exp2((logarithm - shift) * _LOG2_E)
            totals = totals * keep + weight
            sums = sums * keep + values * weight[:, None]
            top = new_top
        total = tl.sum(totals)
        seen = total != 0.0
        total = tl.where(seen, total, 1.0)
        merged = tl.sum(sums, 0) / total
        if tl.program_id(1) == 0:
            logarithm = tl.where(seen, top + tl.log2(total) * _LN_2, float("-inf"))
            tl.store(lse + query * lse_stride + head * lse_head_stride, logarithm)
        tl.store(
            output + query * output_stride + head * output_head_stride + column,
            merged.to(output.dtype.element_ty),
            mask=column < kv_lora_rank,
        )
