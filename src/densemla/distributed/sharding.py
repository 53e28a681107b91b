"""Which rank holds which token, and how far a rank's shard is visible: pure integer functions.

Tokens of every request go round the ranks in runs of ``interleave``: token ``p`` lives on rank
``(p // interleave) % world``. A rank stores its tokens in order, without gaps, so token ``p`` is row
``p // (world * interleave) * interleave + p % interleave`` of its shard.

A visible length is a bound on *global* positions, so each is localised by itself. Taking a query's
distance from the newest token off the local length is wrong: with world 2, interleave 1, the bounds
8, 9, 10 are 4, 4, 5 on rank 1, not 3, 4, 5.

All raise :class:`ContractError` for a rank outside the world, an interleave below 1, and numbers of tokens that
are no int or negative (elements of tensors: in host memory).
"""

from __future__ import annotations

import torch

from ..checks import check_dims, check_int, check_tensor, check_values
from ..errors import ContractError


def owner(position: int, world: int, interleave: int = 1) -> int:
    """The rank that holds the token at global ``position``."""
    check_layout(0, world, interleave)
    check_int("position", position, 0)
    return position // interleave % world


def local_index(position: int, world: int, interleave: int = 1) -> int:
    """The row, in its owner's shard, of the token at global ``position``."""
    check_layout(0, world, interleave)
    check_int("position", position, 0)
    return position // (world * interleave) * interleave + position % interleave


def local_length(length: int, rank: int, world: int, interleave: int = 1) -> int:
    """Tokens below global position ``length`` that ``rank`` holds. Never less for a larger ``length``."""
    check_layout(rank, world, interleave)
    check_int("length", length, 0)
    rounds, rest = divmod(length, world * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def local_positions(length: int, rank: int, world: int, interleave: int = 1) -> torch.Tensor:
    """Global positions below ``length`` of the tokens that ``rank`` holds, in shard order: int64 [local_length]."""
    rows = torch.arange(local_length(length, rank, world, interleave))
    return (rows // interleave * world + rank) * interleave + rows % interleave


def local_lengths(lengths: torch.Tensor, rank: int, world: int, interleave: int = 1) -> torch.Tensor:
    """:func:`local_length` of every element; on the tensor's device, without a sync.

    Args:
        lengths: int32 or int64, any shape, no element negative.

    Returns:
        The same dtype and shape.
    """
    check_layout(rank, world, interleave)
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        raise ContractError("lengths", "an int32 or int64 tensor", getattr(lengths, "dtype", type(lengths).__name__))
    check_values("lengths", lengths, 0, torch.iinfo(lengths.dtype).max, "lengths of at least 0")
    cycle = world * interleave
    rest = (lengths % cycle - rank * interleave).clamp_(0, interleave)
    return lengths // cycle * interleave + rest


def visible_lengths(cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, total_q: int) -> torch.Tensor:
    """The *global* visible length of every query under the causal rule; without a sync.

    Query ``t`` of ``n`` sees ``cache_seqlens - n + 1 + t`` tokens, never below 0; rows past the last
    running sum belong to no request and see 0.

    Args:
        cache_seqlens: int32 [batch], global lengths including the newest token.
        cu_seqlens_q: int32 [batch + 1], running sum of queries per request.
        total_q: query rows.

    Returns:
        int32 [total_q].
    """
    check_dims("cache_seqlens", cache_seqlens, 1)
    batch, device = cache_seqlens.shape[0], cache_seqlens.device
    check_tensor("cache_seqlens", cache_seqlens, torch.int32, (batch,), device, unit_stride=False)
    check_tensor("cu_seqlens_q", cu_seqlens_q, torch.int32, (batch + 1,), device, unit_stride=False)
    check_int("total_q", total_q, 0)
    rows = torch.arange(total_q, dtype=torch.int32, device=device)
    if batch == 0:
        return torch.zeros_like(rows)
    ends = cu_seqlens_q[1:].contiguous()
    request = torch.searchsorted(ends, rows, right=True)
    inside = request < batch
    request = request.clamp_(max=batch - 1)
    visible = (cache_seqlens[request] - ends[request] + rows + 1).clamp_(min=0)
    return torch.where(inside, visible, 0)


def local_visible_lengths(
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    total_q: int,
    rank: int,
    world: int,
    interleave: int = 1,
) -> torch.Tensor:
    """Tokens of ``rank``'s shard that each query sees: int32 [total_q]; every global bound on its own.

    Arguments as for :func:`visible_lengths`. Pass the result as ``query_cache_seqlens`` of the local decode.
    """
    return local_lengths(visible_lengths(cache_seqlens, cu_seqlens_q, total_q), rank, world, interleave)


def check_layout(rank: int, world: int, interleave: int) -> None:
    """Raise :class:`ContractError` unless ``0 <= rank < world`` and ``interleave >= 1``."""
    for name, value, low, high in (
        ("world", world, 1, 1 << 20),
        ("rank", rank, 0, world - 1),
        ("interleave", interleave, 1, 1 << 24),
    ):
        check_int(name, value, low, high)
