"""What every collective here shares: the group, clear errors, and agreement between ranks.

All collectives move bytes (their tensors are viewed as uint8), because not every backend knows every
dtype: gloo has no fp8. The one exception adds numbers and needs their type.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ContractError

# torch 2.13 renamed these and warns about the names that 2.11 has.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_DUMP_WAIT_MS = 250


def end_soon_after_a_timeout() -> None:
    """Let NCCL's watchdog end this process a second after its report of a missing peer, not a minute.

    Between the two it waits four times the variable :data:`DUMP_WAIT`, 60 s by default, for every rank to write
    torch's flight record. Process groups read it when they are made: call this before ``init_process_group``.
    A value that the environment has already stays.
    """
    os.environ.setdefault(DUMP_WAIT, str(_DUMP_WAIT_MS))


class PeerError(RuntimeError):
    """A collective failed: a peer died, is stuck past the group's timeout, or can't be reached."""


class Group:
    """A process group as this rank sees it: who am I, how many are we, which device travels.

    Args:
        group: from ``torch.distributed.new_group``, or None for the default group.

    Raises:
        ContractError: ``torch.distributed`` isn't initialised, ``group`` is none, or this rank isn't in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ContractError("group", "an initialised torch.distributed (torchrun, then init_process_group)", "none")
        self.process_group = group
        try:
            self.rank = dist.get_rank(group)
        except ValueError as error:
            raise ContractError("group", "a torch.distributed process group, or None", repr(group)) from error
        if self.rank < 0:
            raise ContractError("group", "a group that holds this rank", f"one without rank {dist.get_rank()}")
        self.world = dist.get_world_size(group)
        self.backend: str = dist.get_backend(group)

    def device_refusal(self, name: str, device: torch.device) -> ContractError | None:
        """The error for a tensor on ``device``, if the group's backend can't move it."""
        for backend, served in (("nccl", "cuda"), ("gloo", "cpu")):
            if self.backend == backend and device.type != served:
                return ContractError(name, f"a {served} tensor (the group's backend is {backend})", f"one on {device}")
        return None

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.world}: {what} failed on {self.backend}. A peer has died or did not "
                f"join within the group's timeout; look at the other ranks' logs and restart them all. ({error})"
            ) from error

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str) -> None:
        """``output`` [world, *input.shape] receives every rank's ``input``; both contiguous."""
        with self._collective(f"the all-gather of {what}"):
            _all_gather(as_bytes(output), as_bytes(input), group=self.process_group)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, what: str) -> None:
        """Row ``r`` of ``input`` [world, ...] goes to rank ``r``; row ``s`` of ``output`` came from rank ``s``."""
        with self._collective(f"the all-to-all of {what}"):
            dist.all_to_all_single(as_bytes(output), as_bytes(input), group=self.process_group)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, what: str) -> None:
        """``output`` = the sum over ranks of their ``input[rank]``, in the tensors' dtype.

        The order of the additions is the backend's.
        """
        with self._collective(f"the reduce-scatter of {what}"):
            _reduce_scatter(output.view(-1), input.view(-1), group=self.process_group)

    def broadcast_all(self, pieces: Sequence[torch.Tensor], what: str) -> None:
        """Every rank receives ``pieces[r]`` from rank ``r``; empty pieces are not sent."""
        with self._collective(f"the gather of {what}"):
            works = [
                dist.broadcast(as_bytes(piece), group=self.process_group, group_src=source, async_op=True)
                for source, piece in enumerate(pieces)
                if piece.numel()
            ]
            for work in works:
                work.wait()

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Every rank's ``values`` (as many on each), on the host; with NCCL it waits for the device."""
        device = torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        theirs = mine.new_empty(self.world, len(values))
        self.all_gather(theirs, mine, what)
        with self._collective(f"the all-gather of {what}"):
            rows: list[list[int]] = theirs.tolist()
        return rows

    def agree(self, facts: dict[str, object], error: ContractError | None = None) -> None:
        """Raise on every rank unless all ranks state the same ``facts`` and none has an ``error`` of its own.

        A rank that finds its own input bad passes the error here, with the facts None, so that its peers
        don't wait for it.

        Raises:
            ContractError: this rank's ``error``; or the name of the first fact in which a rank differs.
        """
        marks = [zlib.crc32(repr(fact).encode()) for fact in facts.values()]
        rows = self.exchange([int(error is not None), *marks], "a check")
        if error is not None:
            raise error
        for rank, row in enumerate(rows):
            if row[0]:
                raise ContractError("group", "input that every rank accepts", f"a refusal on rank {rank}")
        for index, (name, fact) in enumerate(facts.items(), start=1):
            ranks = [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]
            if ranks:
                raise ContractError(name, "what rank 0 has", f"another on ranks {ranks}; rank {self.rank} has {fact}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat uint8, without a copy."""
    return tensor.view(-1).view(torch.uint8)
