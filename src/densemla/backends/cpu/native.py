"""The compiled CPU decode (native.c), called through ctypes; no torch headers, so one build fits every torch."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...binding import Binding
    from ...caps import Caps

_FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
_PACKED = 4

_VECTOR = 64
"""Columns that the widest value tile takes at once: widths must be multiples of it."""

_MAX_THREADS = min(os.cpu_count() or 1, 256)


class _Args(ctypes.Structure):
    """``struct decode_args`` of native.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv", "output", "partial_output", "lse", "partial_lse")),
        *((name, ctypes.c_void_p) for name in ("workspace", "page_table", "cache_seqlens", "cu_seqlens_q")),
        ("query_cache_seqlens", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("q_stride_row", "q_stride_head", "kv_stride_page", "kv_stride_row")),
        *((name, ctypes.c_int64) for name in ("output_stride_row", "output_stride_head")),
        *((name, ctypes.c_int64) for name in ("lse_stride_row", "lse_stride_head", "table_stride", "partial_rows")),
        *((name, ctypes.c_int32) for name in ("q_format", "kv_format", "output_format", "partial_format")),
        *((name, ctypes.c_int32) for name in ("batch", "total_q", "heads", "rank", "rope", "page_size")),
        *((name, ctypes.c_int32) for name in ("active_splits", "single_split_chunks", "threads", "max_threads")),
        ("score_scale", ctypes.c_float),
        ("value_scale", ctypes.c_float),
    )


def _load() -> ctypes.CDLL | None:
    try:
        module = importlib.import_module("densemla.backends.cpu._native")
    except ModuleNotFoundError:
        return None
    library = ctypes.CDLL(str(module.__file__))
    library.densemla_workspace_floats.restype = ctypes.c_int64
    library.densemla_isa.restype = ctypes.c_char_p
    # torch brings its OpenMP (GNU's, or another with the same entry) into the global scope, or has none.
    openmp = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    library.densemla_use_openmp(None if openmp is None else ctypes.cast(openmp, ctypes.c_void_p))
    return library


_library = _load()


def available() -> str | None:
    """The instruction set that the compiled decode takes here; None when it was not built."""
    if _library is None:
        return None
    isa: bytes = _library.densemla_isa(-1)
    return isa.decode()


def can_run(caps: Caps) -> bool:
    """Whether the compiled decode was built and takes these widths."""
    return _library is not None and caps.head_dim % _VECTOR == 0 and caps.kv_lora_rank % _VECTOR == 0


def _tile_rows(caps: Caps) -> int:
    # native.c tiles more rows than this; the count itself may not fit its int.
    return min(caps.max_total_q * caps.num_q_heads, 1024)


def workspace(caps: Caps) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Scratch by name: a query tile, a chunk and its scores per thread, and the segment results."""
    assert _library is not None
    floats = _library.densemla_workspace_floats(
        _MAX_THREADS, _tile_rows(caps), caps.kv_lora_rank, caps.qk_rope_head_dim
    )
    return {"workspace": ((floats,), torch.float32)}


def run(binding: Binding, isa: int = -1) -> None:
    """Decode one step whose lengths have been checked; ``isa`` < 0 takes the machine's best."""
    assert _library is not None
    caps, scratch = binding.plan.caps, binding.scratch
    q_scale = 1.0 if binding.q_scale is None else float(binding.q_scale)
    kv_scale = 1.0 if binding.kv_scale is None else float(binding.kv_scale)
    q, kv, output, lse = binding.q, binding.kv_cache, binding.output, binding.lse
    bounds = binding.query_cache_seqlens
    args = _Args(
        q=q.data_ptr(),
        kv=kv.data_ptr(),
        output=output.data_ptr(),
        partial_output=scratch["partial_output"].data_ptr(),
        lse=lse.data_ptr(),
        partial_lse=scratch["partial_lse"].data_ptr(),
        workspace=scratch["workspace"].data_ptr(),
        page_table=binding.page_table.data_ptr(),
        cache_seqlens=binding.cache_seqlens.data_ptr(),
        cu_seqlens_q=binding.cu_seqlens_q.data_ptr(),
        query_cache_seqlens=None if bounds is None else bounds.data_ptr(),
        q_stride_row=q.stride(0),
        q_stride_head=q.stride(1),
        kv_stride_page=kv.stride(0),
        kv_stride_row=kv.stride(1),
        output_stride_row=output.stride(0),
        output_stride_head=output.stride(1),
        lse_stride_row=lse.stride(0),
        lse_stride_head=lse.stride(1),
        table_stride=binding.page_table.stride(0),
        partial_rows=caps.max_total_q,
        q_format=_FORMATS[caps.q_dtype],
        kv_format=_PACKED if caps.kv_format.packed else _FORMATS[caps.kv_format.dtype],
        output_format=_FORMATS[caps.output_dtype],
        partial_format=_FORMATS[binding.plan.partial_dtype],
        batch=binding.batch,
        total_q=binding.total_q,
        heads=caps.num_q_heads,
        rank=caps.kv_lora_rank,
        rope=caps.qk_rope_head_dim,
        page_size=caps.page_size,
        active_splits=binding.active_splits,
        single_split_chunks=min(binding.plan.single_split_chunks, (1 << 31) - 1),
        threads=min(torch.get_num_threads(), _MAX_THREADS),
        max_threads=_MAX_THREADS,
        score_scale=binding.sm_scale * q_scale * kv_scale,
        value_scale=kv_scale,
    )
    _library.densemla_decode(ctypes.byref(args), _tile_rows(caps), isa)
