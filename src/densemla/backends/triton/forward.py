"""The split forward kernel: one program attends one tile of query rows over one split of a request.

Rows are (query, head) pairs of one request, queries outermost, packed from the request's first query; so
all heads and queries that fit a tile share each cache row that is read. A block of cache rows serves both
products: as keys, all its columns; as values, its first ``kv_lora_rank``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lookup import CHUNK_TOKENS, first_slot, length_of, queries_of, request_of_slot, split_width, visible_to

PLAIN: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
PACKED: tl.constexpr = tl.constexpr(2)

_PACKED_GROUP: tl.constexpr = tl.constexpr(128)
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
_LIFT: tl.constexpr = tl.constexpr(15.0)
"""Largest weight that float16 products begin with (log2): float16 loses what is below 2^-24, and under one token
with nearly all of the weight the others together may have most of the value."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _e4m3(byte, NATIVE_FP8: tl.constexpr):
    """Bytes that hold e4m3fn as float16, exactly."""
    if NATIVE_FP8:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Sign, exponent and mantissa moved to float16's places leave an exponent that is 8 too low.
        bits = ((byte & 0x80).to(tl.uint16) << 8) | ((byte & 0x7F).to(tl.uint16) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return value


@triton.jit
def _load_latent(
    rows,
    in_cache,
    columns,
    kv_lora_rank: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Latent part of the cache rows that start at pointers ``rows``, [len(rows), len(columns)]."""
    mask = in_cache[:, None]
    if columns.shape[0] != kv_lora_rank:
        mask = mask & (columns < kv_lora_rank)[None, :]
    stored = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0)
    if FORMAT == PLAIN:
        latent = stored
    elif FORMAT == FP8:
        latent = _e4m3(stored, NATIVE_FP8).to(DTYPE)
    else:
        groups: tl.constexpr = columns.shape[0] // _PACKED_GROUP
        scales = (rows + kv_lora_rank).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, groups)[None, :]
        scale = tl.load(scales, mask=in_cache[:, None], other=0.0)
        grouped = _e4m3(stored, NATIVE_FP8).to(tl.float32).reshape(rows.shape[0], groups, _PACKED_GROUP)
        latent = (grouped * scale[:, :, None]).reshape(rows.shape[0], columns.shape[0]).to(DTYPE)
    return latent


@triton.jit
def _load_rope(
    rows,
    in_cache,
    columns,
    kv_lora_rank: tl.constexpr,
    qk_rope_head_dim: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Rope part of the cache rows that start at pointers ``rows``."""
    mask = in_cache[:, None]
    if columns.shape[0] != qk_rope_head_dim:
        mask = mask & (columns < qk_rope_head_dim)[None, :]
    if FORMAT == PACKED:
        start: tl.constexpr = kv_lora_rank + kv_lora_rank // _PACKED_GROUP * 4
        pointers = (rows + start).to(tl.pointer_type(tl.bfloat16))[:, None] + columns[None, :]
        rope = tl.load(pointers, mask=mask, other=0.0).to(DTYPE)
    else:
        rope = tl.load(rows[:, None] + kv_lora_rank + columns[None, :], mask=mask, other=0)
        if FORMAT == FP8:
            rope = _e4m3(rope, NATIVE_FP8).to(DTYPE)
    return rope


@triton.jit
def _page_ids(pages, token, page_size: tl.constexpr, mask):
    return tl.load(pages + token // page_size, mask=mask, other=-1)


@triton.jit
def _rows_of(kv_cache, page, token, num_pages, page_stride, row_stride, page_size: tl.constexpr):
    """Pointers to the rows of ``token`` in its ``page``, and whether that page exists."""
    in_cache = (page >= 0) & (page < num_pages)
    rows = kv_cache + page.to(tl.int64) * page_stride + (token % page_size).to(tl.int64) * row_stride
    return rows, in_cache


@triton.jit
def _load_queries(rows, live, columns, rope_columns, kv_lora_rank: tl.constexpr, qk_rope_head_dim: tl.constexpr):
    """Latent and rope parts of the query rows at pointers ``rows``."""
    latent = tl.load(rows[:, None] + columns[None, :], mask=live[:, None] & (columns < kv_lora_rank)[None, :], other=0)
    rope = latent
    if qk_rope_head_dim > 0:
        rope = tl.load(
            rows[:, None] + kv_lora_rank + rope_columns[None, :],
            mask=live[:, None] & (rope_columns < qk_rope_head_dim)[None, :],
            other=0,
        )
    return latent, rope


@triton.jit
def _logits_of_one_sum(q_latent, q_rope, latent, rope, scale, always):
    """Base-2 logits of a block; both products add to one sum."""
    scores = tl.zeros([q_latent.shape[0], latent.shape[0]], tl.float32)
    # Always true, against the chain of products that ``_absorb`` tells of.
    if always:
        scores = tl.dot(q_rope, rope.T)
    return tl.dot(q_latent, latent.T, scores) * scale


@triton.jit
def _logits(q_latent, q_rope, latent, rope, scale, HAS_ROPE: tl.constexpr):
    """Base-2 logits of a block."""
    latent_scores = tl.dot(q_latent, latent.T)
    if HAS_ROPE:
        rope_scores = tl.dot(q_rope, rope.T)
        logits = latent_scores * scale + rope_scores * scale
    else:
        logits = latent_scores * scale
    return logits


@triton.jit
def _scaled(total, keep, SUM_PARTS: tl.constexpr):
    if SUM_PARTS > 0:  # noqa: SIM108 (a compile-time branch)
        total = total * keep[:, None, None]
    else:
        total = total * keep
    return total


@triton.jit
def _row_sums(weights, SUM_PARTS: tl.constexpr):
    """Sums of weights by row; with ``SUM_PARTS``, one for every thread that holds some of the row.

    A warpgroup's product gives each group of 4 threads 2 of every 8 columns.
    """
    if SUM_PARTS > 0:
        rows: tl.constexpr = weights.shape[0]
        octets: tl.constexpr = weights.shape[1] // (SUM_PARTS * 8)
        sums = tl.sum(tl.sum(weights.reshape(rows, SUM_PARTS, octets, 4, 2), 4), 2)
    else:
        sums = tl.sum(weights, 1)
    return sums


@triton.jit
def _absorb(logits, values, top, total, acc, always, SUM_PARTS: tl.constexpr):
    """Add a block to the running softmax: what its weights are relative to (base 2), their sum, weighted values."""
    new_top = top
    keep = top
    # Always true. Through a branch the compiler does not see two products in a chain, for which it would
    # give every warpgroup all of the logits to compute.
    if always:
        highest = tl.max(logits, 1)
        if values.dtype == tl.float16:
            highest -= _LIFT
        new_top = tl.maximum(top, highest)
        keep = tl.exp2(top - new_top)
        logits = tl.exp2(logits - new_top[:, None])
        total = _scaled(total, keep, SUM_PARTS) + _row_sums(logits, SUM_PARTS)
    acc = tl.dot(logits.to(values.dtype), values, acc * keep[:, None])
    return new_top, total, acc


@triton.jit
def _edge_blocks(
    q_latent,
    q_rope,
    kv_cache,
    pages,
    visible,
    begin,
    end,
    scale,
    top,
    total,
    acc,
    num_pages,
    page_stride,
    row_stride,
    kv_lora_rank: tl.constexpr,
    qk_rope_head_dim: tl.constexpr,
    page_size: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MIXED: tl.constexpr,
    SUM_PARTS: tl.constexpr,
):
    """Blocks from ``begin`` to ``end`` of which rows may see only a part.

    ``MIXED``: rows may differ in what they see, so values that are not finite are dropped from the product: a
    weight of 0 would not stop them. Rows that do see such values meet them in their logits.
    """
    columns = tl.arange(0, RANK)
    rope_columns = tl.arange(0, ROPE)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MIXED else 2):
        token = start + tl.arange(0, BLOCK_N)
        page = _page_ids(pages, token, page_size, token < end)
        # Rows that nobody sees are not read.
        rows, in_cache = _rows_of(kv_cache, page, token, num_pages, page_stride, row_stride, page_size)
        latent = _load_latent(rows, in_cache, columns, kv_lora_rank, DTYPE, FORMAT, NATIVE_FP8)
        rope = latent
        if qk_rope_head_dim > 0:
            rope = _load_rope(rows, in_cache, rope_columns, kv_lora_rank, qk_rope_head_dim, DTYPE, FORMAT, NATIVE_FP8)
        logits = _logits(q_latent, q_rope, latent, rope, scale, qk_rope_head_dim > 0)
        if MIXED:
            wide = latent.to(tl.float32)
            zero = wide - wide
            logits += tl.sum(zero, 1)[None, :]
            latent = tl.where(zero == 0.0, wide, 0.0).to(DTYPE)
        logits = tl.where(token[None, :] < tl.minimum(visible, end)[:, None], logits, float("-inf"))
        top, total, acc = _absorb(logits, latent, top, total, acc, begin < end, SUM_PARTS)
    return top, total, acc


@triton.jit(
    do_not_specialize=[
        "batch",
        "total_q",
        "max_total_q",
        "capacity",
        "active_splits",
        "single_split_chunks",
        "num_pages",
        "slots",
    ]
)
def forward(
    q,
    latent_tiles,
    rope_tiles,
    kv_cache,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    query_cache_seqlens,
    q_scale,
    kv_scale,
    output,
    lse,
    partial_output,
    partial_lse,
    sm_scale,
    batch,
    total_q,
    max_total_q,
    capacity,
    active_splits,
    single_split_chunks,
    num_pages,
    slots,
    q_stride,
    q_head_stride,
    page_stride,
    row_stride,
    table_stride,
    output_stride,
    output_head_stride,
    lse_stride,
    lse_head_stride,
    num_heads: tl.constexpr,
    kv_lora_rank: tl.constexpr,
    qk_rope_head_dim: tl.constexpr,
    page_size: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    MIXED: tl.constexpr,
    EXPLICIT: tl.constexpr,
    TILE_LOADS: tl.constexpr,
    DEPENDENTS: tl.constexpr,
    STAGES: tl.constexpr,
    MIXED_N: tl.constexpr,
    SUM_PARTS: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Publish one split of one tile of rows.

    ``AFTER``: launched before the kernels ahead of it have ended, so it waits for them first. ``SUM_PARTS``:
    warpgroups that share a row, or 0 where a row's weights are added up in every block.

    ``latent_tiles`` and ``rope_tiles`` are tensor descriptors of the cache, or None where it is read through
    pointers; fp8 and packed caches come as bytes. Page ids outside the cache read as zeros.

    ``partial_lse`` is written for every row (-inf where the row sees nothing of the split), and with it
    either the partial output or, when its request has one split, output and LSE themselves.
    """
    # In this order: the merge reads lengths before its own wait, so what wrote them must be over when it starts.
    if AFTER:
        gdc_wait()
    if DEPENDENTS:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # Tiles innermost: those that read the same cache rows run side by side and share them in the L2.
    split = program // slots
    slot = program % slots
    if ONE_QUERY:
        # Nearly always the request found below: its length is on the way meanwhile.
        guess = tl.minimum(slot // ((num_heads + BLOCK_H - 1) // BLOCK_H), batch)
        length = length_of(guess, cache_seqlens, batch, capacity)
        request = request_of_slot(slot, cu_seqlens_q, batch, num_heads, BLOCK_H, ONE_QUERY)
        if request != guess:
            length = length_of(request, cache_seqlens, batch, capacity)
    else:
        request = request_of_slot(slot, cu_seqlens_q, batch, num_heads, BLOCK_H, ONE_QUERY)
        length = length_of(request, cache_seqlens, batch, capacity)
    first, last = queries_of(request, cu_seqlens_q, batch, total_q)
    tile = slot - first_slot(first, request, num_heads, BLOCK_H, ONE_QUERY)
    count = (last - first) * num_heads
    if (tile < 0) | (tile * BLOCK_H >= count):
        return
    row = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    live = row < count
    query = (first + row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    columns = tl.arange(0, RANK)
    rope_columns = tl.arange(0, ROPE)
    visible = visible_to(first + row // num_heads, last, length, query_cache_seqlens, live, EXPLICIT)
    visible = tl.where(live, visible, 0)
    if not EXPLICIT:
        # Later queries see more, so the tile's first and last rows bound the others.
        last_row = tl.minimum(tile * BLOCK_H + BLOCK_H, count) - 1
        nearest = visible_to(first + tile * BLOCK_H // num_heads, last, length, query_cache_seqlens, True, EXPLICIT)
        farthest = visible_to(first + last_row // num_heads, last, length, query_cache_seqlens, True, EXPLICIT)
    else:
        farthest = tl.max(visible)
        nearest = tl.min(tl.where(live, visible, farthest))

    chunks = (length + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    width = split_width(chunks, active_splits, single_split_chunks)
    single = chunks <= width
    begin = tl.minimum(split * width, chunks) * CHUNK_TOKENS
    end = tl.minimum(begin + width * CHUNK_TOKENS, farthest)
    partial_row = (split.to(tl.int64) * max_total_q + query) * num_heads + head
    if (begin >= end) & ((split > 0) | (not single)):
        tl.store(partial_lse + partial_row, float("-inf"), mask=live)
        return

    scale = sm_scale * _LOG2_E
    if q_scale is not None:
        scale = scale * tl.load(q_scale)
    if FORMAT == FP8:
        values_scale = tl.load(kv_scale)
        scale = scale * values_scale

    top = tl.full([BLOCK_H], _LOWEST, tl.float32)
    if SUM_PARTS > 0:  # noqa: SIM108 (a compile-time branch)
        total = tl.zeros([BLOCK_H, SUM_PARTS, 4], tl.float32)
    else:
        total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, RANK], tl.float32)
    pages = page_table + request.to(tl.int64) * table_stride
    # Blocks that every row sees whole need no masks.
    whole = begin + tl.maximum(tl.minimum(nearest, end) - begin, 0) // BLOCK_N * BLOCK_N
    offset = tl.arange(0, BLOCK_N)
    ONE_PAGE: tl.constexpr = page_size % BLOCK_N == 0

    # A page's id is read one block ahead of its rows.
    if ONE_PAGE:
        page = _page_ids(pages, begin, page_size, begin < whole)
    else:
        page = _page_ids(pages, begin + offset, page_size, begin + offset < whole)
    # Their read overlaps that of the page's id.
    q_latent, q_rope = _load_queries(
        q + query * q_stride + head * q_head_stride,
        live, columns, rope_columns, kv_lora_rank, qk_rope_head_dim,
    )  # fmt: skip
    for start in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        if TILE_LOADS:
            # A page id outside the cache is out of bounds, which the copy engine fills with zeros.
            latent = latent_tiles.load([page, start % page_size, 0]).reshape(BLOCK_N, RANK)
            rope = latent
            if qk_rope_head_dim > 0:
                rope = rope_tiles.load([page, start % page_size, kv_lora_rank]).reshape(BLOCK_N, ROPE)
        else:
            rows, in_cache = _rows_of(kv_cache, page, start + offset, num_pages, page_stride, row_stride, page_size)
            in_cache = in_cache & (offset >= 0)  # one flag for each row, also where the block lies in one page
            latent = _load_latent(rows, in_cache, columns, kv_lora_rank, DTYPE, FORMAT, NATIVE_FP8)
            rope = latent
            if qk_rope_head_dim > 0:
                rope = _load_rope(
                    rows, in_cache, rope_columns, kv_lora_rank, qk_rope_head_dim, DTYPE, FORMAT, NATIVE_FP8
                )
        following = start + BLOCK_N
        if ONE_PAGE:
            page = _page_ids(pages, following, page_size, following < whole)
        else:
            page = _page_ids(pages, following + offset, page_size, following + offset < whole)
        if TILE_LOADS and BLOCK_H == 64 and qk_rope_head_dim > 0:
            logits = _logits_of_one_sum(q_latent, q_rope, latent, rope, scale, start < whole)
        else:
            logits = _logits(q_latent, q_rope, latent, rope, scale, qk_rope_head_dim > 0)
        if TILE_LOADS and BLOCK_H == 64:
            # Always true, as the machine-code compiler sees and removes. The pipeliner starts the next block's
            # load ahead of a branch, but after a product.
            if start < whole:
                top, total, acc = _absorb(logits, latent, top, total, acc, begin < end, SUM_PARTS)
        else:
            top, total, acc = _absorb(logits, latent, top, total, acc, begin < end, SUM_PARTS)

    # The rest: at most one block of what all rows see, then small blocks that spare registers.
    same_end = end
    if MIXED:
        same_end = tl.maximum(tl.minimum(nearest, end), whole)
    top, total, acc = _edge_blocks(
        q_latent, q_rope, kv_cache, pages, visible, whole, same_end, scale, top, total, acc,
        num_pages, page_stride, row_stride, kv_lora_rank, qk_rope_head_dim, page_size,
        BLOCK_N, RANK, ROPE, DTYPE, FORMAT, NATIVE_FP8, False, SUM_PARTS,
    )  # fmt: skip
    if MIXED:
        top, total, acc = _edge_blocks(
            q_latent, q_rope, kv_cache, pages, visible, same_end, end, scale, top, total, acc,
            num_pages, page_stride, row_stride, kv_lora_rank, qk_rope_head_dim, page_size,
            MIXED_N, RANK, ROPE, DTYPE, FORMAT, NATIVE_FP8, True, SUM_PARTS,
        )  # fmt: skip

    if SUM_PARTS > 0:
        total = tl.sum(tl.sum(total, 2), 1)
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    acc = acc / total[:, None]
    if FORMAT == FP8:
        acc = acc * values_scale
    logarithm = tl.where(seen, (top + tl.log2(total)) * _LN_2, float("-inf"))
    tl.store(partial_lse + partial_row, logarithm, mask=live)
    mask = live[:, None] & (columns < kv_lora_rank)[None, :]
    if single:
        tl.store(lse + query * lse_stride + head * lse_head_stride, logarithm, mask=live)
        out_rows = output + query * output_stride + head * output_head_stride
        tl.store(out_rows[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=mask)
    else:
        partial_rows = partial_output + partial_row * kv_lora_rank
        tl.store(partial_rows[:, None] + columns[None, :], acc.to(partial_output.dtype.element_ty), mask=mask)
