"""Attention of a vision tower with its queries spread over ranks (MoonViT: bidirectional, packed images).

Images are packed one after another along the token dimension, and a token attends to all tokens of its
image. Every rank holds all keys and values and a run of consecutive queries; runs may differ in length
and may be empty. A rank attends with its own queries, then the outputs are gathered in order, so the
quadratic work is shared and the linear one is not communicated.

Memory grows with the tokens, never with tokens times queries (:func:`activation_bytes` has the formula):
only attention kernels that keep their scores in tiles may run, and where torch has none for a dtype or
head size the call fails and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..checks import check_dense, check_dims, check_int, check_scale, is_int
from ..distributed.collectives import Group
from ..distributed.gather import all_gatherv, sizes_refusal
from ..errors import ContractError

_TILED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]

_TILE_QUERIES, _TILE_KEYS = 256, 512
"""The largest tile of scores that torch's CPU kernel keeps for each thread."""


def even_shares(tokens: int, world: int) -> list[int]:
    """Queries for each rank: as even as can be, the longer shares first.

    Raises:
        ContractError: ``tokens`` is no int of at least 0, or ``world`` none of at least 1.
    """
    check_int("tokens", tokens, 0)
    check_int("world", world, 1)
    share, longer = divmod(tokens, world)
    return [share + (rank < longer) for rank in range(world)]


def activation_bytes(
    tokens: int,
    share: int,
    *,
    heads: int,
    head_dim: int,
    itemsize: int,
    largest_image: int,
    cpu_threads: int = 0,
) -> int:
    """Most memory that :func:`query_sharded_attention` takes on a rank beside its arguments, in bytes.

    Args:
        tokens: all packed tokens N.
        share: this rank's queries n.
        heads, head_dim, itemsize: H, d and the element size e.
        largest_image: tokens L of the longest image.
        cpu_threads: torch's threads, where attention runs on the CPU; GPU kernels keep their tiles on chip.

    Returns:
        The sum of: this rank's output ``n*H*d*e``; one image's part of it with its log-sum-exp, at most
        ``min(n, L)*H*(d*e + 4)``; the gathered output ``N*H*d*e``; an image's keys and values, where a
        kernel repacks them, ``2*L*H*d*e``; and a float32 tile of 256 x 512 scores with its output and
        statistics for each CPU thread.
    """
    row = heads * head_dim * itemsize
    part = min(share, largest_image) * (row + 4 * heads)
    tiles = cpu_threads * 4 * _TILE_QUERIES * (_TILE_KEYS + head_dim + 2)
    return share * row + part + tokens * row + 2 * largest_image * row + tiles


