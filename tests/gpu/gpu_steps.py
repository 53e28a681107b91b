"""Steps on the GPU beside their float64 result on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import densemla
from steps import PACKED, ROUNDING, Step, make_sink_step, make_step

MULTIPLIED = {"fp8_ds_mla": torch.float16}
"""Type of the products, where it is neither the cache's nor the query's."""


def on_gpu(step: Step) -> Step:
    moved = {name: value.cuda() for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
    return replace(step, **moved)


def plan_for(step: Step, backend: str, **options: Any) -> densemla.Plan:
    """A plan, or a skip with the backend's own reason."""
    options = {"max_cache_tokens": 8192, **options}
    try:
        return densemla.plan(step.caps(device="cuda", backend=backend, **options))
    except densemla.ContractError as error:
        pytest.skip(str(error))


@dataclass
class Run:
    """A binding on the GPU and what it wrote."""

    binding: densemla.Binding

    @property
    def output(self) -> torch.Tensor:
        return self.binding.output

    @property
    def lse(self) -> torch.Tensor:
        return self.binding.lse

    @property
    def partial_lse(self) -> torch.Tensor:
        return self.binding.scratch["partial_lse"]

    def again(self) -> Run:
        """Run once more over poisoned outputs and scratch."""
        poison(self.binding)
        densemla.run(self.binding)
        return self


def poison(binding: densemla.Binding) -> None:
    for tensor in (binding.output, binding.lse, *binding.scratch.values()):
        tensor.fill_(math.nan)


def bind(step: Step, plan: densemla.Plan, **changes: Any) -> densemla.Binding:
    total_q, heads = step.q.shape[:2]
    output = torch.full((total_q, heads, plan.caps.kv_lora_rank), math.nan, dtype=plan.caps.output_dtype, device="cuda")
    lse = torch.full((total_q, heads), math.nan, device="cuda")
    return step.bind(plan, **{"output": output, "lse": lse, **changes})


def decode(step: Step, backend: str, *, changes: dict[str, Any] | None = None, **options: Any) -> Run:
    """Run a step (given on the CPU) on the GPU."""
    moved = on_gpu(step)
    return Run(bind(moved, plan_for(moved, backend, **options), **(changes or {}))).again()


def assert_right(step: Step, run: Run) -> None:
    """Every row within what the roundings on its way explain; rows that see nothing are 0 and -inf."""
    caps = run.binding.plan.caps
    multiplied = MULTIPLIED.get(str(caps.kv_dtype), torch.bfloat16 if caps.kv_format.scaled else caps.kv_format.dtype)
    expected, expected_lse = step.oracle()
    output, lse = run.output.cpu().double(), run.lse.cpu().double()
    assert not output.isnan().any()
    assert not lse.isnan().any()
    finite = expected_lse[expected_lse.isfinite()]
    scores = (float(finite.abs().max()) if finite.numel() else 0.0) + 4.0
    # Weights are rounded to the type of the products; a score's error is a relative error of its weight.
    tolerance = ROUNDING[run.output.dtype] + ROUNDING[multiplied] + ROUNDING[caps.partial_dtype] + scores * 2.0**-20
    lse_tolerance = 2e-5
    if caps.kv_dtype == PACKED:
        tolerance += scores * 2.0**-11
        lse_tolerance = 2e-3
    error = (output - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    assert float(error.max() if error.numel() else 0.0) <= tolerance
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert bool((output[empty] == 0).all())
    assert bool(((lse - expected_lse)[~empty].abs() <= lse_tolerance * expected_lse[~empty].abs().clamp_min(10)).all())


def same(a: Run | tuple[torch.Tensor, torch.Tensor], b: Run | tuple[torch.Tensor, torch.Tensor]) -> bool:
    left = (a.output, a.lse) if isinstance(a, Run) else a
    right = (b.output, b.lse) if isinstance(b, Run) else b
    return torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


__all__ = [
    "Run",
    "assert_right",
    "bind",
    "decode",
    "make_sink_step",
    "make_step",
    "on_gpu",
    "plan_for",
    "poison",
    "same",
]
