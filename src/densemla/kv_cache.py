"""Writing new tokens into a paged latent cache, and making caches."""

from __future__ import annotations

import torch

from .checks import check_dense, check_int, check_scale, check_values, check_writable
from .device import usable
from .errors import ContractError
from .kv_formats import FP8_MAX, PACKED_GROUP, KVFormat, kv_format, packed_fields

_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

MOST_PAGES = (1 << 31) - 1
"""Page ids are int32."""


def empty(
    num_pages: int,
    page_size: int,
    kv_dtype: torch.dtype | str = torch.bfloat16,
    *,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """An uninitialised cache [num_pages, page_size, row width] in the format ``kv_dtype`` names.

    Raises:
        ContractError: a size is no int in its range, there is no such format, or ``device`` is no CPU or
            CUDA device that torch can use here.
    """
    for name, value, low, high in (
        ("num_pages", num_pages, 0, MOST_PAGES),
        ("page_size", page_size, 1, 1 << 20),
        ("kv_lora_rank", kv_lora_rank, 1, 4096),
        ("qk_rope_head_dim", qk_rope_head_dim, 0, 4096),
    ):
        check_int(name, value, low, high)
    fmt = kv_format(kv_dtype, kv_lora_rank, qk_rope_head_dim)
    return torch.empty(num_pages, page_size, fmt.row_width, dtype=fmt.dtype, device=usable(device))


def append(
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: torch.Tensor | float | None = None,
) -> None:
    """Write the newest tokens' rows into the cache, quantising where its format does.

    Rope columns are stored as they come: rotate them before, or not at all for a layer without
    positions.

    Args:
        latent: [tokens, kv_lora_rank], float.
        rope: [tokens, qk_rope_head_dim], float; on the same device.
        kv_cache: [num_pages, page_size, row width], any outer strides; its dtype names the format
            (``torch.uint8`` is ``fp8_ds_mla``).
        slot_mapping: int64 or int32 [tokens], slot = page * page_size + offset; -1 skips the token
            (padding). A slot given twice keeps one of its rows.
        kv_scale: for a ``float8_e4m3fn`` cache: stored = value / kv_scale, saturated at +-448; a number
            or a one-element float32 tensor; None is 1.

    Raises:
        ContractError: shapes, dtypes or devices do not fit, rows of the cache overlap, a scale is 0,
            negative, NaN or infinite, or (host memory only) a slot lies outside the cache. Nothing has been
            written. On a GPU slots outside the cache are skipped and a scale tensor is not read.
    """
    fmt = _check(latent, rope, kv_cache, slot_mapping)
    if not fmt.scaled and kv_scale is not None:
        raise ContractError("kv_scale", "None: only a float8_e4m3fn cache takes a scale", "a scale")
    scale = _scale_of(kv_scale, latent.device)
    # Not no_grad, which would refuse a cache that was made in inference mode.
    with torch.inference_mode():
        rows = _stored(latent, rope, fmt, scale)
        page_size = kv_cache.shape[1]
        slots = slot_mapping.long()
        live = (slots >= 0) & (slots < kv_cache.shape[0] * page_size)
        rows, slots = rows[live], slots[live]
        # Bytes, because indexed assignment is not implemented for fp8 everywhere.
        target = kv_cache.view(torch.uint8) if fmt.dtype.itemsize == 1 else kv_cache
        target[slots // page_size, slots % page_size] = rows.view(target.dtype)


def _check(latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> KVFormat:
    for name, tensor in (("latent", latent), ("rope", rope)):
        check_dense(name, tensor)
        if tensor.dim() != 2 or tensor.dtype not in _SOURCE_DTYPES:
            raise ContractError(name, "a float tensor [tokens, width]", _describe(tensor))
    if rope.shape[0] != latent.shape[0]:
        raise ContractError("rope", f"{latent.shape[0]} tokens, as latent has", rope.shape[0])
    check_dense("kv_cache", kv_cache)
    check_dense("slot_mapping", slots)
    if kv_cache.dim() != 3:
        raise ContractError("kv_cache", "a tensor [num_pages, page_size, row width]", _describe(kv_cache))
    try:
        fmt = kv_format(kv_cache.dtype, latent.shape[1], rope.shape[1])
    except ContractError as error:
        raise ContractError("kv_cache", f"a dtype that is {error.expected}", error.got) from error
    check_writable("kv_cache", kv_cache)
    if kv_cache.shape[2] != fmt.row_width or (fmt.row_width > 1 and kv_cache.stride(2) != 1):
        raise ContractError("kv_cache", f"rows of {fmt.row_width} with stride 1", _describe(kv_cache))
    if slots.dtype not in (torch.int32, torch.int64) or tuple(slots.shape) != (latent.shape[0],):
        raise ContractError("slot_mapping", f"int64 or int32 [{latent.shape[0]}]", _describe(slots))
    for name, tensor in (("rope", rope), ("kv_cache", kv_cache), ("slot_mapping", slots)):
        if tensor.device != latent.device:
            raise ContractError(name, f"device {latent.device}, where latent is", tensor.device)
    count = kv_cache.shape[0] * kv_cache.shape[1]
    check_values("slot_mapping", slots, -1, count - 1, f"-1 or a slot in [0, {count})")
    return fmt


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"


def _scale_of(kv_scale: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | float:
    if isinstance(kv_scale, torch.Tensor):
        check_dense("kv_scale", kv_scale)
        if kv_scale.dtype is not torch.float32 or kv_scale.numel() != 1 or kv_scale.device != device:
            raise ContractError("kv_scale", f"one float32 on {device}", f"{_describe(kv_scale)} on {kv_scale.device}")
        if kv_scale.device.type == "cpu":
            return check_scale("kv_scale", float(kv_scale))
        return kv_scale.reshape(())
    return check_scale("kv_scale", 1.0 if kv_scale is None else kv_scale)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Round to e4m3fn, saturating at +-448 (some casts of torch turn larger values into NaN). NaN stays NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _stored(latent: torch.Tensor, rope: torch.Tensor, fmt: KVFormat, scale: torch.Tensor | float) -> torch.Tensor:
    """The rows [tokens, row width] as the cache stores them."""
    if not fmt.packed:
        rows = torch.cat(
            (latent, rope.to(latent.dtype)) if latent.dtype == rope.dtype else (latent.float(), rope.float()), 1
        )
        return to_fp8(rows.float() / scale) if fmt.scaled else rows.to(fmt.dtype)
    records = torch.empty(latent.shape[0], fmt.row_width, dtype=torch.uint8, device=latent.device)
    values, scales, rope_out = packed_fields(records, fmt.kv_lora_rank, fmt.qk_rope_head_dim)
    grouped = latent.float().unflatten(1, (-1, PACKED_GROUP))
    # A group of zeros still needs a scale that can be divided by.
    group_scale = (grouped.abs().amax(2) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales.copy_(group_scale)
    values.copy_(to_fp8(grouped / group_scale.unsqueeze(2)).flatten(1))
    rope_out.copy_(rope)
    return records
