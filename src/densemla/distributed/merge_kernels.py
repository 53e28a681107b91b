"""The CUDA side of :mod:`.lse_merge`: each step of a merge as one kernel, one program per query row and head.

The arithmetic is that of :func:`densemla.merge`, in float32 and in rank order.
"""

# Triton ships no types, and its kernels take pointers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_LN2 = math.log(2)


@triton.jit
def _natural(lse, ln_base):
    """To natural log, with +inf (some kernels' "no key") as -inf."""
    lse = lse * ln_base
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _top_and_total(lses, stride, ln_base, WORLD: tl.constexpr):
    """The largest LSE (0 if all are -inf) and the sum of ``exp(lse - top)`` over the ranks."""
    top = float("-inf")
    for source in tl.static_range(WORLD):
        top = tl.maximum(top, _natural(tl.load(lses + source * stride), ln_base))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    for source in tl.static_range(WORLD):
        total += tl.exp(_natural(tl.load(lses + source * stride), ln_base) - top)
    return top, total


# fmt: off
@triton.jit
def _merge_kernel(
    outputs, lses, outputs_source, outputs_slot, lses_source, lses_slot,
    output, lse, output_row, output_head, lse_row, lse_head, ln_base,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row, head = slot // OWN, slot % OWN
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    top, total = _top_and_total(lses + slot * lses_slot, lses_source, ln_base, WORLD)
    merged = tl.zeros((BLOCK,), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        part_lse = _natural(tl.load(lses + source * lses_source + slot * lses_slot), ln_base)
        row_of_part = outputs + source * outputs_source + slot * outputs_slot
        part = tl.load(row_of_part + cols, mask=inside, other=0.0).to(tl.float32)
        # Dropped, not multiplied by 0: an empty shard may hold NaN.
        merged += tl.where(part_lse == float("-inf"), 0.0, part) * tl.exp(part_lse - top)
    merged = merged / tl.where(total == 0.0, 1.0, total)
    target = output + row * output_row + head * output_head + cols
    tl.store(target, merged.to(output.dtype.element_ty), mask=inside)
    tl.store(lse + row * lse_row + head * lse_head, top + tl.log(total))


@triton.jit
def _weigh_kernel(
    partial, lses, weighted, lse, lses_stride, weighted_stride, lse_row, lse_head, rank, ln_base,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row, head = pid // HEADS, pid % HEADS
    owner, slot = head // OWN, row * OWN + head % OWN
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    top, total = _top_and_total(lses + pid, lses_stride, ln_base, WORLD)
    mine = _natural(tl.load(lses + pid + rank * lses_stride), ln_base)
    weight = tl.exp(mine - top) / tl.where(total == 0.0, 1.0, total)
    values = tl.load(partial + pid * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    # Dropped, not multiplied by 0: an empty shard may hold NaN.
    values = tl.where(mine == float("-inf"), 0.0, values * weight)
    target = weighted + owner * weighted_stride + slot * WIDTH + cols
    tl.store(target, values.to(weighted.dtype.element_ty), mask=inside)
    if owner == rank:
        tl.store(lse + row * lse_row + (head % OWN) * lse_head, top + tl.log(total))


def _ln(base: float) -> float:
    return _LN2 if base == 2 else 1.0


def merge_received(
    outputs: torch.Tensor, lses: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, base: float
) -> None:
    """Merge [world, rows, own_heads, width] into ``output`` [rows, own_heads, width] and natural-log ``lse``."""
    world, rows, own, width = outputs.shape
    strides = outputs.stride(0), outputs.stride(2), lses.stride(0), lses.stride(2)
    _merge_kernel[(rows * own,)](
        outputs, lses, *strides, output, lse, *output.stride()[:2], *lse.stride(), _ln(base),
        WORLD=world, WIDTH=width, OWN=own, BLOCK=triton.next_power_of_2(width),
    )


def weigh(
    partial: torch.Tensor, lses: torch.Tensor, rank: int, weighted: torch.Tensor, lse: torch.Tensor, base: float
) -> None:
    """``rank``'s partials times their share of the sum, by owner; and the natural-log LSE of its own heads."""
    rows, heads, width = partial.shape
    _weigh_kernel[(rows * heads,)](
        partial, lses, weighted, lse, lses.stride(0), weighted.stride(0), *lse.stride(), rank, _ln(base),
        WORLD=lses.shape[0], WIDTH=width, HEADS=heads, OWN=weighted.shape[2], BLOCK=triton.next_power_of_2(width),
    )
