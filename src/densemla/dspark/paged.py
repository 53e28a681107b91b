"""Attention of a stack of layers over a :class:`KVPool`, through densemla's plan, bind and run."""

from __future__ import annotations

import torch

from .. import kv_cache
from ..binding import bind
from ..caps import Caps
from ..decoding import run
from ..planning import plan
from .config import MLAConfig
from .kv_pool import Entry, KVPool
from .layers import Attend, softmax_scale


class PagedAttention:
    """Plans once for the largest step; then each step stores its rows and attends.

    Args:
        config: the stack's sizes.
        pool: where latent rows live; its dtype and device are the model's.
        max_batch: most requests in a step.
        max_total_q: most query rows in a step.
    """

    def __init__(self, config: MLAConfig, pool: KVPool, max_batch: int, max_total_q: int) -> None:
        self.pool = pool
        self.sm_scale = softmax_scale(config)
        dtype, device = pool.caches.dtype, pool.caches.device
        caps = Caps(
            device=device,
            num_q_heads=config.num_attention_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            page_size=pool.page_size,
            max_total_q=max_total_q,
            max_batch=max_batch,
            max_cache_tokens=pool.capacity,
            q_dtype=dtype,
            kv_dtype=dtype,
            partial_dtype=torch.float32,
        )
        self.plan = plan(caps)
        self.scratch = self.plan.empty_scratch()
        rows = (max_total_q, config.num_attention_heads)
        self.output = torch.empty(*rows, config.kv_lora_rank, dtype=dtype, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)

    def step(self, entries: list[Entry], starts: list[int], counts: list[int], *, causal: bool) -> Attend:
        """One step's attention.

        Args:
            entries: the requests; their pages already reach ``start + count``.
            starts: position of each request's first new row.
            counts: its new rows, each of them a query too.
            causal: a query sees the tokens up to its own; otherwise all rows of its request, the new
                ones included (a drafted block).
        """
        device = self.pool.caches.device
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        slots = torch.cat([self.pool.slots(e, s, n) for e, s, n in zip(entries, starts, counts, strict=True)]).to(
            device
        )
        page_table = self.pool.page_table(entries)
        cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        new = torch.tensor(counts, dtype=torch.int32)
        cu_seqlens_q = torch.cat((torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32))).to(device)
        visible = None if causal else cache_seqlens.repeat_interleave(new.to(device))
        active_splits = self.plan.launch_splits(max(lengths))

        def attend(layer: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
            cache = self.pool.caches[layer]
            kv_cache.append(latent, rope, cache, slots)
            output = self.output[: q.shape[0]]
            binding = bind(
                self.plan,
                scratch=self.scratch,
                q=q,
                kv_cache=cache,
                output=output,
                lse=self.lse[: q.shape[0]],
                page_table=page_table,
                cache_seqlens=cache_seqlens,
                cu_seqlens_q=cu_seqlens_q,
                query_cache_seqlens=visible,
                sm_scale=self.sm_scale,
                active_splits=active_splits,
            )
            run(binding)
            return output

        return attend
