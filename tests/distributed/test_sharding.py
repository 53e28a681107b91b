"""Which rank holds which token: the formulas against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import densemla
from densemla.distributed import dcp

WORLDS = st.integers(1, 9)
INTERLEAVES = st.integers(1, 20)


def held(length: int, rank: int, world: int, interleave: int) -> list[int]:
    return [p for p in range(length) if p // interleave % world == rank]


@given(st.integers(0, 400), WORLDS, INTERLEAVES)
@settings(deadline=None)
def test_every_token_has_one_place(length, world, interleave):
    for rank in range(world):
        mine = held(length, rank, world, interleave)
        assert dcp.local_length(length, rank, world, interleave) == len(mine)
        assert dcp.local_positions(length, rank, world, interleave).tolist() == mine
        for row, position in enumerate(mine):
            assert dcp.owner(position, world, interleave) == rank
            assert dcp.local_index(position, world, interleave) == row


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=6), WORLDS, INTERLEAVES, st.sampled_from([torch.int32, torch.int64])
)
@settings(deadline=None)
def test_tensor_lengths_are_the_host_lengths(lengths, world, interleave, dtype):
    for rank in range(world):
        found = dcp.local_lengths(torch.tensor(lengths, dtype=dtype), rank, world, interleave)
        assert found.dtype is dtype
        assert found.tolist() == [dcp.local_length(length, rank, world, interleave) for length in lengths]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=5),
    st.integers(0, 3),
    WORLDS,
    INTERLEAVES,
)
@settings(deadline=None)
def test_every_global_bound_is_localised_on_its_own(requests, padding, world, interleave):
    bounds = [max(length - n + 1 + t, 0) for length, n in requests for t in range(n)] + [0] * padding
    cache_seqlens = torch.tensor([length for length, _ in requests], dtype=torch.int32)
    cu = torch.tensor([0, *itertools.accumulate(n for _, n in requests)], dtype=torch.int32)
    assert dcp.visible_lengths(cache_seqlens, cu, len(bounds)).tolist() == bounds
    for rank in range(world):
        found = dcp.local_visible_lengths(cache_seqlens, cu, len(bounds), rank, world, interleave)
        assert found.dtype is torch.int32
        assert found.tolist() == [len(held(bound, rank, world, interleave)) for bound in bounds]


@pytest.mark.parametrize(
    ("interleave", "local"), [(1, [4, 4, 5]), (2, [4, 4, 4]), (4, [4, 4, 4])], ids=["every token", "pairs", "fours"]
)
def test_field_case_12(interleave, local):
    assert [dcp.local_length(bound, 1, 2, interleave) for bound in (8, 9, 10)] == local
    assert dcp.local_lengths(torch.tensor([8, 9, 10]), 1, 2, interleave).tolist() == local
    causal = dcp.local_visible_lengths(
        torch.tensor([10], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), 3, 1, 2, interleave
    )
    assert causal.tolist() == local


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"lengths": torch.tensor([1.0])}, "lengths"),
        ({"lengths": [3]}, "lengths"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"world": 0}, "world"),
        ({"interleave": 0}, "interleave"),
        ({"interleave": True}, "interleave"),
    ],
)
def test_nonsense_is_refused(change, argument):
    with pytest.raises(densemla.ContractError) as caught:
        dcp.local_lengths(**{"lengths": torch.tensor([3]), "rank": 1, "world": 2, "interleave": 1, **change})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: dcp.local_lengths(torch.tensor([3, -1]), 0, 2), "lengths"),
        (lambda: dcp.local_length(-1, 0, 2), "length"),
        (lambda: dcp.local_length(8, 2, 2), "rank"),
        (lambda: dcp.local_length(8.0, 0, 2), "length"),
        (lambda: dcp.local_positions(8, 0, 0), "world"),
        (lambda: dcp.owner(-1, 2), "position"),
        (lambda: dcp.owner(1, 0), "world"),
        (lambda: dcp.local_index(1, 2, 0), "interleave"),
        (lambda: dcp.visible_lengths(torch.tensor([3]), torch.tensor([0, 1]), 1), "cache_seqlens"),
        (lambda: dcp.visible_lengths(torch.tensor(3).int(), torch.tensor([0, 1]).int(), 1), "cache_seqlens"),
        (lambda: dcp.visible_lengths(torch.tensor([3]).int(), torch.tensor([0, 1]), 1), "cu_seqlens_q"),
        (lambda: dcp.visible_lengths(torch.tensor([3]).int(), torch.tensor([0]).int(), 1), "cu_seqlens_q"),
        (lambda: dcp.visible_lengths(torch.tensor([3]).int(), torch.tensor([0, 1]).int(), -1), "total_q"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call, argument):
    with pytest.raises(densemla.ContractError) as caught:
        call()
    assert caught.value.argument == argument
