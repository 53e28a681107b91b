"""Merging the ranks' partial attention results, so that each rank ends with its own heads.

Two forms of one sum. With ``Z_r = exp(lse_r)`` a head's result is ``sum(Z_r * output_r) / sum(Z_r)``.

``"all_to_all"``: each rank sends every other one its partial for that rank's heads, each with its LSE behind
it. The owner of the heads merges in float32: one rounding per partial, and bits that depend neither on
timing nor on how messages travel.

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

from ..checks import check_apart, check_int, check_leading, check_tensor, check_writable, is_int
from ..device import usable
from ..errors import ContractError
from ..merging import merge
from ..options import check_partial_dtype
from ..splits import ceil_div
from .collectives import Group

Form = Literal["all_to_all", "reduce_scatter"]
FORMS: tuple[Form, ...] = get_args(Form)

_PAD = 16
"""Elements behind a row that its LSE travels in; and what rows are a multiple of, for wide stores."""


class LseMerge:
    """Buffers and arithmetic of a merge across ranks; usable with any attention kernel.

    Write a step's partial results into the tensors of :meth:`partials`, then :meth:`run`. All buffers are
    allocated here; on CUDA :meth:`run` allocates nothing and on NCCL it can be captured in a CUDA graph.

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
        device: torch.device | str,
    ) -> None:
        self.ranks = Group(group)
        world = self.ranks.world
        if form not in FORMS:
            raise ContractError("form", " or ".join(map(repr, FORMS)), repr(form))
        for name, value, low in (("num_heads", num_heads, 1), ("width", width, 1), ("max_rows", max_rows, 0)):
            check_int(name, value, low)
        if num_heads % world:
            raise ContractError("num_heads", f"a multiple of the group's {world} ranks", num_heads)
        device = usable(device)
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
        in_message = form == "all_to_all"
        self._stride = ceil_div(width, _PAD) * _PAD + _PAD if in_message else width
        size = max_rows * num_heads * self._stride
        self._partials = torch.empty(size, dtype=self.partial_dtype, device=device)
        self._send = torch.empty_like(self._partials)
        self._received = torch.empty(size if in_message else size // world, dtype=self.partial_dtype, device=device)
        if not in_message:
            self._lse = torch.empty(max_rows * num_heads, dtype=torch.float32, device=device)
            self._lses = torch.empty(world * max_rows * num_heads, dtype=torch.float32, device=device)

    def partials(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this rank's partial results of a step of ``rows`` queries go, before :meth:`run`.

        Returns:
            ``(output, lse)``: [rows, num_heads, width] in the partial type, normalised by its own sum, and
            float32 [rows, num_heads]. In the all-to-all form both lie in the messages to be sent, with
            strides: an LSE directly behind its output.
        """
        if not is_int(rows, 0, self.max_rows):
            raise ContractError("rows", f"an int in [0, max_rows = {self.max_rows}]", repr(rows))
        shape = (rows, self.num_heads)
        whole = self._cut(self._partials, *shape)
        if self.form == "all_to_all":
            return self._fields(whole)
        return whole, self._lse[: rows * self.num_heads].view(shape)

    def _cut(self, buffer: torch.Tensor, *shape: int) -> torch.Tensor:
        """The beginning of ``buffer`` as rows of this form's stride: [*shape, stride]."""
        return buffer[: math.prod(shape) * self._stride].view(*shape, self._stride)

    def _fields(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [..., width] and LSEs [...] of message rows [..., stride]."""
        lses = rows.view(torch.float32)
        return rows[..., : self.width], lses[..., lses.shape[-1] - _PAD * self.partial_dtype.itemsize // 4]

    def run(self, output: torch.Tensor, lse: torch.Tensor, *, base: float = math.e) -> None:
        """Merge the ranks' :meth:`partials` of ``len(output)`` rows into each rank's own heads. Collective.

        A rank whose LSE is -inf (or +inf, as some kernels publish it) saw no key: its output, NaN
        included, is dropped. Where every rank is empty the result is exactly 0 and -inf.

        Args:
            output: [rows, own_heads, width], any float dtype, last stride 1; written.
            lse: float32 [rows, own_heads]; written; **natural log** whatever ``base`` is.
            base: of the logarithm in the partials' LSEs: ``math.e`` (all of densemla) or 2 (kernels that use
                exp2).

        Raises:
            ContractError: a tensor or ``base`` does not fit. On this rank alone.
            PeerError: a peer died or did not join.
        """
        self._check(output, lse, base)
        if output.shape[0] == 0:
            return
        # Not no_grad, which would refuse tensors that were made in inference mode.
        with torch.inference_mode():
            if self.form == "all_to_all":
                self._all_to_all(output, lse, base)
            else:
                self._reduce_scatter(output, lse, base)

    def _all_to_all(self, output: torch.Tensor, lse: torch.Tensor, base: float) -> None:
        world, rows, own = self.ranks.world, output.shape[0], self.own_heads
        sent = self._cut(self._partials, rows, self.num_heads)
        if rows > 1:
            # By receiver. One row is in that order already.
            by_owner = self._by_owner(sent)
            sent = self._cut(self._send, world, rows, own)
            sent.view(torch.int64).copy_(by_owner.view(torch.int64))
        received = self._cut(self._received, world, rows, own)
        self.ranks.all_to_all(received, sent, "partial outputs")
        outputs, lses = self._fields(received)
        if self._kernels:
            self._kernels.merge_received(outputs, lses, output, lse, base)
        else:
            # Widened before the merge, which answers in the type of its input.
            merged, merged_lse = merge(outputs.float(), lses, base=base)
            output.copy_(merged)
            lse.copy_(merged_lse)

    def _reduce_scatter(self, output: torch.Tensor, lse: torch.Tensor, base: float) -> None:
        world, rank, rows, own = self.ranks.world, self.ranks.rank, output.shape[0], self.own_heads
        partial, partial_lse = self.partials(rows)
        lses = self._lses[: world * rows * self.num_heads].view(world, rows, self.num_heads)
        self.ranks.all_gather(lses, partial_lse, "LSEs")
        weighted = self._cut(self._send, world, rows, own)
        if self._kernels:
            self._kernels.weigh(partial, lses, rank, weighted, lse, base)
        else:
            weight, merged_lse = _weights(lses, rank, base)
            # Dropped, not multiplied by 0: an empty shard may hold NaN.
            scaled = torch.where(lses[rank].isinf().unsqueeze(-1), 0.0, partial.float() * weight.unsqueeze(-1))
            weighted.copy_(self._by_owner(scaled))
            lse.copy_(self._by_owner(merged_lse)[rank])
        total = self._cut(self._received, rows, own)
        self.ranks.reduce_scatter(total, weighted, "weighted partials")
        output.copy_(total)

    def _by_owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, num_heads, ...] as [world, rows, own_heads, ...]: heads by the rank that owns them."""
        rows, _, *rest = tensor.shape
        return tensor.reshape(rows, self.ranks.world, self.own_heads, *rest).transpose(0, 1)

    def _check(self, output: torch.Tensor, lse: torch.Tensor, base: float) -> None:
        if not isinstance(base, (int, float)) or base not in (math.e, 2):
            raise ContractError("base", "math.e or 2", repr(base))
        rows = check_leading("output", output, self.max_rows, "max_rows")
        if not output.is_floating_point():
            raise ContractError("output", "a float dtype", output.dtype)
        check_tensor("output", output, output.dtype, (rows, self.own_heads, self.width), self.device)
        check_tensor("lse", lse, torch.float32, (rows, self.own_heads), self.device, unit_stride=False)
        for name, tensor in (("output", output), ("lse", lse)):
            check_writable(name, tensor)
        check_apart({"output": output, "lse": lse}, {})


def _weights(lses: torch.Tensor, rank: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``Z_rank / sum(Z)`` and the natural-log LSE of the whole, [rows, num_heads]; weight 0 if ``rank`` is empty."""
    # The merge of one-element outputs [is it this rank?] is this rank's share of the sum.
    shares = torch.zeros_like(lses)
    shares[rank] = 1.0
    weight, lse = merge(shares.unsqueeze(-1), lses, base=base)
    return weight.squeeze(-1), lse
