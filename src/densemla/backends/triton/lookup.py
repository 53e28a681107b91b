"""Which request, queries and chunks a program works on, found on the device.

Grids must not depend on lengths, so that a captured graph covers whatever the bound tensors hold at replay.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_TOKENS: tl.constexpr = tl.constexpr(64)

_SEARCH: tl.constexpr = tl.constexpr(256)


@triton.jit
def first_slot(queries_before, request, num_heads: tl.constexpr, BLOCK_H: tl.constexpr, ONE_QUERY: tl.constexpr):
    """Grid slot of a request's first tile: past all that the requests before it can need.

    ``ONE_QUERY``: slots are counted per query, which wastes none when every request has one. Otherwise
    per row, which wastes at most one slot per request.
    """
    if ONE_QUERY:
        slot = queries_before * ((num_heads + BLOCK_H - 1) // BLOCK_H)
    else:
        slot = queries_before * num_heads // BLOCK_H + request
    return slot


@triton.jit
def queries_of(request, cu_seqlens_q, batch, total_q):
    """Query rows ``[first, last)`` of a request; request number ``batch`` holds the rows of no request."""
    first = tl.load(cu_seqlens_q + request)
    last = tl.load(cu_seqlens_q + tl.minimum(request + 1, batch))
    last = tl.where(request == batch, total_q, last)
    # Lengths on a device can't be checked: nothing they hold may lead outside the tensors.
    first = tl.minimum(tl.maximum(first, 0), total_q)
    last = tl.minimum(tl.maximum(last, first), total_q)
    return first, last


@triton.jit
def request_of_slot(
    slot,
    cu_seqlens_q,
    batch,
    num_heads: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ONE_QUERY: tl.constexpr,
):
    """The last request whose first slot is not past ``slot``."""
    guess = batch
    if ONE_QUERY:
        # Nearly always right in a decode step, and it saves reading every request.
        guess = tl.minimum(slot // ((num_heads + BLOCK_H - 1) // BLOCK_H), batch)
    here = tl.load(cu_seqlens_q + guess)
    after = tl.load(cu_seqlens_q + tl.minimum(guess + 1, batch))
    if (guess == batch) | (here != guess) | (after != guess + 1):
        count = 0
        for start in range(0, batch + 1, _SEARCH):
            request = start + tl.arange(0, _SEARCH)
            inside = request <= batch
            before = tl.load(cu_seqlens_q + request, mask=inside, other=0)
            first = first_slot(before, request, num_heads, BLOCK_H, ONE_QUERY)
            count += tl.sum((inside & (first <= slot)).to(tl.int32))
        guess = tl.maximum(count - 1, 0)
    return guess


@triton.jit
def request_of_query(query, cu_seqlens_q, batch):
    """The request that holds a query row; ``batch`` when none does."""
    return request_of_slot(query, cu_seqlens_q, batch, 1, 1, True)


@triton.jit
def length_of(request, cache_seqlens, batch, capacity):
    """Visible length of a request, never beyond what plan and page table hold; 0 for request ``batch``."""
    length = tl.load(cache_seqlens + request, mask=request < batch, other=0)
    return tl.minimum(tl.maximum(length, 0), capacity)


@triton.jit
def visible_to(query, last, length, query_cache_seqlens, mask, EXPLICIT: tl.constexpr):
    """Visible tokens of query rows; ``last`` is the end of their request's rows."""
    if EXPLICIT:  # noqa: SIM108 (a compile-time branch)
        visible = tl.load(query_cache_seqlens + query, mask=mask, other=0)
    else:
        visible = length - (last - query) + 1
    return tl.minimum(tl.maximum(visible, 0), length)


@triton.jit
def split_width(chunks, active_splits, single_split_chunks):
    """``densemla.splits.chunks_per_split``, at least 1 so that it can be divided by."""
    per_split = (chunks + active_splits - 1) // active_splits
    return tl.maximum(tl.where(chunks <= single_split_chunks, chunks, per_split), 1)
