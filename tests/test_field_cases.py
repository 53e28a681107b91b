"""Faults that people met in public MLA and attention code, reduced to small inputs.

The number in each name is the case's own. Cases whose kind has a test file of its own stand there: 7, 9
and 10 in test_merge.py, 25 and 27 in test_bits.py, 30 in test_kv_cache.py, 32 in test_device.py.
"""

from __future__ import annotations

import math

import pytest
import torch

import densemla
from densemla import ContractError
from steps import PACKED, Step, assert_close, make_step, relative_error


def test_case_1_a_zero_length_row_is_zero_and_leaves_the_others_alone() -> None:
    step = make_step([300, 300, 300, 0], heads=16)
    output, lse = step.decode()
    assert torch.equal(output[3], torch.zeros_like(output[3]))
    assert bool((lse[3] == -math.inf).all())
    assert output.abs().max().isfinite()
    without = Step(**{**vars(step), "q": step.q[:3], "page_table": step.page_table[:3]})
    without.cache_seqlens, without.cu_seqlens_q = step.cache_seqlens[:3], step.cu_seqlens_q[:4]
    alone, alone_lse = without.decode()
    assert torch.equal(output[:3], alone)
    assert torch.equal(lse[:3], alone_lse)


def test_case_2_nothing_at_all() -> None:
    output, lse = densemla.decode(
        torch.randn(16, 16, 576).bfloat16(),
        torch.empty(0, 64, 576, dtype=torch.bfloat16),
        torch.empty(16, 0, dtype=torch.int32),
        torch.zeros(16, dtype=torch.int32),
        sm_scale=1.0,
    )
    assert torch.equal(output, torch.zeros(16, 16, 512, dtype=torch.bfloat16))
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("capacity", [1024, 32768, 1 << 20])
def test_case_4_padding_rows_hold_the_documented_value_at_any_capacity(capacity: int) -> None:
    step = make_step([500, 64, 1, 900, 128, 0, 0, 0], heads=8)
    plan = densemla.plan(step.caps(max_cache_tokens=capacity, max_total_q=16, max_batch=16))
    binding = step.bind(plan, output=torch.full((8, 8, 512), 777.0, dtype=torch.bfloat16))
    densemla.run(binding)
    assert_close(step, binding.output, binding.lse, torch.bfloat16)
    assert torch.equal(binding.output[5:], torch.zeros_like(binding.output[5:]))


def test_case_4_queries_outside_every_request_are_padding_too() -> None:
    step = make_step([500, 64], heads=8, queries=3)
    plan = densemla.plan(step.caps())
    binding = step.bind(plan, cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32))
    densemla.run(binding)
    assert torch.equal(binding.output[4:], torch.zeros_like(binding.output[4:]))
    assert bool((binding.lse[4:] == -math.inf).all())
    assert not binding.output.isnan().any()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, PACKED])
@pytest.mark.parametrize(("page_size", "length"), [(4, 13), (64, 61), (16, 1), (128, 200)])
def test_case_5_rows_past_the_length_are_dropped_even_when_nan(
    page_size: int, length: int, kv_dtype: torch.dtype | str
) -> None:
    step = make_step([length], page_size=page_size, kv_dtype=kv_dtype)
    assert_close(step, *step.decode(), torch.bfloat16)


@pytest.mark.parametrize("lengths", [[7, 12], [2, 1], [3, 0], [0, 0]])
def test_case_13_short_requests_with_three_queries(lengths: list[int]) -> None:
    step = make_step(lengths, queries=3, page_size=4)
    output, lse = step.decode()
    assert_close(step, output, lse, torch.bfloat16)
    for i, length in enumerate(lengths):
        for t in range(3):
            seen = max(length - 3 + 1 + t, 0)
            assert bool((lse[3 * i + t] == -math.inf).all()) == (seen == 0)


@pytest.mark.parametrize("queries", [8, 16])
def test_case_15_scratch_full_of_nan_does_not_show(queries: int) -> None:
    step = make_step([130], queries=queries)
    plan = densemla.plan(step.caps(num_splits=32, single_split_chunks=0))
    binding = step.bind(plan)
    densemla.run(binding)
    assert_close(step, binding.output, binding.lse, torch.bfloat16)
    results = binding.output.clone(), binding.lse.clone()
    for tensor in binding.scratch.values():
        tensor.zero_()
    densemla.run(binding)
    assert torch.equal(binding.output, results[0])
    assert torch.equal(binding.lse, results[1])


