"""A decode step over a sharded cache, with its float64 answer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

import densemla
from densemla.backends.reference import attend
from densemla.distributed.dcp import DcpDecoder, local_positions

HEADS, RANK, ROPE, PAGE = 12, 32, 16, 16
SM_SCALE = 0.11


@dataclass
class Problem:
    """Requests of global ``lengths`` with ``queries`` rows each; the same on every rank for one seed."""

    lengths: list[int]
    queries: list[int]
    interleave: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    bounds: list[int] | None = None
    """Explicit global visible lengths; None is the causal rule."""
    q: torch.Tensor = field(init=False)
    tokens: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        # A cubed normal has the heavy tail that puts most of a softmax on a few keys.
        self.q = torch.randn(sum(self.queries), HEADS, RANK + ROPE, generator=generator).pow(3).to(self.dtype)
        self.tokens = [torch.randn(length, RANK + ROPE, generator=generator).to(self.dtype) for length in self.lengths]

    @property
    def visible(self) -> list[int]:
        if self.bounds is not None:
            return self.bounds
        pairs = zip(self.lengths, self.queries, strict=True)
        return [max(length - n + 1 + t, 0) for length, n in pairs for t in range(n)]

    def answer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [total_q, HEADS, RANK] and natural-log LSE [total_q, HEADS] in float64, from one process."""
        requests = [i for i, n in enumerate(self.queries) for _ in range(n)]
        results = [
            attend(self.q[row].double(), self.tokens[i][:bound].double(), RANK, SM_SCALE)
            for row, (i, bound) in enumerate(zip(requests, self.visible, strict=True))
        ]
        output, lse = torch.zeros(len(self.q), HEADS, RANK).double(), torch.zeros(len(self.q), HEADS).double()
        for row, (right, right_lse) in enumerate(results):
            output[row], lse[row] = right, right_lse
        return output, lse

    def plan(self, partial_dtype: torch.dtype, **options: object) -> densemla.Plan:
        capacity = max(*self.lengths, 1)
        settings: dict[str, object] = {
            "num_q_heads": HEADS,
            "kv_lora_rank": RANK,
            "qk_rope_head_dim": ROPE,
            "page_size": PAGE,
            "max_total_q": max(len(self.q), 1) + 3,
            "max_batch": len(self.lengths) + 2,
            "max_cache_tokens": capacity,
            "q_dtype": self.dtype,
            "kv_dtype": self.dtype,
            "partial_dtype": partial_dtype,
            "single_split_chunks": -1,
            **options,
        }
        return densemla.plan(densemla.Caps(**settings))  # type: ignore[arg-type]

    def shard(self, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's pages, in mixed order with NaN wherever no token lies, and its page table with rubbish."""
        shards = [rows[local_positions(len(rows), rank, world, self.interleave)] for rows in self.tokens]
        counts = [-(-len(rows) // PAGE) for rows in shards]
        pages = torch.full((sum(counts) + 1, PAGE, RANK + ROPE), torch.nan, dtype=self.dtype)
        table = torch.full((len(shards), max(*counts, 1) + 1), -7, dtype=torch.int32)
        ids = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(rank)).tolist())
        for i, (rows, count) in enumerate(zip(shards, counts, strict=True)):
            for slot, page in enumerate(itertools.islice(ids, count)):
                part = rows[slot * PAGE : (slot + 1) * PAGE]
                pages[page, : len(part)] = part
                table[i, slot] = page
        return pages, table

    def bind(self, decoder: DcpDecoder, **changes: object) -> densemla.distributed.DcpBinding:
        """This rank's binding, its outputs poisoned."""
        own = slice(decoder.rank * decoder.own_heads, (decoder.rank + 1) * decoder.own_heads)
        pages, table = self.shard(decoder.rank, decoder.world)
        total_q = len(self.q)
        cu = torch.tensor([0, *itertools.accumulate(self.queries)], dtype=torch.int32)
        tensors: dict[str, object] = {
            "q": self.q[:, own].contiguous(),
            "kv_cache": pages,
            "output": torch.full((total_q, decoder.own_heads, RANK), torch.nan, dtype=self.dtype),
            "lse": torch.full((total_q, decoder.own_heads), torch.nan),
            "page_table": table,
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32),
            "cu_seqlens_q": None if set(self.queries) == {1} and self.bounds is None else cu,
            "query_cache_seqlens": None if self.bounds is None else torch.tensor(self.bounds, dtype=torch.int32),
            "sm_scale": SM_SCALE,
            **changes,
        }
        return decoder.bind(**tensors)  # type: ignore[arg-type]

    def own_answer(self, decoder: DcpDecoder) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(decoder.rank * decoder.own_heads, (decoder.rank + 1) * decoder.own_heads)
        output, lse = self.answer()
        return output[:, own], lse[:, own]


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm().clamp_min(1e-300))
