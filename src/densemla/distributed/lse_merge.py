"""Merging the ranks' partial attention results, so that each rank ends with its own heads.

Two forms of one sum. With ``Z_r = exp(lse_r)`` a head's result is ``sum(Z_r * output_r) / sum(Z_r)``.

``"all_to_all"``: each rank sends every other one its partial for that rank's heads, LSE in the same
message. The owner of the heads merges in float32, in rank order: one rounding per partial, and bits that
depend neither on timing nor on the backend.

``"reduce_scatter"``: LSEs are gathered, each rank weighs its partials and a reduce-scatter adds them up.
The weighted partials are rounded to the partial type and the sum is kept in it; its order is the
backend's. It is fixed for a given machine, NCCL version and size, but with more than two ranks another
one may give other bits.

Both carry the same bytes per rank (plus the LSEs), whatever the number of ranks.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ..errors import ContractError
from ..merging import merge
from ..options import check_partial_dtype
from .collectives import Group

Form = Literal["all_to_all", "reduce_scatter"]
FORMS: tuple[Form, ...] = get_args(Form)

_ALIGN = 16


class LseMerge:
    """Buffers and arithmetic of a merge across ranks; usable with any attention kernel.

    All buffers are allocated here; :meth:`run` allocates none on CUDA (on the CPU its products are torch
    temporaries) and can be captured in a CUDA graph on NCCL. Every rank calls with the same ``rows``.

    Args:
        group: process group; None is the default one. Rank ``r`` owns heads ``[r * n, (r + 1) * n)``, with
            ``n = num_heads / world``.
        num_heads: heads of all ranks together; a multiple of the group's size.
        width: values per head (``kv_lora_rank``).
        max_rows: most query rows in one call.
        partial_dtype: bf16 or float32, in which partial outputs travel.
        form: ``"all_to_all"`` or ``"reduce_scatter"``.
        device: where the tensors live.

    Raises:
        ContractError: an argument does not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        num_heads: int,
        width: int,
        max_rows: int,
        partial_dtype: torch.dtype,
        form: Form = "all_to_all",
        device: torch.device,
    ) -> None:
        self.ranks = Group(group)
        world = self.ranks.world
        if form not in FORMS:
            raise ContractError("form", " or ".join(map(repr, FORMS)), repr(form))
        if num_heads % world:
            raise ContractError("num_heads", f"a multiple of the group's {world} ranks", num_heads)
        if (error := self.ranks.device_refusal("device", device)) is not None:
            raise error
        self.form: Form = form
        self.partial_dtype = check_partial_dtype(partial_dtype)
        self.num_heads, self.own_heads, self.width, self.max_rows = num_heads, num_heads // world, width, max_rows
        self.device = torch.empty(0, device=device).device
        self._kernels: Any = None
        if device.type == "cuda":
            # Not at the top: Triton is there only where there is a GPU.
            self._kernels = importlib.import_module(f"{__package__}.merge_kernels")
        message = self._message_bytes(max_rows)
        self._send = torch.empty(world * message, dtype=torch.uint8, device=device)
        if form == "all_to_all":
            self._received = torch.empty_like(self._send)
        else:
            self._received = torch.empty(message, dtype=torch.uint8, device=device)
            self._lses = torch.empty(world * max_rows * num_heads, dtype=torch.float32, device=device)

    def _message_bytes(self, rows: int) -> int:
        """What one rank sends another: its partials and, in the all-to-all form, their LSEs behind them."""
        outputs = self._aligned(rows * self.own_heads * self.width * self.partial_dtype.itemsize)
        return outputs + self._aligned(rows * self.own_heads * 4) if self.form == "all_to_all" else outputs

    @staticmethod
    def _aligned(size: int) -> int:
        return -(-size // _ALIGN) * _ALIGN

    def _messages(self, buffer: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``buffer`` cut for ``rows``: its bytes [world, message], outputs [world, rows, own_heads, width], LSEs."""
        size = self._message_bytes(rows)
        whole = buffer[: self.ranks.world * size].view(self.ranks.world, size)
        cut = rows * self.own_heads * self.width * self.partial_dtype.itemsize
        outputs = whole[:, :cut].view(self.partial_dtype).view(-1, rows, self.own_heads, self.width)
        start = self._aligned(cut)
        lses = whole[:, start : start + rows * self.own_heads * 4].view(torch.float32)
        return whole, outputs, lses.view(-1, rows, self.own_heads)

    def run(
        self,
        partial_output: torch.Tensor,
        partial_lse: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        *,
        base: float = math.e,
    ) -> None:
        """Merge one step's partials into ``output`` and ``lse``.

        A rank whose LSE is -inf (or +inf, as some kernels publish it) saw no key: its output, NaN
        included, is dropped. Where every rank is empty the result is exactly 0 and -inf.

        Args:
            partial_output: [rows, num_heads, width] in the partial type, contiguous; this rank's result
                over its shard, normalised by its own sum.
            partial_lse: float32 [rows, num_heads], contiguous, logarithm to ``base``.
            output: [rows, own_heads, width], any float dtype, last stride 1; written.
            lse: float32 [rows, own_heads]; written; **natural log** whatever ``base`` was.
            base: ``math.e`` (all of densemla) or 2 (kernels that use exp2).

        Raises:
            ContractError: a tensor or ``base`` does not fit. On this rank alone.
            PeerError: a peer died or did not join.
        """
        self._check(partial_output, partial_lse, output, lse, base)
        if partial_output.shape[0] == 0:
            return
        form = self._all_to_all if self.form == "all_to_all" else self._reduce_scatter
        form(partial_output, partial_lse, output, lse, base)

    def _all_to_all(
        self, partial: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, base: float
    ) -> None:
        rows = partial.shape[0]
        message, send_outputs, send_lses = self._messages(self._send, rows)
        received, outputs, lses = self._messages(self._received, rows)
        if self._kernels:
            self._kernels.pack(partial, partial_lse, send_outputs, send_lses)
        else:
            send_outputs.copy_(self._by_owner(partial))
            send_lses.copy_(self._by_owner(partial_lse))
        self.ranks.all_to_all(received, message, "partial outputs")
        if self._kernels:
            self._kernels.merge_received(outputs, lses, output, lse, base)
        else:
            # Widened before the merge, which answers in the type of its input.
            merged, merged_lse = merge(outputs.float(), lses, base=base)
            output.copy_(merged)
            lse.copy_(merged_lse)

    def _reduce_scatter(
        self, partial: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, base: float
    ) -> None:
        world, rank, rows = self.ranks.world, self.ranks.rank, partial.shape[0]
        lses = self._lses[: world * rows * self.num_heads].view(world, rows, self.num_heads)
        self.ranks.all_gather(lses, partial_lse, "LSEs")
        size = rows * self.own_heads * self.width
        weighted = self._send.view(self.partial_dtype)[: world * size].view(world, rows, self.own_heads, self.width)
        total = self._received.view(self.partial_dtype)[:size].view(rows, self.own_heads, self.width)
        if self._kernels:
            self._kernels.weigh(partial, lses, rank, weighted, lse, base)
        else:
            weight, merged_lse = _weights(lses, rank, base)
            # Dropped, not multiplied by 0: an empty shard may hold NaN.
            scaled = torch.where((weight == 0).unsqueeze(-1), 0.0, partial.float() * weight.unsqueeze(-1))
            weighted.copy_(self._by_owner(scaled))
            lse.copy_(self._by_owner(merged_lse)[rank])
        self.ranks.reduce_scatter(total, weighted, "weighted partials")
        output.copy_(total)

    def _by_owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, num_heads, ...] as [world, rows, own_heads, ...]: heads by the rank that owns them."""
        rows, _, *rest = tensor.shape
        return tensor.reshape(rows, self.ranks.world, self.own_heads, *rest).transpose(0, 1)

    def _check(
        self, partial: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, base: float
    ) -> None:
        if base not in (math.e, 2):
            raise ContractError("base", "math.e or 2", repr(base))
        rows = partial.shape[0] if isinstance(partial, torch.Tensor) and partial.dim() else -1
        if not 0 <= rows <= self.max_rows:
            raise ContractError("partial_output", f"at most max_rows = {self.max_rows} rows", rows)
        for name, tensor, dtype, shape in (
            ("partial_output", partial, self.partial_dtype, (rows, self.num_heads, self.width)),
            ("partial_lse", partial_lse, torch.float32, (rows, self.num_heads)),
            ("output", output, None, (rows, self.own_heads, self.width)),
            ("lse", lse, torch.float32, (rows, self.own_heads)),
        ):
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape or tensor.device != self.device:
                got = f"{list(tensor.shape)} on {tensor.device}" if isinstance(tensor, torch.Tensor) else repr(tensor)
                raise ContractError(name, f"{list(shape)} on {self.device}", got)
            if tensor.dtype is not dtype if dtype is not None else not tensor.is_floating_point():
                raise ContractError(name, str(dtype or "a float dtype"), tensor.dtype)
        for name, tensor in (("partial_output", partial), ("partial_lse", partial_lse)):
            if not tensor.is_contiguous():
                raise ContractError(name, "a contiguous tensor", f"strides {tensor.stride()}")


def _weights(lses: torch.Tensor, rank: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``Z_rank / sum(Z)`` and the natural-log LSE of the whole, [rows, num_heads]; weight 0 if ``rank`` is empty."""
    # The merge of one-element outputs [is it this rank?] is this rank's share of the sum.
    shares = torch.zeros_like(lses)
    shares[rank] = 1.0
    weight, lse = merge(shares.unsqueeze(-1), lses, base=base)
    return weight.squeeze(-1), lse