def test_case_17_offsets_beyond_32_bits() -> None:
    pages = (1 << 31) // (64 * 576) + 8
    cache = torch.empty(pages, 64, 576, dtype=torch.bfloat16)  # never touched, so it costs no memory
    small = make_step([100], heads=4)
    assert cache.numel() > 1 << 31
    table = torch.tensor([[pages - 1, pages - 3]], dtype=torch.int32)
    for far, near in zip(table[0].tolist(), small.page_table[0].tolist(), strict=True):
        cache[far] = small.kv_cache[near]
    there = Step(**{**vars(small), "kv_cache": cache, "page_table": table})
    assert torch.equal(there.decode()[0], small.decode()[0])


def test_case_19_a_layer_of_a_larger_cache_keeps_its_strides() -> None:
    step = make_step([500, 30], heads=4)
    pages = step.kv_cache.shape[0]
    big = torch.full((pages, 2, 64, 576), math.nan, dtype=torch.bfloat16)
    for layer in range(2):
        big[:, layer] = step.kv_cache
        big[:, 1 - layer] = math.nan
        view = Step(**{**vars(step), "kv_cache": big[:, layer]})
        assert torch.equal(view.decode()[0], step.decode()[0])
    with pytest.raises(ContractError, match=r"kv_cache.*stride 1"):
        Step(**{**vars(step), "kv_cache": step.kv_cache.transpose(1, 2).contiguous().transpose(1, 2)}).decode()


@pytest.mark.parametrize(("capacity", "width"), [(1025, 33), (9416, 295)])
def test_case_21_capacities_need_not_be_round(capacity: int, width: int) -> None:
    step = make_step([capacity], heads=4, page_size=32)
    assert step.page_table.shape[1] == width
    plan = densemla.plan(step.caps(max_cache_tokens=capacity))
    binding = step.bind(plan)
    densemla.run(binding)
    assert_close(step, binding.output, binding.lse, torch.bfloat16)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 32, 64, 96, 128])
def test_case_23_padded_heads_are_never_seen(heads: int) -> None:
    step = make_step([200], heads=heads)
    room = torch.full((1, heads + 3, 512), 777.0, dtype=torch.bfloat16)
    lse_room = torch.full((1, heads + 3), 777.0)
    plan = densemla.plan(step.caps(num_splits=3, single_split_chunks=0))
    binding = step.bind(plan, output=room[:, :heads], lse=lse_room[:, :heads])
    densemla.run(binding)
    assert_close(step, binding.output, binding.lse, torch.bfloat16)
    assert bool((room[:, heads:] == 777).all())
    assert bool((lse_room[:, heads:] == 777).all())


@pytest.mark.parametrize("chunks", [8, 20, 44])
def test_case_28_the_options_order_the_error(chunks: int) -> None:
    """One split and float32 partials round once; bf16 partials round once more and are worse."""
    step = make_step([chunks * 64] * 4, heads=32, logits=3.0)
    expected, _ = step.oracle()
    errors = {
        (threshold, partial): relative_error(
            step.decode(num_splits=44, single_split_chunks=threshold, partial_dtype=partial)[0], expected
        )
        for threshold in (0, 44)
        for partial in (torch.bfloat16, torch.float32)
    }
    one_split = errors[44, torch.bfloat16]
    assert errors[44, torch.float32] == one_split
    assert errors[0, torch.bfloat16] > 1.04 * one_split
    assert errors[0, torch.float32] == pytest.approx(one_split, rel=0.01)


def test_case_36_a_layer_without_positions_passes_its_rope_columns_through() -> None:
    latent, rope = torch.randn(100, 512), torch.randn(100, 64)
    cache = torch.full((2, 64, 576), math.nan)
    densemla.kv_cache.append(latent, rope, cache, torch.arange(100))
    assert torch.equal(cache.view(-1, 576)[:100], torch.cat((latent, rope), 1))
    q = torch.randn(1, 4, 576)
    output, _ = densemla.decode(
        q, cache, torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32), sm_scale=0.1
    )
    rows = torch.cat((latent, rope), 1).double()
    expected = torch.softmax(0.1 * q[0].double() @ rows.T, -1) @ latent.double()
    assert relative_error(output[0], expected) < 1e-6
