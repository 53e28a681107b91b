"""Running a binding, and the one-call form."""

from __future__ import annotations

from functools import lru_cache

import torch

from .backends import load
from .binding import Binding, bind
from .caps import Caps
from .errors import ContractError
from .kv_formats import PACKED
from .planning import Plan, plan

DECODE_SPLITS = 32
"""Splits that :func:`decode` pins: one number, so that a request's bits do not depend on its batch."""

DECODE_MIN_CAPACITY = 131072
"""Smallest capacity, in tokens, that :func:`decode` plans for."""


def compile(binding: Binding) -> None:
    """Build and warm whatever the first :func:`run` of this binding needs (kernels; nothing on the CPU).

    Call it before capturing a graph. Outputs and scratch may be overwritten.
    """
    load(_checked(binding).plan.backend).compile(binding)


def run(binding: Binding) -> None:
    """Decode one step into the bound ``output`` and ``lse``.

    Reads lengths, page table, scales and data from the bound tensors as they are now; allocates no
    tensor. On CUDA it only launches, on the current stream, and can be captured in a graph.

    Raises:
        ContractError: in host memory, a length or page id does not fit; nothing has been written.
    """
    load(_checked(binding).plan.backend).run(binding)


def _checked(binding: object) -> Binding:
    if not isinstance(binding, Binding):
        raise ContractError("binding", "the result of densemla.bind", type(binding).__name__)
    return binding


@lru_cache(maxsize=64)
def _cached_plan(caps: Caps) -> Plan:
    return plan(caps)


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    sm_scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    query_cache_seqlens: torch.Tensor | None = None,
    q_scale: torch.Tensor | float | None = None,
    kv_scale: torch.Tensor | float | None = None,
    partial_dtype: torch.dtype | None = None,
    single_split_chunks: int | None = None,
    max_splits: int | None = None,
    num_splits: int | None = None,
    kv_lora_rank: int = 512,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan, bind and run one decode step.

    For tests, scripts and first contact; a server plans once and keeps its bindings. Shapes and meanings
    are those of :func:`densemla.bind`; ``qk_rope_head_dim`` is the query's width less ``kv_lora_rank``.
    ``cache_seqlens`` is never read on the host when it lies on a GPU.

    The number of splits is pinned (32, or less under ``max_splits``) and the capacity is the page
    table's rounded up to a power of two of at least 131072 tokens, so a request's bits do not depend on
    who shares its batch. (A GPU backend may choose other tiles, and so other bits, for steps with more
    queries per request; a server's own plan fixes them.)

    Returns:
        ``(output, lse)``: [total_q, num_q_heads, kv_lora_rank] in the query's dtype (bf16 for fp8
        queries), and float32 [total_q, num_q_heads], **natural log**; 0 and -inf for a query that sees
        nothing.

    Raises:
        ContractError: an argument does not fit; the message names it.
    """
    for name, tensor, dims in (("q", q, 3), ("kv_cache", kv_cache, 3), ("page_table", page_table, 2)):
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(name, "a tensor", type(tensor).__name__)
        if tensor.dim() != dims:
            raise ContractError(name, f"{dims} dimensions", list(tensor.shape))
    page_size = kv_cache.shape[1]
    table_tokens = page_table.shape[1] * page_size
    capacity = max(DECODE_MIN_CAPACITY, 1 << (table_tokens - 1).bit_length() if table_tokens else 0)
    if num_splits is None:
        # A backend may launch fewer; a caller who names a number gets that number or an error.
        limits = (DECODE_SPLITS, max_splits, _most_splits(backend))
        num_splits = min(limit for limit in limits if limit is not None)
    caps = Caps(
        device=q.device,
        num_q_heads=q.shape[1],
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=q.shape[2] - kv_lora_rank,
        page_size=page_size,
        max_total_q=max(q.shape[0], 1),
        max_batch=max(page_table.shape[0], 1),
        max_cache_tokens=capacity,
        q_dtype=q.dtype,
        kv_dtype=PACKED if kv_cache.dtype is torch.uint8 else kv_cache.dtype,
        partial_dtype=partial_dtype,
        single_split_chunks=single_split_chunks,
        max_splits=max_splits,
        num_splits=num_splits,
        backend=backend,
    )
    chosen = _cached_plan(caps)
    output = torch.empty(q.shape[0], q.shape[1], kv_lora_rank, dtype=caps.output_dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32, device=q.device)
    binding = bind(
        chosen,
        scratch=chosen.empty_scratch(),
        q=q,
        kv_cache=kv_cache,
        output=output,
        lse=lse,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        query_cache_seqlens=query_cache_seqlens,
        q_scale=q_scale,
        kv_scale=kv_scale,
        sm_scale=sm_scale,
    )
    run(binding)
    return output, lse


def _most_splits(backend: str) -> int | None:
    return None if backend == "auto" else load(backend).most_splits
