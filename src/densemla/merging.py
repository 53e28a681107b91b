"""Merging partial attention results by log-sum-exp."""

from __future__ import annotations

import math

import torch

from .checks import check_dense
from .errors import ContractError


def merge(outputs: torch.Tensor, lses: torch.Tensor, *, base: float = math.e) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint sets of keys into the result over their union.

    With ``Z_i = sum(exp(scores))`` over part ``i``: ``output = sum(Z_i * outputs_i) / sum(Z_i)`` and
    ``lse = log(sum(Z_i))``, computed in float32 (float64 for float64 input) relative to the largest part.

    A part that saw no key is empty: its LSE is -inf and whatever its output holds, NaN included, is
    dropped. LSE +inf, which some kernels publish for "no key", counts as empty too. A NaN LSE is a fault
    of the part and stays visible as NaN.

    Args:
        outputs: [parts, ..., d], any float dtype; each part normalised by its own ``Z_i``.
        lses: [parts, ...], float32 or float64; logarithm of ``Z_i`` to ``base``.
        base: base of the logarithm in ``lses``: ``math.e`` (all of densemla) or 2 (FlashInfer and the
            kernels that use exp2).

    Returns:
        ``(output, lse)``: [..., d] in the dtype of ``outputs``, and [...] in the dtype of ``lses``,
        **natural log** whatever ``base`` was. Where every part is empty: exactly 0 and -inf.

    Raises:
        ContractError: shapes or dtypes do not fit, or ``base`` is neither e nor 2.
    """
    if not isinstance(base, (int, float)) or base not in (math.e, 2):
        raise ContractError("base", "math.e or 2", repr(base))
    for name, tensor in (("outputs", outputs), ("lses", lses)):
        check_dense(name, tensor)
    if outputs.dim() < 2 or outputs.shape[0] < 1 or not outputs.is_floating_point():
        raise ContractError("outputs", "a float tensor [parts >= 1, ..., d]", f"{outputs.dtype} {list(outputs.shape)}")
    if lses.shape != outputs.shape[:-1] or lses.dtype not in (torch.float32, torch.float64):
        raise ContractError(
            "lses", f"float32 or float64 {list(outputs.shape[:-1])}", f"{lses.dtype} {list(lses.shape)}"
        )
    if lses.device != outputs.device:
        raise ContractError("lses", f"device {outputs.device}", lses.device)
    compute = torch.float64 if torch.float64 in (outputs.dtype, lses.dtype) else torch.float32
    natural = lses.to(compute) * math.log(base)
    natural = torch.where(natural == math.inf, -math.inf, natural)
    empty = natural == -math.inf
    top = natural.amax(0)
    # An all-empty column has no finite maximum to subtract.
    top = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp(natural - top)
    total = weight.sum(0)
    # Dropped, not multiplied by 0: an empty part may hold NaN.
    parts = torch.where(empty.unsqueeze(-1), 0.0, outputs.to(compute))
    output = (parts * weight.unsqueeze(-1)).sum(0) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return output.to(outputs.dtype), (top + torch.log(total)).to(lses.dtype)
