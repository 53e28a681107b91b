"""Decode steps of a server: plans by row capacity, shared by all layers of a cache group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..binding import bind
from ..caps import Caps
from ..decoding import compile, run
from ..errors import ContractError
from ..kv_formats import kv_format
from ..options import PARTIAL_DTYPES
from ..planning import Plan, plan
from ..splits import CHUNK_TOKENS
from .options import ServingOptions

REQUIRED_FEATURES = (
    "cu_seqlens_q",
    "query_cache_seqlens",
    "active_splits",
    "partial_dtype",
    "single_split_chunks",
)
"""What every plan of a server must support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """What all layers of one vLLM KV-cache group have in common.

    Attributes:
        num_q_heads: query heads that reach the decode (under DCP those of all its ranks).
        page_size: tokens in a block of the cache.
        max_cache_tokens: longest visible length of a request on this rank.
        max_rows: most query rows in a step.
        batch_invariant: a request's bits must not depend on the size of its batch.
    """

    device: torch.device
    num_q_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    max_cache_tokens: int
    max_rows: int
    batch_invariant: bool


class StepDecoder:
    """Decodes the steps of one cache group.

    Plans and their scratch are kept per power-of-two row capacity; every layer of a step uses the same ones,
    since layers run one after another.
    """

    def __init__(self, group: CacheGroup, options: ServingOptions) -> None:
        """Plan for the largest step, so that what can't work is refused before the first request.

        Raises:
            ContractError: no backend can run this group here, the one asked for can't, or it lacks something
                that serving needs.
        """
        self.group = group
        self.options = options
        self._num_splits = options.num_splits
        self._ready: dict[int, tuple[Plan, dict[str, torch.Tensor]]] = {}
        self._compiled: set[int] = set()
        self.largest = plan(self._caps(_capacity(group.max_rows)))
        _require(self.largest)
        if group.batch_invariant and self._num_splits is None:
            # Splits that vary with the batch would round a request differently.
            self._num_splits = self.largest.num_splits

    def plan(self, rows: int) -> Plan:
        """The plan of a step with at most ``rows`` query rows and requests."""
        return self._for(rows)[0]

    def decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        *,
        sm_scale: float,
        longest: int,
        query_cache_seqlens: torch.Tensor | None = None,
        kv_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's decode. Shapes and meanings are those of :func:`densemla.bind`.

        Args:
            longest: host-side upper bound of the visible lengths: eager steps launch no more splits than it
                needs, with the same bits. A graph launches them all.

        Returns:
            output [total_q, num_q_heads, kv_lora_rank] and LSE float32 [total_q, num_q_heads], **natural
            log**; 0 and -inf for rows that see nothing or belong to no request.
        """
        chosen, scratch = self._for(max(q.shape[0], cache_seqlens.shape[0]))
        output = q.new_empty(q.shape[0], q.shape[1], self.group.kv_lora_rank, dtype=chosen.caps.output_dtype)
        lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        binding = bind(
            chosen,
            scratch=scratch,
            q=q,
            kv_cache=kv_cache,
            output=output,
            lse=lse,
            page_table=page_table,
            cache_seqlens=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
            query_cache_seqlens=query_cache_seqlens,
            kv_scale=kv_scale if chosen.supports("kv_scale") else None,
            sm_scale=sm_scale,
            active_splits=None if capturing else chosen.launch_splits(longest),
        )
        if not capturing and chosen.caps.max_total_q not in self._compiled:
            # With all splits, so that a later capture finds every kernel ready.
            compile(replace(binding, active_splits=chosen.num_splits))
            self._compiled.add(chosen.caps.max_total_q)
        run(binding)
        return output, lse

    def describe(self) -> str:
        """The effective plan in a line, for the log."""
        group, largest = self.group, self.largest
        names = {dtype: name for name, dtype in PARTIAL_DTYPES.items()}
        threshold = largest.single_split_chunks
        pinned = "" if self._num_splits is None else " for every batch size"
        return (
            f"backend {largest.backend} on {group.device}, {group.num_q_heads} heads, "
            f"{kv_format(group.kv_dtype, group.kv_lora_rank, group.qk_rope_head_dim).dtype} cache, "
            f"partials {names[largest.partial_dtype]}, "
            f"one split up to {threshold} chunks of {CHUNK_TOKENS} tokens, else up to {largest.num_splits} splits"
            f"{pinned}, up to {largest.caps.max_total_q} rows of {group.max_cache_tokens} tokens"
        )

    def _for(self, rows: int) -> tuple[Plan, dict[str, torch.Tensor]]:
        capacity = _capacity(rows)
        if capacity not in self._ready:
            chosen = plan(self._caps(capacity))
            self._ready[capacity] = chosen, chosen.empty_scratch()
        return self._ready[capacity]

    def _caps(self, capacity: int) -> Caps:
        group, split = self.group, self.options.split
        return Caps(
            device=group.device,
            num_q_heads=group.num_q_heads,
            kv_lora_rank=group.kv_lora_rank,
            qk_rope_head_dim=group.qk_rope_head_dim,
            page_size=group.page_size,
            max_total_q=capacity,
            max_batch=capacity,
            max_cache_tokens=group.max_cache_tokens,
            q_dtype=group.q_dtype,
            kv_dtype=group.kv_dtype,
            partial_dtype=split.partial_dtype,
            single_split_chunks=split.single_split_chunks,
            num_splits=self._num_splits,
            backend=self.options.backend,
        )


def _capacity(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()


def _require(chosen: Plan) -> None:
    needed = (*REQUIRED_FEATURES, "kv_scale") if chosen.caps.kv_format.scaled else REQUIRED_FEATURES
    missing = [name for name in needed if not chosen.supports(name)]
    if missing:
        raise ContractError(
            "backend", f"one that supports {', '.join(needed)}", f"{chosen.backend!r}, which lacks {', '.join(missing)}"
        )
