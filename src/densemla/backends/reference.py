"""The oracle: dense MLA decode in float64, one query at a time, nothing clever.

No splits and no partials: every query is one softmax over its visible rows. Everything else in densemla
is judged by this page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..binding import Binding
    from ..caps import Caps


def attend(
    q: torch.Tensor, rows: torch.Tensor, kv_lora_rank: int, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the heads of one query over its visible rows.

    Args:
        q: [num_q_heads, head_dim] float64.
        rows: [visible, head_dim] float64.

    Returns:
        output [num_q_heads, kv_lora_rank] and natural-log LSE [num_q_heads], float64; 0 and -inf when
        nothing is visible, or nothing has a score above -inf.
    """
    scores = sm_scale * (q @ rows.T)
    lse = torch.logsumexp(scores, dim=-1)
    # Not exp(scores - lse): of scores of 1e12 a float64 LSE keeps no more than 1e-4.
    weights = torch.where((lse == -math.inf).unsqueeze(-1), 0.0, torch.softmax(scores, dim=-1))
    return weights @ rows[:, :kv_lora_rank], lse


def decode_float64(binding: Binding) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [total_q, num_q_heads, kv_lora_rank] and natural-log LSE [total_q, num_q_heads] in float64."""
    caps = binding.plan.caps
    fmt = caps.kv_format
    host = binding.host_lengths()
    q = binding.q.to(torch.float64)
    if binding.q_scale is not None:
        q = q * binding.q_scale.double()
    output = q.new_zeros(binding.total_q, caps.num_q_heads, caps.kv_lora_rank)
    lse = q.new_full((binding.total_q, caps.num_q_heads), -math.inf)
    for i, length in enumerate(host.cache_seqlens):
        pages = binding.page_table[i, : -(-length // caps.page_size)].long()
        stored = binding.kv_cache[pages].reshape(-1, fmt.row_width)[:length]
        rows = q.new_empty(length, caps.head_dim)
        fmt.widen(stored, rows)
        if binding.kv_scale is not None:
            rows *= binding.kv_scale.double()
        for t in range(host.cu_seqlens_q[i], host.cu_seqlens_q[i + 1]):
            output[t], lse[t] = attend(q[t], rows[: host.visible[t]], caps.kv_lora_rank, binding.sm_scale)
    return output, lse


class ReferenceBackend:
    name = "reference"
    features = frozenset({"query_cache_seqlens", "cu_seqlens_q", "active_splits"})
    most_splits = 1

    def refusal(self, caps: Caps) -> str | None:
        return None if caps.device.type == "cpu" else f"it runs on the CPU, not on {caps.device}"

    def occupancy(self, caps: Caps) -> tuple[int, int]:
        return 1, 1

    def workspace(self, caps: Caps, num_splits: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}

    def compile(self, binding: Binding) -> None:
        pass

    def run(self, binding: Binding) -> None:
        """Round the float64 result once into the bound tensors (an oracle may allocate)."""
        output, lse = decode_float64(binding)
        binding.output.copy_(output)
        binding.lse.copy_(lse)


BACKEND = ReferenceBackend()
