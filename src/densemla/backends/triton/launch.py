"""From a binding to kernel launches: grids that cover any lengths, and the arguments."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...binding import Binding
from ...kv_formats import PACKED
from ...splits import ceil_div
from . import forward as forward_kernel
from .merge import merge
from .tiles import CONVERTED_Q, NATIVE_FP8, Device, Tiles, computing_dtype, padded

_MIXED_BLOCK = 16
"""Cache rows in a block that rows of a tile see differently: it passes through registers."""

_MERGE_ELEMENTS = 8192
"""Partial values that a merge program reads at once: 64 for each of its threads."""

_MOST_PARTIALS = 64
"""Partials of one row among them."""

_MERGE_PROGRAMS_PER_MULTIPROCESSOR = 16
"""Beyond this many, merge programs take several heads each: starting one costs as much as a row."""


def launch(binding: Binding, tiles: Tiles, device: Device) -> None:
    """Enqueue one step on the current stream."""
    if binding.total_q == 0:
        return
    if CONVERTED_Q in binding.scratch:
        # Ahead of the kernel: a product takes its left side from shared memory only as it was loaded.
        binding.scratch[CONVERTED_Q][: binding.total_q].copy_(binding.q)
    chained = binding.active_splits > 1
    arguments = forward_arguments(binding, tiles, device.capability, dependents=chained)
    programs = (arguments["slots"] * binding.active_splits,)
    options = {"launch_pdl": True} if arguments["AFTER"] else {}
    forward_kernel.forward[programs](**arguments, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options)
    if chained:
        arguments = merge_arguments(binding, device)
        caps = binding.plan.caps
        rows = binding.total_q * ceil_div(caps.num_q_heads, arguments["heads_each"])
        grid = (rows, ceil_div(caps.kv_lora_rank, arguments["COLUMNS"]))
        options = {"launch_pdl": True} if arguments["DEPENDENT"] else {}
        merge[grid](**arguments, num_warps=4, **options)


def slots_of(binding: Binding, block_h: int) -> int:
    """Tiles that any distribution of the queries over the requests fits in; pads count as a request."""
    caps = binding.plan.caps
    if one_query(binding):
        return binding.total_q * ceil_div(caps.num_q_heads, block_h)
    return binding.total_q * caps.num_q_heads // block_h + binding.batch + 1


def one_query(binding: Binding) -> bool:
    """Whether slots are counted per query: no waste where each request has one, as in plain decode."""
    return binding.total_q <= binding.batch


def _lengths(binding: Binding) -> dict[str, Any]:
    caps = binding.plan.caps
    return {
        "cache_seqlens": binding.cache_seqlens,
        "cu_seqlens_q": binding.cu_seqlens_q,
        "query_cache_seqlens": binding.query_cache_seqlens,
        "batch": binding.batch,
        "total_q": binding.total_q,
        "max_total_q": caps.max_total_q,
        "capacity": min(caps.max_cache_tokens, binding.page_table.shape[1] * caps.page_size),
        "active_splits": binding.active_splits,
        "single_split_chunks": min(binding.plan.single_split_chunks, caps.max_chunks),
        "output": binding.output,
        "lse": binding.lse,
        "partial_output": binding.scratch["partial_output"],
        "partial_lse": binding.scratch["partial_lse"],
        "output_stride": binding.output.stride(0),
        "output_head_stride": binding.output.stride(1),
        "lse_stride": binding.lse.stride(0),
        "lse_head_stride": binding.lse.stride(1),
        "num_heads": caps.num_q_heads,
        "kv_lora_rank": caps.kv_lora_rank,
        "EXPLICIT": binding.query_cache_seqlens is not None,
    }


def forward_arguments(
    binding: Binding, tiles: Tiles, capability: tuple[int, int], *, dependents: bool
) -> dict[str, Any]:
    """Arguments of the forward kernel by name; what does not apply is None."""
    caps, fmt = binding.plan.caps, binding.plan.caps.kv_format
    cache = binding.kv_cache.view(torch.uint8) if fmt.dtype.itemsize == 1 else binding.kv_cache
    q = binding.scratch.get(CONVERTED_Q, binding.q)
    rope = padded(caps.qk_rope_head_dim) if caps.qk_rope_head_dim else 16
    latent_tiles = rope_tiles = None
    if tiles.tile_loads and _tiles_can_load(cache, tiles, caps.kv_lora_rank, caps.qk_rope_head_dim):
        latent_tiles = _descriptor(cache, tiles.block_n, padded(caps.kv_lora_rank))
        rope_tiles = _descriptor(cache, tiles.block_n, rope) if caps.qk_rope_head_dim else None
    if caps.kv_dtype == PACKED:
        stored = forward_kernel.PACKED
    else:
        stored = forward_kernel.FP8 if fmt.scaled else forward_kernel.PLAIN
    return _lengths(binding) | {
        "q": q,
        "latent_tiles": latent_tiles,
        "rope_tiles": rope_tiles,
        "kv_cache": cache,
        "page_table": binding.page_table,
        "q_scale": binding.q_scale,
        "kv_scale": binding.kv_scale,
        "sm_scale": binding.sm_scale,
        "num_pages": binding.num_pages,
        "slots": slots_of(binding, tiles.block_h),
        "q_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "page_stride": cache.stride(0),
        "row_stride": cache.stride(1),
        "table_stride": binding.page_table.stride(0),
        "qk_rope_head_dim": caps.qk_rope_head_dim,
        "page_size": caps.page_size,
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
        "RANK": padded(caps.kv_lora_rank),
        "ROPE": rope,
        "DTYPE": tl.float16 if computing_dtype(caps) is torch.float16 else tl.bfloat16,
        "FORMAT": stored,
        "NATIVE_FP8": capability >= NATIVE_FP8,
        "ONE_QUERY": one_query(binding),
        "MIXED": caps.max_total_q > 1 and caps.num_q_heads % tiles.block_h != 0,
        "TILE_LOADS": latent_tiles is not None,
        "DEPENDENTS": dependents and capability >= (9, 0),
        "STAGES": tiles.num_stages,
        "MIXED_N": min(tiles.block_n, _MIXED_BLOCK),
        "SUM_PARTS": tiles.num_warps // 4 if tiles.block_h == 64 else 0,
        "AFTER": capability >= (9, 0),
    }


def merge_arguments(binding: Binding, device: Device) -> dict[str, Any]:
    """Arguments of the merge kernel by name."""
    plan = binding.plan
    rows = binding.total_q * plan.caps.num_q_heads
    partials = min(_power_of_two(plan.num_splits), _MOST_PARTIALS)
    programs = device.multiprocessors * _MERGE_PROGRAMS_PER_MULTIPROCESSOR
    return _lengths(binding) | {
        "heads_each": min(ceil_div(rows, programs), plan.caps.num_q_heads),
        "COLUMNS": min(padded(plan.caps.kv_lora_rank), _MERGE_ELEMENTS // partials),
        "BLOCK_S": partials,
        "DEPENDENT": device.capability >= (9, 0),
    }


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _tiles_can_load(cache: torch.Tensor, tiles: Tiles, rank: int, rope: int) -> bool:
    """Whether the tensor copy engine can address this cache: 16-byte strides, blocks within pages."""
    return (
        cache.shape[0] > 0
        and cache.shape[1] % tiles.block_n == 0
        and padded(rank) == rank
        and (rope == 0 or padded(rope) == rope)
        and cache.data_ptr() % 16 == 0
        and all(stride > 0 and stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:2])
    )


def _descriptor(cache: torch.Tensor, block_n: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, block_n, columns])


def version() -> tuple[int, int]:
    """Triton's (major, minor)."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
