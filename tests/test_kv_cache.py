"""Writers: every format round-trips within its own error, and nothing is half-written."""

from __future__ import annotations

import math

import pytest
import torch

import densemla
from densemla import ContractError
from densemla.kv_formats import kv_format
from steps import FP8, PACKED


def read(cache: torch.Tensor, kv_scale: float = 1.0) -> torch.Tensor:
    """All slots as float64 numbers [slots, 576]."""
    fmt = kv_format(cache.dtype)
    out = torch.empty(cache.shape[0] * cache.shape[1], 576, dtype=torch.float64)
    fmt.widen(cache.reshape(-1, cache.shape[2]), out)
    return out * kv_scale


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_formats_round_once(kv_dtype: torch.dtype, source: torch.dtype) -> None:
    latent, rope = torch.randn(10, 512).to(source), torch.randn(10, 64).to(source)
    cache = torch.full((3, 8, 576), math.nan, dtype=kv_dtype)
    slots = torch.randperm(24)[:10]
    densemla.kv_cache.append(latent, rope, cache, slots)
    assert torch.equal(cache.view(-1, 576)[slots], torch.cat((latent, rope), 1).to(kv_dtype))
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots] = False
    assert cache.view(-1, 576)[untouched].isnan().all()


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_case_30_fp8_within_its_error_and_saturated(scale: float, as_tensor: bool) -> None:
    latent = torch.cat((torch.linspace(-1000, 1000, 512)[None], torch.randn(1, 512)))
    rope = torch.randn(2, 64)
    cache = densemla.kv_cache.empty(1, 64, FP8)
    densemla.kv_cache.append(
        latent, rope, cache, torch.tensor([5, 9]), kv_scale=torch.tensor([scale]) if as_tensor else scale
    )
    got = read(cache, scale)[[5, 9]]
    expected = torch.cat((latent, rope), 1).double()
    limit = 448 * scale
    inside = expected.abs() <= limit
    # e4m3: half a unit of 3 mantissa bits, or of the smallest subnormal
    bound = torch.maximum(expected.abs() / 16, torch.tensor(scale * 2.0**-10))
    assert bool(((got - expected).abs() <= bound)[inside].all())
    assert bool((got[~inside] == expected[~inside].sign() * limit).all())
    assert not got.isnan().any()


def test_packed_records_scale_every_128_values_and_keep_rope_in_bf16() -> None:
    latent = torch.randn(6, 512) * torch.tensor([1e-3, 1.0, 50.0, 1e4]).repeat_interleave(128)
    latent[5, :128] = 0
    rope = torch.randn(6, 64)
    cache = densemla.kv_cache.empty(2, 4, PACKED)
    assert cache.shape == (2, 4, 656)
    assert cache.dtype is torch.uint8
    slots = torch.tensor([7, 0, 3, 2, 1, 6])
    densemla.kv_cache.append(latent, rope, cache, slots)
    got = read(cache)[slots]
    assert torch.equal(got[:, 512:], rope.bfloat16().double())
    groups, expected = got[:, :512].view(6, 4, 128), latent.double().view(6, 4, 128)
    top = expected.abs().amax(2, keepdim=True)
    assert bool(((groups - expected).abs() <= torch.maximum(expected.abs() / 16, top / 448 * 2**-10) + 1e-30).all())
    assert bool((got[5, :128] == 0).all())


def test_packed_layout_is_the_field_s() -> None:
    """512 e4m3 bytes, 4 float32 scales, 64 bf16: read back with nothing but views."""
    latent, rope = torch.randn(1, 512), torch.randn(1, 64)
    cache = densemla.kv_cache.empty(1, 1, PACKED)
    densemla.kv_cache.append(latent, rope, cache, torch.tensor([0]))
    record = cache.flatten()
    values = record[:512].view(FP8).float().view(4, 128)
    scales = record[512:528].view(torch.float32)
    torch.testing.assert_close((values * scales[:, None]).flatten(), latent[0], rtol=1 / 16, atol=1e-2)
    assert torch.equal(record[528:].view(torch.bfloat16), rope[0].bfloat16())


def test_minus_one_skips_and_a_strided_layer_is_written_in_place() -> None:
    big = torch.full((4, 2, 16, 576), math.nan)
    latent, rope = torch.randn(3, 512), torch.randn(3, 64)
    densemla.kv_cache.append(latent, rope, big[:, 1], torch.tensor([63, -1, 0], dtype=torch.int32))
    assert torch.equal(big[3, 1, 15], torch.cat((latent[0], rope[0])))
    assert torch.equal(big[0, 1, 0], torch.cat((latent[2], rope[2])))
    assert big[:, 0].isnan().all()
    assert int((~big.isnan()).sum()) == 2 * 576


@pytest.mark.parametrize("scale", [0.0, -2.0, math.nan, math.inf, "1", torch.ones(1).to_sparse()])
def test_bad_scales_are_refused(scale: object) -> None:
    cache = densemla.kv_cache.empty(1, 4, FP8)
    cache.view(torch.uint8).fill_(7)
    before = cache.clone()
    with pytest.raises(ContractError, match="kv_scale"):
        densemla.kv_cache.append(
            torch.zeros(1, 512),
            torch.zeros(1, 64),
            cache,
            torch.tensor([0]),
            kv_scale=scale,  # type: ignore[arg-type]
        )
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("latent", {"latent": torch.zeros(2, 512, dtype=torch.int32)}),
        ("latent", {"latent": torch.zeros(512)}),
        ("rope", {"rope": torch.zeros(3, 64)}),
        ("kv_cache", {"kv_cache": torch.zeros(4, 576)}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 4, 600)}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 4, 576, device="meta")}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 4, 576, dtype=torch.int8)}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 1, 576).expand(1, 4, 576)}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 4, 576).as_strided((1, 4, 576), (2304, 288, 1))}),
        ("latent", {"latent": torch.zeros(2, 512).to_sparse()}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1]).to_sparse()}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0.0, 1.0])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 4])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([-2, 0])}),
        ("kv_scale", {"kv_scale": 1.0}),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(argument: str, change: dict[str, object]) -> None:
    cache = torch.full((1, 4, 576), math.nan)
    arguments: dict[str, object] = {
        "latent": torch.zeros(2, 512),
        "rope": torch.zeros(2, 64),
        "kv_cache": cache,
        "slot_mapping": torch.tensor([0, 1]),
        **change,
    }
    with pytest.raises(ContractError) as caught:
        densemla.kv_cache.append(**arguments)  # type: ignore[arg-type]
    assert caught.value.argument == argument
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("num_pages", value) for value in (-1, 1 << 31, 10**40, 2.0, True)),
        *(("page_size", value) for value in (0, 10**40)),
        *(("kv_lora_rank", value) for value in (0, 4097)),
        *(("qk_rope_head_dim", value) for value in (-1, 4097)),
        ("kv_dtype", "nvfp4"),
        ("device", "warp"),
    ],
)
def test_a_cache_of_no_such_size_is_refused(argument: str, value: object) -> None:
    with pytest.raises(ContractError) as caught:
        densemla.kv_cache.empty(**{"num_pages": 1, "page_size": 4, argument: value})  # type: ignore[arg-type]
    assert caught.value.argument == argument
