"""Running a binding, and the one-call form."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .backends import load
from .binding import Binding, bind
from .caps import MOST_TOKENS, Caps
from .checks import check_dims, check_int, is_int
from .errors import ContractError
from .kv_formats import PACKED
from .options import SplitOptions, check_single_split_chunks
from .planning import Plan, plan
from .splits import CHUNK_TOKENS, ceil_div

DECODE_SPLITS = 32
"""Splits that :func:`decode` pins: one number, so that a request's bits do not depend on its batch."""

DECODE_CAPACITY = 131072
"""Capacity, in tokens, that :func:`decode` takes its splits and threshold from, and plans for at least."""


def compile(binding: Binding) -> None:
    """Build and warm whatever the first :func:`run` of this binding needs (kernels; nothing on the CPU).

    Call it before capturing a graph. Outputs and scratch may be overwritten.
    """
    with torch.inference_mode():
        _checked(binding).plan._backend.compile(binding)


def run(binding: Binding) -> None:
    """Decode one step into the bound ``output`` and ``lse``.

    Reads lengths, page table, scales and data from the bound tensors as they are now; allocates nothing
    (without the compiled CPU decode a few bytes). Records no gradient. On CUDA it only launches, on the current
    stream, and can be captured in a graph.

    Raises:
        ContractError: in host memory, a length or page id does not fit; nothing has been written.
    """
    # Not no_grad, which would refuse tensors that were made in inference mode.
    with torch.inference_mode():
        _checked(binding).plan._backend.run(binding)


def _checked(binding: object) -> Binding:
    if not isinstance(binding, Binding):
        raise ContractError("binding", "the result of densemla.bind", type(binding).__name__)
    return binding


_TENSOR_OF_FIELD = {
    "num_q_heads": "q",
    "q_dtype": "q",
    "qk_rope_head_dim": "q",
    "kv_dtype": "kv_cache",
    "page_size": "kv_cache",
    "max_total_q": "q",
    "max_batch": "page_table",
}


def _caps_of_tensors(**fields: Any) -> Caps:
    """Caps whose errors name the tensor that a field was read from."""
    try:
        return Caps(**fields)
    except ContractError as error:
        raise ContractError(_TENSOR_OF_FIELD.get(error.argument, error.argument), error.expected, error.got) from error


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
    output_dtype: torch.dtype | None = None,
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

    The number of splits is pinned (32, or less under ``max_splits``), and a threshold of -1 stands for
    ``ceil(2048 / splits)`` chunks whatever the page table could hold, so a request's bits do not depend on
    who shares its batch. (A GPU backend may choose other tiles, and so other bits, for steps with more
    queries per request; a server's own plan fixes them.)

    Returns:
        ``(output, lse)``: [total_q, num_q_heads, kv_lora_rank] in ``output_dtype`` (None: the query's, bf16 for
        fp8 queries), and float32 [total_q, num_q_heads], **natural log**; 0 and -inf for a query that sees
        nothing.

    Raises:
        ContractError: an argument does not fit; the message names it.
    """
    for name, tensor, dims in (("q", q, 3), ("kv_cache", kv_cache, 3), ("page_table", page_table, 2)):
        check_dims(name, tensor, dims)
    page_size = kv_cache.shape[1]
    if not is_int(kv_lora_rank, 1, q.shape[2]):
        raise ContractError("kv_lora_rank", f"an int from 1 to the query's width {q.shape[2]}", repr(kv_lora_rank))
    if page_size == 0:
        raise ContractError("kv_cache", "pages of at least one token", list(kv_cache.shape))
    for name, value in (("max_splits", max_splits), ("num_splits", num_splits)):
        if value is not None:
            check_int(name, value, 1)
    # Powers of two, so that a growing table makes few plans.
    table_tokens = max(page_table.shape[1] * page_size, DECODE_CAPACITY)
    capacity = min(1 << (table_tokens - 1).bit_length(), MOST_TOKENS)
    if num_splits is None:
        # A backend may launch fewer; a caller who names a number gets that number or an error.
        limits = (DECODE_SPLITS, max_splits, _most_splits(backend))
        num_splits = min(limit for limit in limits if limit is not None)
    if single_split_chunks is None:
        single_split_chunks = SplitOptions.from_env().single_split_chunks
    if check_single_split_chunks(single_split_chunks) == -1:
        single_split_chunks = ceil_div(DECODE_CAPACITY // CHUNK_TOKENS, num_splits)
    caps = _caps_of_tensors(
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
        output_dtype=output_dtype,
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
    if not isinstance(backend, str):
        raise ContractError("backend", "a backend name", repr(backend))
    return None if backend == "auto" else load(backend).most_splits
