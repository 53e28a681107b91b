"""densemla.merge against attention over the union, and at its edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import densemla
from densemla import ContractError
from densemla.backends.reference import attend


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 1000),
    base=st.sampled_from([math.e, 2]),
)
def test_merging_parts_is_attention_over_the_union(lengths: list[int], scale: float, seed: int, base: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 24, generator=generator, dtype=torch.float64) * scale
    rows = torch.randn(sum(lengths), 24, generator=generator, dtype=torch.float64)
    expected, expected_lse = attend(q, rows, 16, 0.3)
    parts = [attend(q, part, 16, 0.3) for part in rows.split(lengths)]
    outputs = torch.stack([output for output, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    outputs[lses == -math.inf] = math.nan
    output, lse = densemla.merge(outputs, lses / math.log(base), base=base)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_case_7_empty_states_merge_to_empty(dtype: torch.dtype) -> None:
    for value in (-math.inf, math.inf):
        output, lse = densemla.merge(torch.zeros(2, 3, 8, dtype=dtype), torch.full((2, 3), value))
        assert torch.equal(output, torch.zeros(3, 8, dtype=dtype))
        assert torch.equal(lse, torch.full((3,), -math.inf))


def test_case_9_an_empty_side_may_hold_nan() -> None:
    outputs = torch.randn(2, 5, 8)
    lses = torch.randn(2, 5)
    outputs[0], lses[0] = math.nan, -math.inf
    output, lse = densemla.merge(outputs, lses)
    assert torch.equal(output, outputs[1])
    torch.testing.assert_close(lse, lses[1])


def test_case_10_the_base_is_explicit() -> None:
    z = torch.tensor([2.0, 8.0])
    # (2 * 0 + 8 * 10) / 10 = 8; reading natural logs as base 2 gives the published wrong value.
    outputs = torch.tensor([[0.0], [10.0]])
    natural, natural_lse = densemla.merge(outputs, z.log())
    binary, binary_lse = densemla.merge(outputs, z.log2(), base=2)
    torch.testing.assert_close(natural, torch.tensor([8.0]))
    torch.testing.assert_close(binary, natural)
    torch.testing.assert_close(natural_lse, torch.tensor(10.0).log())
    torch.testing.assert_close(binary_lse, natural_lse)
    wrong, _ = densemla.merge(outputs, z.log() * math.log(2))
    torch.testing.assert_close(wrong, torch.tensor([7.2330317]))


def test_a_nan_lse_stays_visible() -> None:
    output, lse = densemla.merge(torch.ones(2, 4), torch.tensor([0.0, math.nan]))
    assert output.isnan().all()
    assert lse.isnan()


def test_huge_and_tiny_lses_do_not_overflow() -> None:
    output, lse = densemla.merge(torch.tensor([[1.0], [2.0]]), torch.tensor([2000.0, -2000.0]))
    assert output.item() == 1.0
    assert lse.item() == 2000.0


def test_bad_input_is_refused() -> None:
    outputs, lses = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    for argument, call in {
        "base": lambda: densemla.merge(outputs, lses, base=10),
        "outputs": lambda: densemla.merge(outputs.int(), lses),
        "lses": lambda: densemla.merge(outputs, lses[:1]),
    }.items():
        with pytest.raises(ContractError, match=argument):
            call()
    with pytest.raises(ContractError, match="lses"):
        densemla.merge(outputs, lses.bfloat16())
    with pytest.raises(ContractError, match="outputs"):
        densemla.merge(outputs[:0], lses[:0])
