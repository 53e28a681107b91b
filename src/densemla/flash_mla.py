"""The decode interface of FlashMLA (https://github.com/deepseek-ai/FlashMLA), over densemla's own decode.

``from densemla.flash_mla import get_mla_metadata, flash_mla_with_kvcache`` takes the place of the same import
from ``flash_mla``: argument names and order, shapes, returns and the LSE convention are FlashMLA's, on every
device that densemla has a backend for. The split options come from the environment
(:class:`densemla.SplitOptions`), since FlashMLA's signature has no place for them.

Two conventions differ from the rest of densemla, as FlashMLA has them: a query that sees nothing gets LSE
**+inf** (and output 0), and the LSE is [batch, heads, queries]. The logarithm is natural in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .checks import check_dense, check_values, is_int
from .decoding import decode
from .errors import ContractError
from .kv_formats import kv_format
from .merging import merge

_METADATA_INTS = 8
"""Width of FlashMLA's tile scheduler rows (``TileSchedulerMetaDataSize``)."""

_INT32_MAX = (1 << 31) - 1

_Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_NAMES = {
    "num_q_heads": "q",
    "q_dtype": "q",
    "kv_lora_rank": "head_dim_v",
    "qk_rope_head_dim": "head_dim_v",
    "kv_cache": "k_cache",
    "kv_dtype": "k_cache",
    "page_size": "k_cache",
    "page_table": "block_table",
    "max_cache_tokens": "block_table",
    "query_cache_seqlens": "cache_seqlens",
    "sm_scale": "softmax_scale",
}
"""What densemla's decode calls things, and FlashMLA's name for where it comes from in a dense call."""

_INDEXED_NAMES = {**_NAMES, "page_table": "indices", "max_cache_tokens": "indices", "cache_seqlens": "topk_length"}

_EXTRA_NAMES = {
    **_INDEXED_NAMES,
    **dict.fromkeys(("kv_cache", "kv_dtype", "page_size"), "extra_k_cache"),
    **dict.fromkeys(("page_table", "max_cache_tokens"), "extra_indices_in_kvcache"),
    "cache_seqlens": "extra_topk_length",
}


