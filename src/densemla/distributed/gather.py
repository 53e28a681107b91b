"""Gathering slices of different sizes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from ..checks import check_dense, is_int
from ..errors import ContractError
from .collectives import Group

_MAX_DIMS = 8


def all_gatherv(
    tensor: torch.Tensor,
    dim: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Concatenate every rank's ``tensor`` along ``dim``, in rank order; for inference, not differentiable.

    Without ``sizes`` the ranks first tell each other their shapes, which waits for the device. Slices of
    one size then travel in one all-gather, others in one broadcast for each rank that has any. Along
    ``dim`` 0 the pieces arrive in their final place, so the result is the only allocation for contiguous
    slices; along another ``dim`` it is made by one more copy.

    Args:
        tensor: this rank's slice, any dtype, on a device that the group serves; ``dim`` may have size 0.
        dim: dimension along which the sizes may differ; negative counts from the end.
        group: process group; None is the default one.
        sizes: the size along ``dim`` on each rank, where all ranks know it already. Then only this rank's
            own entry is checked (ranks that state different ``sizes`` wait for each other in vain, or gloo
            ends a process), the call waits for nothing, and on NCCL it can be captured in a CUDA graph.

    Returns:
        A new contiguous tensor with size ``sum(sizes)`` along ``dim``; in a group of one, ``tensor`` itself.

    Raises:
        ContractError: on *every* rank, if dtype, ``dim`` or another dimension differs between ranks or one
            rank's arguments are bad. With ``sizes``: on the rank whose arguments are bad.
        PeerError: a peer died or did not join.
    """
    ranks = Group(group)
    error = _refusal(tensor, dim, sizes, ranks)
    if sizes is None and ranks.world > 1:
        sizes = _agreed_sizes(tensor, dim, ranks, error)
    elif error is not None:
        raise error
    if sizes is None or ranks.world == 1:
        return tensor
    return _gather(tensor, dim % tensor.dim(), ranks, sizes)


def _refusal(tensor: object, dim: object, sizes: Sequence[int] | None, ranks: Group) -> ContractError | None:
    try:
        tensor = check_dense("tensor", tensor)
    except ContractError as error:
        return error
    if not 1 <= tensor.dim() <= _MAX_DIMS:
        return ContractError("tensor", f"1 to {_MAX_DIMS} dimensions", list(tensor.shape))
    if torch.is_grad_enabled() and tensor.requires_grad:
        return ContractError("tensor", "a tensor without gradient (call under torch.no_grad)", "requires_grad")
    if not is_int(dim, -tensor.dim(), tensor.dim() - 1):
        return ContractError("dim", f"an int in [{-tensor.dim()}, {tensor.dim()})", repr(dim))
    if sizes is not None:
        if (wrong := sizes_refusal(sizes, ranks)) is not None:
            return wrong
        if sizes[ranks.rank] != tensor.shape[dim]:
            return ContractError("sizes", f"{tensor.shape[dim]} for rank {ranks.rank}, as tensor has", list(sizes))
    return ranks.device_refusal("tensor", tensor.device)


def sizes_refusal(sizes: object, ranks: Group) -> ContractError | None:
    """The error for ``sizes`` that are not one int of at least 0 for each rank."""
    if isinstance(sizes, Sequence) and len(sizes) == ranks.world and all(is_int(size, 0) for size in sizes):
        return None
    return ContractError("sizes", f"a sequence of {ranks.world} ints of at least 0, one for each rank", repr(sizes))


def _agreed_sizes(tensor: torch.Tensor, dim: int, ranks: Group, error: ContractError | None) -> list[int]:
    """Every rank's size along ``dim``; raises on every rank unless the slices fit together."""
    if error is None:
        dim %= tensor.dim()
        shape = [*tensor.shape] + [0] * (_MAX_DIMS - tensor.dim())
        mine = [0, zlib.crc32(str(tensor.dtype).encode()), tensor.dim(), dim, *shape]
    else:
        mine = [1] + [0] * (3 + _MAX_DIMS)
    rows = ranks.exchange(mine, "shapes")
    if error is not None:
        raise error
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    if refused:
        raise ContractError("tensor", "a slice that every rank accepts", f"a refusal on ranks {refused}")
    for name, column in (("dtype", 1), ("number of dimensions", 2), ("dim", 3)):
        _check_same(name, [row[column] for row in rows], tensor, ranks)
    shapes = [row[4 : 4 + tensor.dim()] for row in rows]
    _check_same("other dimensions", [shape[:dim] + shape[dim + 1 :] for shape in shapes], tensor, ranks)
    return [shape[dim] for shape in shapes]


def _check_same(what: str, found: list[int] | list[list[int]], tensor: torch.Tensor, ranks: Group) -> None:
    others = [rank for rank, value in enumerate(found) if value != found[0]]
    if others:
        raise ContractError(
            "tensor",
            f"the {what} of rank 0 on every rank",
            f"another on ranks {others}; rank {ranks.rank} has {tensor.dtype} {list(tensor.shape)}",
        )


def _gather(tensor: torch.Tensor, dim: int, ranks: Group, sizes: Sequence[int]) -> torch.Tensor:
    # Bytes travel, so what is negated or conjugated only when read has to be written out.
    piece = tensor.movedim(dim, 0).resolve_conj().resolve_neg().contiguous()
    gathered = piece.new_empty(sum(sizes), *piece.shape[1:])
    if gathered.numel() == 0:
        return gathered.movedim(0, dim)
    if len(set(sizes)) == 1:
        ranks.all_gather(gathered, piece, "slices")
    else:
        ends = list(accumulate(sizes))
        pieces = [gathered[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        pieces[ranks.rank].copy_(piece)
        ranks.broadcast_all(pieces, "slices")
    return gathered.movedim(0, dim).contiguous()
