"""Each rank's kernels against densemla.merge, with the messages carried from rank to rank by hand."""

from __future__ import annotations

import itertools
import math

import torch

import densemla
from densemla.distributed import merge_kernels

NAN = torch.nan


def exchange(outputs: torch.Tensor, lses: torch.Tensor, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The all-to-all form over [world, rows, heads, width] partials: every head's output and LSE."""
    world, rows, heads, width = outputs.shape
    own = heads // world
    output, lse = torch.full((rows, heads, width), NAN), torch.full((rows, heads), NAN)
    for rank in range(world):
        mine = slice(rank * own, (rank + 1) * own)
        # Rows that are longer than their values, as in a message.
        received = torch.full((world, rows, own, width + 3), NAN, dtype=outputs.dtype)[..., :width]
        received.copy_(outputs[:, :, mine])
        received_lses = torch.full((world, rows, own, 5), NAN)[..., 2]
        received_lses.copy_(lses[:, :, mine])
        merge_kernels.merge_received(received, received_lses, output[:, mine], lse[:, mine], base)
    return output, lse


def weigh(outputs: torch.Tensor, lses: torch.Tensor, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduce-scatter form."""
    world, rows, heads, width = outputs.shape
    own = heads // world
    lse = torch.full((rows, heads), NAN)
    weighted = torch.full((world, world, rows, own, width), NAN, dtype=outputs.dtype)
    for rank in range(world):
        mine = lse[:, rank * own : (rank + 1) * own]
        merge_kernels.weigh(outputs[rank].contiguous(), lses.contiguous(), rank, weighted[rank], mine, base)
    return weighted.float().sum(0).transpose(0, 1).reshape(rows, heads, width), lse


def main() -> None:
    generator = torch.Generator().manual_seed(3)
    count = 0
    shapes = ((1, 1, 3, 5), (2, 3, 4, 16), (3, 2, 6, 20))
    for form, partial, base, shape in itertools.product(
        (exchange, weigh), (torch.bfloat16, torch.float32), (math.e, 2), shapes
    ):
        outputs = torch.randn(shape, generator=generator).to(partial)
        lses = 30 * torch.randn(shape[:-1], generator=generator)
        lses[torch.rand(lses.shape, generator=generator) < 0.3] = -math.inf
        lses[torch.rand(lses.shape, generator=generator) < 0.1] = math.inf
        lses[:, 0, 0] = -math.inf
        outputs[lses.isinf()] = NAN
        right, right_lse = densemla.merge(outputs.float(), lses, base=base)
        output, lse = form(outputs, lses, base)
        tolerance = 1e-2 if form is weigh and partial is torch.bfloat16 else 3e-6
        torch.testing.assert_close(output, right, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, right_lse, atol=1e-5, rtol=1e-6)
        assert not output[0, 0].any()
        assert lse[0, 0] == -math.inf
        count += 1
    faulty = torch.zeros(2, 1, 2)
    faulty[1] = NAN
    for form in (exchange, weigh):
        output, lse = form(torch.ones(2, 1, 2, 4), faulty, math.e)
        assert output.isnan().all()
        assert lse.isnan().all()
    light, poisoned = torch.zeros(2, 1, 2), torch.ones(2, 1, 2, 4)
    light[1], poisoned[1] = -300.0, NAN
    for form in (exchange, weigh):
        assert form(poisoned, light, math.e)[0].isnan().all()
    print(f"{count} merges agree")


if __name__ == "__main__":
    main()