@dataclass
class FlashMLASchedMeta:
    """What the newer :func:`get_mla_metadata` returns; remembers the calls that it is used for.

    densemla plans from the tensors of each call, so nothing has to be scheduled in advance and lengths may
    change between calls. As with FlashMLA, one object serves calls of one kind.
    """

    config: dict[str, object] | None = None

    def check(self, config: dict[str, object]) -> None:
        """Refuse a call whose ``config`` differs from that of the first one that succeeded."""
        for name, value in config.items():
            if self.config is not None and value != self.config[name]:
                raise ContractError(
                    "tile_scheduler_metadata",
                    f"calls with {name} = {self.config[name]}, as in the first one (else a new get_mla_metadata())",
                    f"{name} = {value}",
                )


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """What :func:`flash_mla_with_kvcache` takes as ``tile_scheduler_metadata`` and ``num_splits``.

    The newer form has no arguments and returns ``(FlashMLASchedMeta(), None)``. The older form names the
    lengths and heads and returns two int32 tensors on the lengths' device, which a caller may copy into
    persistent buffers: ``tile_scheduler_metadata`` [1, 8] and ``num_splits`` [batch + 1]. densemla schedules
    by itself: these are zeros that its kernels never read, there because callers pass them along.

    Args:
        cache_seqlens: int32 [batch].
        num_q_tokens_per_head_k: ``s_q * num_heads_q // num_heads_k``; ``num_heads_per_head_k`` in the first
            releases.
        num_heads_k, num_heads_q, is_fp8_kvcache, topk: as in FlashMLA; nothing depends on them.

    Raises:
        ContractError: ``cache_seqlens`` is no int32 vector.
    """
    del num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk, num_heads_per_head_k
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    _check("cache_seqlens", cache_seqlens, torch.int32, (None,))
    return (
        cache_seqlens.new_zeros(1, _METADATA_INTS),
        cache_seqlens.new_zeros(cache_seqlens.shape[0] + 1),
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a paged latent cache, dense or over the tokens that ``indices`` names.

    Args:
        q: [batch, s_q, num_heads_q, head_dim], bf16, float16 or float32.
        k_cache: [num_blocks, page_block_size, num_heads_k, head_dim] in the query's or another plain dtype;
            with ``is_fp8_kvcache`` 656-byte records [num_blocks, page_block_size, 1, 656] of uint8, int8 or
            ``float8_e4m3fn`` (512 e4m3 values, 4 float32 scales, 64 bf16 values). The blocks may have any
            strides. Values are the first ``head_dim_v`` columns.
        block_table: int32 [batch, max_num_blocks_per_seq]; may be None with ``indices``.
        cache_seqlens: int32 [batch], tokens including the newest; may be None with ``indices``.
        head_dim_v: 512 for DeepSeek-V3.
        tile_scheduler_metadata, num_splits: from :func:`get_mla_metadata`, either form.
        softmax_scale: factor on the scores; None is ``head_dim ** -0.5``.
        causal: query ``t`` of ``s_q`` sees ``cache_seqlens - s_q + 1 + t`` tokens instead of all. Dense only.
        indices: int32 [batch, s_q, topk]: attend to exactly these slots, slot = block * page_block_size +
            offset; -1 is skipped. No order or uniqueness is needed.
        attn_sink: float32 [num_heads_q]; scales the output by ``exp(lse) / (exp(lse) + exp(sink))``, not the
            LSE. +inf gives 0.
        extra_k_cache, extra_indices_in_kvcache: a second cache and slots in it, attended to as well.
        topk_length, extra_topk_length: int32 [batch], 0 to topk: only so many leading indices count.

    Returns:
        ``(out, softmax_lse)``: [batch, s_q, num_heads_q, head_dim_v] in the query's dtype, and float32
        [batch, num_heads_q, s_q], **natural log**. A query that sees nothing: 0 and **+inf**.

    Raises:
        ContractError: an argument does not fit; in host memory also an index outside the cache or a
            ``topk_length`` outside its range. On a GPU such an index is skipped, such a length cut to the range.
    """
    _check("q", q, None, (None, None, None, None))
    if q.dtype not in _Q_DTYPES:
        raise ContractError("q", "torch.bfloat16, torch.float16 or torch.float32", q.dtype)
    batch, s_q, heads, head_dim = q.shape
    for name, flag in (("causal", causal), ("is_fp8_kvcache", is_fp8_kvcache)):
        if not isinstance(flag, bool):
            raise ContractError(name, "True or False", repr(flag))
    cache = _stored(k_cache, "k_cache", q, head_dim_v, is_fp8_kvcache)
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    extras = (("extra_indices_in_kvcache", extra_indices_in_kvcache), ("extra_topk_length", extra_topk_length))
    if indices is None:
        for name, value in (
            ("attn_sink", attn_sink),
            ("extra_k_cache", extra_k_cache),
            ("topk_length", topk_length),
            *extras,
        ):
            _refuse_given(name, value, "indices")
    else:
        if causal:
            raise ContractError("causal", "False with indices", True)
        _check("indices", indices, torch.int32, (batch, s_q, None), q.device)
        if attn_sink is not None:
            _check("attn_sink", attn_sink, torch.float32, (heads,), q.device)
        if extra_k_cache is None:
            for name, value in extras:
                _refuse_given(name, value, "extra_k_cache")
        elif extra_indices_in_kvcache is None:
            raise ContractError("extra_indices_in_kvcache", "a tensor with extra_k_cache", None)
    config: dict[str, object] = {
        "batch_size": batch,
        "seq_len_q": s_q,
        "num_heads_q": heads,
        "page_block_size": cache.shape[1],
        "causal": causal,
        "is_fp8_kvcache": is_fp8_kvcache,
        "topk": None if indices is None else indices.shape[2],
    }
    _check_metadata(tile_scheduler_metadata, num_splits, config, q)
    if indices is None:
        out, lse = _dense(q, cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)
    else:
        # What is worked on is rounded once, at the end.
        later = attn_sink is not None or extra_k_cache is not None
        out, lse = _indexed(q, cache, indices, topk_length, head_dim_v, softmax_scale, exact=later)
        if extra_k_cache is not None:
            extra = _indexed(
                q,
                _stored(extra_k_cache, "extra_k_cache", q, head_dim_v, is_fp8_kvcache),
                extra_indices_in_kvcache,
                extra_topk_length,
                head_dim_v,
                softmax_scale,
                _EXTRA_NAMES,
                exact=True,
            )
            out, lse = merge(torch.stack((out, extra[0])), torch.stack((lse, extra[1])))
        if attn_sink is not None:
            # A query that saw nothing stays 0 whatever its sink: -inf - -inf is NaN.
            gate = torch.where(lse == -math.inf, 0.0, torch.sigmoid(lse - attn_sink))
            out = out * gate.unsqueeze(-1)
        out = out.to(q.dtype)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        # Only now: a refused call must not decide what the next one may look like.
        tile_scheduler_metadata.config = config
    lse = torch.where(lse == -math.inf, math.inf, lse)
    return out.view(batch, s_q, heads, head_dim_v), lse.view(batch, s_q, heads).transpose(1, 2).contiguous()


def _dense(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch * s_q, heads, head_dim_v] and LSE [batch * s_q, heads]."""
    batch, s_q, heads, head_dim = q.shape
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if value is None:
            raise ContractError(name, "a tensor without indices", None)
    assert block_table is not None
    assert cache_seqlens is not None
    _check("block_table", block_table, torch.int32, (batch, None), q.device)
    _check("cache_seqlens", cache_seqlens, torch.int32, (batch,), q.device)
    heads_k = cache.shape[2]
    if heads % heads_k:
        raise ContractError("k_cache", f"num_heads_k that divides num_heads_q = {heads}", heads_k)
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * s_q
    # Densemla's own rule is the causal one; without it every query sees the whole request.
    visible = None if causal or s_q == 1 else cache_seqlens.repeat_interleave(s_q)
    with _flash_mla_names(_NAMES):
        parts = [
            decode(
                queries.reshape(batch * s_q, heads // heads_k, head_dim),
                cache[:, :, head],
                block_table,
                cache_seqlens,
                sm_scale=softmax_scale,
                cu_seqlens_q=cu_seqlens_q,
                query_cache_seqlens=visible,
                kv_lora_rank=head_dim_v,
            )
            for head, queries in enumerate(q.reshape(batch, s_q, heads_k, heads // heads_k, head_dim).unbind(2))
        ]
    if heads_k == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _indexed(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
    names: Mapping[str, str] = _INDEXED_NAMES,
    *,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over chosen slots: every query becomes a request whose pages hold one token.

    ``exact``: the output in float32, else in the query's type.
    """
    batch, s_q, heads, head_dim = q.shape
    name = names["page_table"]
    _check(name, indices, torch.int32, (batch, s_q, None), q.device)
    assert indices is not None
    if cache.shape[2] != 1:
        raise ContractError(names["kv_cache"], "num_heads_k = 1 with indices", cache.shape[2])
    topk = indices.shape[2]
    num_blocks, block = cache.shape[:2]
    check_values(name, indices, -1, num_blocks * block - 1, f"-1 or a slot in [0, {num_blocks * block})")
    live = (indices >= 0) & (indices < num_blocks * block)
    if topk_length is not None:
        _check(names["cache_seqlens"], topk_length, torch.int32, (batch,), q.device)
        check_values(names["cache_seqlens"], topk_length, 0, topk, f"0 to the {topk} columns of {name}")
        live &= torch.arange(topk, device=indices.device) < topk_length.view(batch, 1, 1)
    with _flash_mla_names(names):
        tokens, slot_step, token_step = _token_pages(cache)
        pages = indices // block * slot_step + indices % block * token_step
        live, pages = live.reshape(batch * s_q, topk), pages.reshape(batch * s_q, topk)
        # Skipped entries move behind the live ones, into a column that is cut off: no host sync.
        place = torch.where(live, live.cumsum(1) - 1, topk)
        page_table = pages.new_zeros(batch * s_q, topk + 1).scatter_(1, place, pages)[:, :topk]
        return decode(
            q.reshape(batch * s_q, heads, head_dim),
            tokens,
            page_table,
            live.sum(1, dtype=torch.int32),
            sm_scale=softmax_scale,
            output_dtype=torch.float32 if exact else None,
            kv_lora_rank=head_dim_v,
        )


def _token_pages(cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """``cache`` [num_blocks, block, 1, width] as pages of one token, without a copy.

    Returns a view [pages, 1, width] and the page numbers that one block and one token are apart. Pages lie
    as close as the two strides allow, so a per-layer view with gaps between its blocks works as well; pages
    in the gaps are never named.
    """
    num_blocks, block, _, width = cache.shape
    block_stride, token_stride = cache.stride(0), cache.stride(1)
    step = math.gcd(block_stride if num_blocks > 1 else 0, token_stride if block > 1 else 0) or width
    slot_step, token_step = block_stride // step, token_stride // step
    last = max(num_blocks - 1, 0) * slot_step + max(block - 1, 0) * token_step
    if last > _INT32_MAX:
        raise ContractError(
            "kv_cache",
            "strides whose greatest common divisor leaves fewer than 2**31 token positions",
            f"strides {cache.stride()}",
        )
    pages = last + 1 if cache.numel() else 0
    return cache.as_strided((pages, 1, width), (step, step, 1)), slot_step, token_step


def _stored(k_cache: object, name: str, q: torch.Tensor, head_dim_v: int, is_fp8: bool) -> torch.Tensor:
    """The cache in the dtype under which densemla knows its format."""
    head_dim = q.shape[3]
    if not is_int(head_dim_v, 1, head_dim):
        raise ContractError("head_dim_v", f"an int in [1, head_dim = {head_dim}]", repr(head_dim_v))
    _check(name, k_cache, None, (None, None, None, None), q.device)
    assert isinstance(k_cache, torch.Tensor)
    if not (k_cache.shape[1] and k_cache.shape[2]):
        raise ContractError(name, "page_block_size and num_heads_k above 0", list(k_cache.shape))
    if k_cache.shape[3] > 1 and k_cache.stride(3) != 1:
        raise ContractError(name, "a last dimension of stride 1", f"strides {k_cache.stride()}")
    if is_fp8:
        if (head_dim_v, head_dim) != (512, 576):
            raise ContractError("head_dim_v", "512 of 576 with is_fp8_kvcache", f"{head_dim_v} of {head_dim}")
        width = kv_format(torch.uint8).row_width
        if k_cache.dtype.itemsize != 1 or k_cache.shape[2:] != (1, width):
            raise ContractError(
                name,
                f"one-byte [num_blocks, page_block_size, 1, {width}] with is_fp8_kvcache",
                f"{k_cache.dtype} {list(k_cache.shape)}",
            )
        return k_cache.view(torch.uint8)
    if k_cache.dtype.itemsize == 1:
        raise ContractError(name, "a plain float dtype without is_fp8_kvcache", k_cache.dtype)
    _check(name, k_cache, None, (None, None, None, head_dim))
    return k_cache


def _check_metadata(metadata: object, num_splits: object, config: dict[str, object], q: torch.Tensor) -> None:
    if isinstance(metadata, FlashMLASchedMeta):
        if num_splits is not None:
            raise ContractError("num_splits", "None with a FlashMLASchedMeta", type(num_splits).__name__)
        metadata.check(config)
    elif isinstance(metadata, torch.Tensor):
        _check("tile_scheduler_metadata", metadata, torch.int32, (None, _METADATA_INTS), q.device)
        _check("num_splits", num_splits, torch.int32, (q.shape[0] + 1,), q.device)
    else:
        raise ContractError("tile_scheduler_metadata", "what get_mla_metadata returned first", type(metadata).__name__)


def _refuse_given(name: str, value: object, without: str) -> None:
    if value is not None:
        raise ContractError(name, f"None without {without}", type(value).__name__)


@contextmanager
def _flash_mla_names(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of densemla's decode, under the names that FlashMLA's caller knows."""
    try:
        yield
    except ContractError as error:
        expected = error.expected.replace("page_table", names["page_table"])
        raise ContractError(names.get(error.argument, error.argument), expected, error.got) from error


def _check(
    name: str,
    tensor: object,
    dtype: torch.dtype | None,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """Refuse what is no dense tensor of this dtype, shape (None leaves a size open) and device."""
    tensor = check_dense(name, tensor)
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or dtype not in (None, tensor.dtype):
        sizes = ", ".join("*" if want is None else str(want) for want in shape)
        raise ContractError(
            name, f"{'a tensor' if dtype is None else dtype} [{sizes}]", f"{tensor.dtype} {list(tensor.shape)}"
        )
    if device not in (None, tensor.device):
        raise ContractError(name, f"device {device}, as q", tensor.device)
