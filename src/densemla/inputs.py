"""Random decode steps at scales where a wrong merge shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import kv_cache as cache_writer
from .caps import Caps
from .checks import check_int, is_int
from .errors import ContractError
from .kv_cache import to_fp8
from .splits import ceil_div

LOGITS = {
    "uniform": "near-uniform softmax: queries and rows normal / 2",
    "heavy": "heavy-tailed logits: each row and each head scaled by exp(normal)",
}
"""How inputs may be drawn, and what that means."""

_WRITE_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class RandomStep:
    """Tensors of one decode step, as :func:`densemla.bind` takes them.

    Pages lie in random order. Page-table entries past a request's pages are -1, and cache rows past its
    length are NaN: whoever reads them shows it.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor


def random_step(
    caps: Caps, lengths: Sequence[int], *, queries: Sequence[int] | None = None, logits: str = "heavy", seed: int = 0
) -> RandomStep:
    """Draw one decode step in the formats of ``caps``; the same numbers on every device.

    Args:
        lengths: visible tokens of each request, 0 or more.
        queries: queries of each request; None is one each.
        logits: a key of :data:`LOGITS`.
        seed: of the generator, from -2**63 to 2**64 - 1.

    Raises:
        ContractError: a length or a number of queries is no int of at least 0, ``queries`` has not one for each
            length, ``logits`` is unknown, ``seed`` is out of range, or torch can't use the device of ``caps`` here.
    """
    if not isinstance(logits, str) or logits not in LOGITS:
        raise ContractError("logits", "one of " + ", ".join(LOGITS), repr(logits))
    check_int("seed", seed, -(1 << 63), (1 << 64) - 1)
    for name, numbers in (("lengths", lengths), ("queries", [] if queries is None else queries)):
        if not isinstance(numbers, Sequence) or not all(is_int(number, 0) for number in numbers):
            raise ContractError(name, "a sequence of ints of at least 0", repr(numbers))
    if queries is not None and len(queries) != len(lengths):
        raise ContractError("queries", f"{len(lengths)} of them, as there are lengths", len(queries))
    heavy = logits == "heavy"
    generator = torch.Generator().manual_seed(seed)
    counts = [1] * len(lengths) if queries is None else list(queries)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(sum(counts), caps.num_q_heads, caps.head_dim) / 2
    if heavy:
        q *= normal(sum(counts), caps.num_q_heads, 1).exp()
    pages = [ceil_div(length, caps.page_size) for length in lengths]
    cache = cache_writer.empty(
        sum(pages),
        caps.page_size,
        caps.kv_dtype,
        kv_lora_rank=caps.kv_lora_rank,
        qk_rope_head_dim=caps.qk_rope_head_dim,
        device=caps.device,
    )
    # All bits set is NaN in every format, packed records included.
    cache.view(torch.uint8).fill_(0xFF)
    order = torch.randperm(sum(pages), generator=generator)
    table = torch.full((len(lengths), max(pages, default=0)), -1, dtype=torch.int32)
    first_page = 0
    for i, length in enumerate(lengths):
        table[i, : pages[i]] = order[first_page : first_page + pages[i]]
        first_page += pages[i]
        for start in range(0, length, _WRITE_TOKENS):
            tokens = torch.arange(start, min(start + _WRITE_TOKENS, length))
            rows = normal(len(tokens), caps.head_dim) / 2
            if heavy:
                rows *= normal(len(tokens), 1).exp()
            slots = table[i, tokens // caps.page_size].long() * caps.page_size + tokens % caps.page_size
            rows, slots = rows.to(caps.device), slots.to(caps.device)
            cache_writer.append(rows[:, : caps.kv_lora_rank], rows[:, caps.kv_lora_rank :], cache, slots)
    sums = torch.tensor([0, *counts]).cumsum(0)
    return RandomStep(
        q=(to_fp8(q) if caps.q_dtype is torch.float8_e4m3fn else q.to(caps.q_dtype)).to(caps.device),
        kv_cache=cache,
        page_table=table.to(caps.device),
        cache_seqlens=torch.tensor(list(lengths), dtype=torch.int32, device=caps.device),
        cu_seqlens_q=sums.to(torch.int32).to(caps.device),
    )