def attend_share(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    start: int,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Attend with queries ``start`` to ``start + n`` of the packed tokens; no communication.

    Args:
        q: [n, heads, head_dim] float; n may be 0.
        k, v: [tokens, heads, head_dim], same dtype and device: all keys and values.
        cu_seqlens: tokens before each image and after the last: 0, ..., tokens, [images + 1], never
            falling. A CUDA tensor is read on the host, which waits for the device: pass a list in a loop
            over layers.
        start: position of the first query among the packed tokens.
        sm_scale: factor on the scores; None is ``head_dim ** -0.5``.

    Returns:
        [n, heads, head_dim], the dtype of ``q``.

    Raises:
        ContractError: an argument does not fit, or torch has no tiled kernel for it.
    """
    bounds = _bounds(q, k, v, cu_seqlens)
    if not is_int(start, 0, k.shape[0] - q.shape[0]):
        raise ContractError("start", f"an int in [0, {k.shape[0] - q.shape[0]}]", repr(start))
    scale = _scale(sm_scale, q.shape[2])
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    with sdpa_kernel(_TILED):
        for queries, keys in _segments(start, q.shape[0], bounds):
            output[queries] = _attend(q[queries], k[keys], v[keys], scale)
    return output


def query_sharded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    sm_scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attention over packed images, the queries shared out over ``group``. Collective; for inference.

    Args:
        q: [n, heads, head_dim]: this rank's run of queries. Rank 0 has the first, and so on.
        k, v, cu_seqlens, sm_scale: as for :func:`attend_share`; the same on every rank.
        group: process group; None is the default one.
        sizes: n of each rank, where all ranks know them (:func:`even_shares`, say). Then nothing is
            exchanged beforehand and bad arguments are an error of their rank alone, as in
            :func:`densemla.distributed.all_gatherv`.

    Returns:
        [tokens, heads, head_dim] on every rank, in token order.

    Raises:
        ContractError: on every rank, if an argument does not fit, the shares don't add up to all tokens,
            or k's shape, dtype, ``cu_seqlens`` or the scale differ between ranks.
        PeerError: a peer died or did not join.
    """
    ranks = Group(group)
    if sizes is None:
        sizes, bounds = _agreed_shares(q, k, v, cu_seqlens, sm_scale, ranks)
    else:
        bounds = _bounds(q, k, v, cu_seqlens)
        if (wrong := sizes_refusal(sizes, ranks)) is not None:
            raise wrong
    if sum(sizes) != k.shape[0] or sizes[ranks.rank] != q.shape[0]:
        raise ContractError(
            "sizes", f"shares with the sum {k.shape[0]}, {q.shape[0]} of them on rank {ranks.rank}", list(sizes)
        )
    output = attend_share(q, k, v, bounds, start=sum(sizes[: ranks.rank]), sm_scale=sm_scale)
    return all_gatherv(output, 0, group, sizes=sizes)


def _agreed_shares(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    sm_scale: float | None,
    ranks: Group,
) -> tuple[list[int], list[int]]:
    """Every rank's number of queries, and ``cu_seqlens`` on the host."""
    error = None
    facts: dict[str, object] = dict.fromkeys(("k", "cu_seqlens", "sm_scale"))
    share, bounds = 0, [0]
    try:
        bounds = _bounds(q, k, v, cu_seqlens)
        scale = _scale(sm_scale, q.shape[2])
        facts = {"k": f"{k.dtype} {list(k.shape)}", "cu_seqlens": bounds, "sm_scale": scale}
        share = q.shape[0]
        with sdpa_kernel(_TILED):
            # A rank without queries of its own must learn, too, that torch has no kernel.
            _attend(k[:1], k[:1], v[:1], scale)
    except ContractError as refusal:
        error = refusal
    ranks.agree(facts, error)
    return [row[0] for row in ranks.exchange([share], "shares")], bounds


def _bounds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | Sequence[int]) -> list[int]:
    """``cu_seqlens`` on the host, all arguments checked."""
    for name, tensor in (("k", k), ("v", v), ("q", q)):
        check_dense(name, tensor)
        if tensor.dim() != 3 or not tensor.is_floating_point() or 0 in tensor.shape[1:]:
            raise ContractError(
                name,
                "a float tensor [tokens, heads, head_dim], the last two above 0",
                f"{tensor.dtype} {list(tensor.shape)}",
            )
        if tensor.dtype is not k.dtype or tensor.device != k.device or tensor.shape[1:] != k.shape[1:]:
            raise ContractError(
                name,
                f"{k.dtype} [..., {k.shape[1]}, {k.shape[2]}] on {k.device}, as k is",
                f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ContractError(name, "a tensor without gradient (call under torch.no_grad)", "requires_grad")
    tokens = k.shape[0]
    if v.shape[0] != tokens:
        raise ContractError("v", f"{tokens} tokens, as k has", v.shape[0])
    if q.shape[0] > tokens:
        raise ContractError("q", f"at most the {tokens} tokens of k", q.shape[0])
    if isinstance(cu_seqlens, torch.Tensor):
        check_dims("cu_seqlens", cu_seqlens, 1)
        if cu_seqlens.is_meta:
            raise ContractError("cu_seqlens", "values", "a meta tensor")
        bounds = cu_seqlens.tolist()
    else:
        bounds = list(cu_seqlens) if isinstance(cu_seqlens, Sequence) else [cu_seqlens]
    whole = bool(bounds) and all(is_int(bound, 0) for bound in bounds)
    if not whole or bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in pairwise(bounds)):
        raise ContractError("cu_seqlens", f"a running sum from 0 to {tokens}, the tokens of k", cu_seqlens)
    return bounds


def _scale(sm_scale: float | None, head_dim: int) -> float:
    if sm_scale is None:
        return float(head_dim**-0.5)
    return check_scale("sm_scale", sm_scale)


def _segments(start: int, count: int, bounds: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """For every image with queries in the share: those rows of the share, and the image's tokens."""
    for first, last in pairwise(bounds):
        begin, end = max(first, start), min(last, start + count)
        if begin < end:
            yield slice(begin - start, end - start), slice(first, last)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """All of ``q`` against all of ``k``: [n, heads, head_dim]."""
    queries, keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    try:
        attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise ContractError(
            "q", "a dtype and head_dim that torch has a tiled attention kernel for", f"{q.dtype}, {q.shape[2]}"
        ) from error
    return attended.squeeze(0).transpose(0, 1)
