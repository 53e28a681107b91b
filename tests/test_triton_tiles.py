"""Tile sizes as a pure function of caps and device limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import densemla
from densemla.backends.triton.tiles import Device, choose, rows_per_request
from densemla.splits import CHUNK_TOKENS

FORMATS = (torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla")


@given(
    heads=st.integers(1, 128),
    queries=st.integers(1, 16),
    batch=st.integers(1, 64),
    kv_dtype=st.sampled_from(FORMATS),
    capability=st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]),
    kilobytes=st.integers(99, 227),
)
def test_a_tile_that_fits_is_chosen(
    heads: int, queries: int, batch: int, kv_dtype: object, capability: tuple[int, int], kilobytes: int
) -> None:
    caps = densemla.Caps(num_q_heads=heads, max_total_q=queries * batch, max_batch=batch, kv_dtype=kv_dtype)
    tiles = choose(caps, Device(capability, kilobytes * 1024, 100))
    assert tiles is not None
    assert tiles.shared_bytes <= kilobytes * 1024
    assert CHUNK_TOKENS % tiles.block_n == 0
    assert tiles.num_stages >= 2


def test_fp8_on_a_device_with_99_kib() -> None:
    caps = densemla.Caps(num_q_heads=16, kv_dtype=torch.float8_e4m3fn)
    tiles = choose(caps, Device((8, 9), 101376, 128))
    assert tiles is not None
    assert tiles.shared_bytes <= 101376


def test_no_tile_fits_a_tiny_device() -> None:
    assert choose(densemla.Caps(num_q_heads=16), Device((8, 6), 16 * 1024, 1)) is None


@pytest.mark.parametrize("batch", [1, 64])
def test_tiles_do_not_depend_on_the_batch(batch: int) -> None:
    """They fix the order of sums, so requests alone and in a batch must get the same."""
    device = Device((9, 0), 227 * 1024, 132)
    one = densemla.Caps(num_q_heads=16, max_total_q=4, max_batch=1)
    many = densemla.Caps(num_q_heads=16, max_total_q=4 * batch, max_batch=batch)
    assert rows_per_request(one) == rows_per_request(many) == 64
    assert choose(one, device) == choose(many, device)
