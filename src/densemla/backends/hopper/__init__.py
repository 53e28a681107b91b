"""The Hopper backend: wgmma and TMA kernels in CUDA C++ for compute capability 9.0, built when first needed.

Why not Gluon: the shapes of its tensors are powers of two, and short caches of 96 rows go to tiles of 48. Importing
this package neither compiles nor touches CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import torch

from ...errors import ContractError
from ...splits import CHUNK_TOKENS, ceil_div
from .. import SPLIT_FEATURES, cuda, load
from .driver import Kernel, compile_cubin, find_compiler, tensor_map
from .source import DecodeVariant, Formats, MergeVariant, RowsVariant, SwappedVariant

if TYPE_CHECKING:
    from ...binding import Binding
    from ...caps import Caps
    from .. import Backend

_CAPABILITY = (9, 0)
_LOG2E = 1.4426950408889634
_ALIGNMENT = 16  # bytes: of TMA, and of the kernels' own loads and stores
_BOX_COLUMNS = 64
_FP8 = torch.float8_e4m3fn
_MERGE_THREADS = 256
_MANY_SPLITS = 12
"""From this many splits on, the merge shares a row among the warps of a block."""

_PAGE_SIZES = (16, 32, 64, 128, 256)
_MOST_HEADS = 128

TILES = (16, 48, 64)
"""Query rows that a block decodes."""

FP8_TILES = (16, 32, 48)
"""The same of fp8 caches."""

SCORERS = {16: 1, 48: 1}
"""Warpgroups that score, of the tiles of decode_swapped.cu."""

FP8_SCORERS = {16: 1, 32: 2, 48: 1}
"""The same of fp8 caches."""

PAIRED: frozenset[int] = frozenset()
"""Tiles of decode_swapped.cu of which two share what they load of the cache."""

_CHUNK_CYCLES = {16: 2400, 48: 3700, 64: 2800}
"""About what a block takes for a chunk that is in the L2; only the ratios matter, here and below."""

_FP8_CHUNK_CYCLES = {16: 1200, 32: 1500, 48: 2200}

_READ_CYCLES = 3900
"""About what it takes at least for a chunk that every multiprocessor has to read from memory; half of it for fp8."""

_FIXED_CYCLES = {16: 20000, 32: 21000, 48: 23000, 64: 33000}
"""About what a block takes besides its chunks."""

_MULTIPROCESSORS = 132
"""Of an H100 or H200, for the estimate alone."""


class _DecodeParams(ctypes.Structure):
    """``Params`` of tile.cu."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("partial_output", ctypes.c_void_p),
        ("partial_lse", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("cache_seqlens", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("query_cache_seqlens", ctypes.c_void_p),
        ("q_stride_query", ctypes.c_longlong),
        ("q_stride_head", ctypes.c_longlong),
        ("output_stride_query", ctypes.c_longlong),
        ("output_stride_head", ctypes.c_longlong),
        ("lse_stride_query", ctypes.c_longlong),
        ("lse_stride_head", ctypes.c_longlong),
        ("table_stride", ctypes.c_longlong),
        ("table_width", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("num_pages", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("total_q", ctypes.c_int),
        ("max_total_q", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("single_split_chunks", ctypes.c_int),
        ("score_scale", ctypes.c_float),
        ("q_scale", ctypes.c_void_p),
        ("kv_scale", ctypes.c_void_p),
    )


class _MergeParams(ctypes.Structure):
    """``Params`` of merge.cu."""

    _fields_ = (
        ("output", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("partial_output", ctypes.c_void_p),
        ("partial_lse", ctypes.c_void_p),
        ("cache_seqlens", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("output_stride_query", ctypes.c_longlong),
        ("output_stride_head", ctypes.c_longlong),
        ("lse_stride_query", ctypes.c_longlong),
        ("lse_stride_head", ctypes.c_longlong),
        ("table_tokens", ctypes.c_longlong),
        ("batch", ctypes.c_int),
        ("total_q", ctypes.c_int),
        ("max_total_q", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("single_split_chunks", ctypes.c_int),
    )


def tiles(caps: Caps) -> tuple[int, ...]:
    """The tiles that there are for the cache of ``caps``."""
    return FP8_TILES if caps.kv_dtype is _FP8 else TILES


@lru_cache
def tile_rows(caps: Caps) -> int:
    """The one of :func:`tiles` that decodes a full batch of the longest requests in the fewest cycles.

    From ``caps`` alone: it decides the order of sums, so lengths and batches must not change it.
    """
    rows = cuda.rows_per_request(caps)
    chunks = caps.max_batch * ceil_div(caps.max_cache_tokens, CHUNK_TOKENS)

    fp8 = caps.kv_dtype is _FP8
    cycles = _FP8_CHUNK_CYCLES if fp8 else _CHUNK_CYCLES

    def cost(tile: int) -> tuple[int, int]:
        computed = ceil_div(chunks * ceil_div(rows, tile), _MULTIPROCESSORS) * cycles[tile]
        read = ceil_div(chunks, _MULTIPROCESSORS) * _READ_CYCLES // (1 + fp8)
        return _FIXED_CYCLES[tile] + max(computed, read), tile

    return min(tiles(caps), key=cost)


def cluster_blocks(caps: Caps) -> int:
    """Blocks that load the cache together, and decode so many tiles of a request."""
    return 2 if tile_rows(caps) in PAIRED else 1


def most_tiles(total_q: int, batch: int, heads: int, rows: int) -> int:
    """Tiles of ``rows`` that ``total_q`` queries of ``batch`` requests need at most, however they are shared out.

    A request's ``n * heads`` rows are a multiple of ``gcd(heads, rows)``, so rounding them up to whole tiles
    adds at most ``rows - gcd(heads, rows)``.
    """
    slack = min(batch, total_q) * (rows - gcd(heads, rows))
    return (total_q * heads + slack) // rows


def unsupported(caps: Caps) -> str | None:
    """What of ``caps`` these kernels do not do, whatever the device; None when they do it all."""
    if any(dtype not in (torch.bfloat16, _FP8) for dtype in (caps.q_dtype, caps.kv_dtype)):
        return f"it takes queries and caches in bf16 or float8_e4m3fn, not {caps.q_dtype} and {caps.kv_dtype}"
    if caps.output_dtype is not torch.bfloat16:
        return f"it writes bf16, not {caps.output_dtype}"
    if (caps.kv_lora_rank, caps.qk_rope_head_dim) != (512, 64):
        return f"it takes kv_lora_rank 512 and qk_rope_head_dim 64, not {caps.kv_lora_rank} and {caps.qk_rope_head_dim}"
    if caps.page_size not in _PAGE_SIZES:
        return f"it takes a page size of {', '.join(map(str, _PAGE_SIZES))}, not {caps.page_size}"
    if caps.num_q_heads > _MOST_HEADS:
        return f"it takes at most {_MOST_HEADS} heads, not {caps.num_q_heads}"
    return cuda.token_refusal(caps)


class HopperBackend:
    name = "hopper"
    features = SPLIT_FEATURES | {"graph_capture"}
    most_splits = 4096

    def refusal(self, caps: Caps) -> str | None:
        if (why := cuda.device_refusal(caps)) is not None:
            return why
        capability = torch.cuda.get_device_capability(caps.device)
        if capability != _CAPABILITY:
            return f"it needs compute capability 9.0 (H100, H200), {caps.device} has {capability[0]}.{capability[1]}"
        if (why := unsupported(caps)) is not None:
            return why
        if caps.backend == "auto" and _FP8 in (caps.q_dtype, caps.kv_dtype):
            return "it takes float8_e4m3fn only when named: nothing in it has measured faster than bf16"
        if find_compiler() is None:
            return "libnvrtc was not found: pip install the nvidia-cuda-nvrtc package of torch's CUDA version"
        return None

    def occupancy(self, caps: Caps) -> tuple[int, int]:
        multiprocessors = torch.cuda.get_device_properties(caps.device).multi_processor_count
        tile, cluster = tile_rows(caps), cluster_blocks(caps)
        clusters = caps.max_batch * ceil_div(cuda.rows_per_request(caps), cluster * tile)
        return cluster * clusters, multiprocessors

    def workspace(self, caps: Caps, num_splits: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}

    def compile(self, binding: Binding) -> None:
        """Build and load the kernels of this binding."""
        if (odd := _misaligned(binding)) is not None:
            _substitute(binding, odd).compile(binding)
            return
        with torch.cuda.device(binding.q.device):
            _kernels(binding)

    def run(self, binding: Binding) -> None:
        if (odd := _misaligned(binding)) is not None:
            _substitute(binding, odd).run(binding)
            return
        with torch.cuda.device(binding.q.device):
            _launch(binding)


def _misaligned(binding: Binding) -> str | None:
    """The tensor whose rows do not all begin on a 16-byte boundary, which TMA and 16-byte accesses need."""
    for name in ("q", "kv_cache", "output"):
        tensor: torch.Tensor = getattr(binding, name)
        steps = [stride for stride, size in zip(tensor.stride()[:2], tensor.shape[:2], strict=True) if size > 1]
        offsets = (tensor.data_ptr(), *(tensor.element_size() * step for step in steps))
        if any(offset % _ALIGNMENT for offset in offsets):
            return name
    return None


def _substitute(binding: Binding, name: str) -> Backend:
    """The Triton backend, which takes any strides; the scratch of both is the same."""
    triton = load("triton")
    if triton.refusal(binding.plan.caps) is not None:
        tensor: torch.Tensor = getattr(binding, name)
        raise ContractError(
            name,
            f"rows on {_ALIGNMENT}-byte boundaries (others need the package triton)",
            f"address {tensor.data_ptr():#x}, strides {tuple(tensor.stride())}",
        )
    return triton


@lru_cache(maxsize=64)
def _decode_kernel(tile: int, formats: Formats, device: int) -> Kernel:
    variant = decode_variant(tile, formats)
    cubin = compile_cubin(variant.source(), "densemla_decode.cu")
    return Kernel(cubin, "decode", threads=variant.threads, shared_bytes=variant.shared_bytes)


@lru_cache(maxsize=64)
def _merge_kernel(variant: MergeVariant, device: int) -> Kernel:
    return Kernel(compile_cubin(variant.source(), "densemla_merge.cu"), "merge", threads=_MERGE_THREADS)


def decode_variant(tile: int, formats: Formats) -> DecodeVariant:
    """The kernel for one of :data:`TILES`, or :data:`FP8_TILES` if the cache is fp8."""
    if tile == 64:
        return RowsVariant(formats)
    scorers = FP8_SCORERS if formats.kv_fp8 else SCORERS
    return SwappedVariant(tile, formats, scorers[tile], tile in PAIRED)


def _kernels(binding: Binding) -> tuple[Kernel, Kernel | None]:
    plan, device = binding.plan, binding.q.device.index
    partial_f32 = plan.partial_dtype is torch.float32
    formats = Formats(partial_f32, plan.caps.q_dtype is _FP8, plan.caps.kv_dtype is _FP8)
    decode = _decode_kernel(tile_rows(plan.caps), formats, device)
    if plan.num_splits == 1:
        return decode, None
    return decode, _merge_kernel(MergeVariant(_merge_warps(plan.num_splits), partial_f32), device)


def _merge_warps(num_splits: int) -> int:
    """Warps that share half a row in the merge. From the plan alone: it decides the order of the sums."""
    return _MERGE_THREADS // 32 if num_splits >= _MANY_SPLITS else 1


def _launch(binding: Binding) -> None:
    plan, caps = binding.plan, binding.plan.caps
    if binding.total_q == 0:
        return
    decode, merge = _kernels(binding)
    stream = torch.cuda.current_stream().cuda_stream
    output, lse, visible = binding.output, binding.lse, binding.query_cache_seqlens
    partial_output, partial_lse = binding.scratch["partial_output"], binding.scratch["partial_lse"]
    # Lengths on a device are not checked: in a cache of no pages they are all 0, whatever they say.
    table_width = binding.page_table.shape[1] if binding.num_pages else 0
    params = _DecodeParams(
        binding.q.data_ptr(),
        output.data_ptr(),
        lse.data_ptr(),
        partial_output.data_ptr(),
        partial_lse.data_ptr(),
        binding.page_table.data_ptr(),
        binding.cache_seqlens.data_ptr(),
        binding.cu_seqlens_q.data_ptr(),
        None if visible is None else visible.data_ptr(),
        *binding.q.stride()[:2],
        *output.stride()[:2],
        *lse.stride(),
        binding.page_table.stride(0),
        table_width,
        caps.page_size,
        binding.num_pages,
        binding.batch,
        binding.total_q,
        caps.max_total_q,
        caps.num_q_heads,
        binding.active_splits,
        plan.single_split_chunks,
        binding.sm_scale * _LOG2E,
        None if binding.q_scale is None else binding.q_scale.data_ptr(),
        None if binding.kv_scale is None else binding.kv_scale.data_ptr(),
    )
    cluster = cluster_blocks(caps)
    clusters = most_tiles(binding.total_q, binding.batch, caps.num_q_heads, cluster * tile_rows(caps))
    decode.launch(cluster * max(clusters, 1) * binding.active_splits, stream, (_cache_map(binding), params))
    if merge is None or binding.active_splits == 1:
        return
    merge_params = _MergeParams(
        output.data_ptr(),
        lse.data_ptr(),
        partial_output.data_ptr(),
        partial_lse.data_ptr(),
        binding.cache_seqlens.data_ptr(),
        binding.cu_seqlens_q.data_ptr(),
        *output.stride()[:2],
        *lse.stride(),
        table_width * caps.page_size,
        binding.batch,
        binding.total_q,
        caps.max_total_q,
        caps.num_q_heads,
        binding.active_splits,
        plan.single_split_chunks,
    )
    warps = 2 * binding.total_q * caps.num_q_heads * _merge_warps(plan.num_splits)
    merge.launch(ceil_div(warps, _MERGE_THREADS // 32), stream, (merge_params,), early=True)


def _cache_map(binding: Binding) -> ctypes.Array[ctypes.c_char]:
    """A descriptor of boxes of up to 64 rows and 64 columns."""
    cache = binding.kv_cache
    (pages, page_size, width), size = cache.shape, cache.element_size()
    if pages == 0:
        # A descriptor needs an address, even if no page id can be valid.
        return tensor_map(binding.q.data_ptr(), (width, 1, 1), (size * width, size * width), (_BOX_COLUMNS, 1, 1), size)
    # A dimension of one element may have any stride, which the descriptor would still check.
    row_stride = size * (cache.stride(1) if page_size > 1 else width)
    page_stride = size * (cache.stride(0) if pages > 1 else page_size * width)
    return tensor_map(
        cache.data_ptr(),
        (width, page_size, pages),
        (row_stride, page_stride),
        (_BOX_COLUMNS, min(page_size, CHUNK_TOKENS), 1),
        size,
    )


BACKEND = HopperBackend()
