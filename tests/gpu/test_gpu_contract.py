"""What a GPU backend computes, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_steps import assert_right, bind, decode, make_sink_step, make_step, on_gpu, plan_for, same

import densemla
from steps import FP8, PACKED, SM_SCALE, Step

LENGTHS = [0, 1, 63, 64, 65, 1000, 5000]
FORMATS = {
    "bf16": {"kv_dtype": torch.bfloat16},
    "fp16": {"kv_dtype": torch.float16, "q_dtype": torch.float16},
    "bf16 over fp16": {"kv_dtype": torch.float16},
    "fp8": {"kv_dtype": FP8, "kv_scale": 0.03},
    "fp8 under fp16": {"kv_dtype": FP8, "kv_scale": 0.03, "q_dtype": torch.float16},
    "fp8 both": {"kv_dtype": FP8, "kv_scale": 0.03, "q_dtype": FP8, "q_scale": 0.02},
    "packed": {"kv_dtype": PACKED},
    "packed under fp16": {"kv_dtype": PACKED, "q_dtype": torch.float16},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [12, 96])
@pytest.mark.parametrize("partial_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threshold", [-1, 0])
def test_formats(backend: str, name: str, heads: int, partial_dtype: torch.dtype, threshold: int) -> None:
    kv_dtype = FORMATS[name]["kv_dtype"]
    step = make_step(LENGTHS, heads=heads, queries=[1, 2, 1, 3, 1, 4, 2], **FORMATS[name])
    run = decode(step, backend, partial_dtype=partial_dtype, single_split_chunks=threshold, kv_dtype=kv_dtype)
    assert_right(step, run)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [12, 96])
def test_weights_far_below_the_largest(backend: str, name: str, heads: int) -> None:
    step = make_sink_step(heads=heads, **FORMATS[name])
    # float16 could not hold outputs as small as these.
    options = {"num_splits": 1, "output_dtype": torch.bfloat16, "kv_dtype": FORMATS[name]["kv_dtype"]}
    assert_right(step, decode(step, backend, **options))


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("queries", [1, 5])
def test_head_counts(backend: str, heads: int, queries: int) -> None:
    step = make_step([3, 700, 4096], heads=heads, queries=queries, seed=heads)
    assert_right(step, decode(step, backend))


@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 128])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8, PACKED])
def test_page_sizes(backend: str, page_size: int, kv_dtype: torch.dtype | str) -> None:
    scale = 0.03 if kv_dtype is FP8 else None
    step = make_step([1, 130, 3001], heads=16, page_size=page_size, kv_dtype=kv_dtype, kv_scale=scale)
    assert_right(step, decode(step, backend, kv_dtype=kv_dtype))


@pytest.mark.parametrize("logits", [0.1, 4.0, 30.0])
@pytest.mark.parametrize("heads", [16, 96])
def test_score_scales(backend: str, logits: float, heads: int) -> None:
    step = make_step([900, 4000], heads=heads, logits=logits, heavy_tails=True, seed=3)
    assert_right(step, decode(step, backend, partial_dtype=torch.float32))


@pytest.mark.parametrize("heads", [16, 96])
def test_layer_of_a_larger_cache(backend: str, heads: int) -> None:
    step = make_step([200, 1000], heads=heads)
    run = decode(step, backend)
    layers = torch.full((step.kv_cache.shape[0], 3, 64, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    layers[:, 1] = step.kv_cache.cuda()
    other = decode(step, backend, changes={"kv_cache": layers[:, 1]})
    assert same(run, other)


def test_odd_strides(backend: str) -> None:
    """A cache whose rows lie on no 16-byte boundary, and queries and outputs that are views."""
    step = make_step([200, 1000], heads=12)
    cache = torch.full((step.kv_cache.shape[0], 64, 577), math.nan, dtype=torch.bfloat16, device="cuda")
    cache[..., :576] = step.kv_cache.cuda()
    q = torch.full((2, 12, 580), math.nan, dtype=torch.bfloat16, device="cuda")
    q[..., :576] = step.q.cuda()
    output = torch.full((2, 14, 520), math.nan, dtype=torch.bfloat16, device="cuda")[:, :12, 3:515]
    lse = torch.full((12, 2), math.nan, device="cuda").T
    changes = {"kv_cache": cache[..., :576], "q": q[..., :576], "output": output, "lse": lse}
    assert_right(step, decode(step, backend, changes=changes))


@pytest.mark.parametrize("heads", [6, 16, 96])
@pytest.mark.parametrize("threshold", [-1, 0])
def test_queries_with_their_own_bounds(backend: str, heads: int, threshold: int) -> None:
    step = make_step([300, 2, 4000, 64], heads=heads, queries=[4, 3, 8, 1])
    bounds = [300, 0, 17, 299, 0, 1, 2, *range(0, 4000, 500), 64]
    step.query_cache_seqlens = torch.tensor(bounds, dtype=torch.int32)
    assert_right(step, decode(step, backend, single_split_chunks=threshold))


def test_fewer_tokens_than_queries_and_rows_of_no_request(backend: str) -> None:
    step = make_step([2, 0, 500], heads=12, queries=[5, 3, 2])
    step.q = torch.cat([step.q, torch.full((3, 12, 576), math.nan, dtype=torch.bfloat16)])
    run = decode(step, backend, single_split_chunks=0)
    step.q[10:] = 0
    assert_right(step, run)
    assert bool((run.output[10:] == 0).all())
    assert bool((run.partial_lse[:, 10:] == -math.inf).all())


@pytest.mark.parametrize("heads", [6, 12, 96])
@pytest.mark.parametrize("where", ["latent", "rope"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_row_reaches_only_the_queries_that_see_it(backend: str, heads: int, where: str, value: float) -> None:
    step = make_step([450], heads=heads, queries=4)
    clean = decode(step, backend)
    page, row = step.page_table[0, 449 // 64], 449 % 64
    step.kv_cache[page, row, 5 if where == "latent" else 520] = value
    run = decode(step, backend)
    assert torch.equal(run.output[:3], clean.output[:3])
    assert torch.equal(run.lse[:3], clean.lse[:3])
    if math.isnan(value):
        assert bool(run.output[3].isnan().all())


@pytest.mark.parametrize("batch", [1, 16])
def test_nothing_to_see(backend: str, batch: int) -> None:
    step = Step(
        q=torch.randn(batch, 16, 576).bfloat16(),
        kv_cache=torch.empty(0, 64, 576, dtype=torch.bfloat16),
        page_table=torch.empty(batch, 0, dtype=torch.int32),
        cache_seqlens=torch.zeros(batch, dtype=torch.int32),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32),
    )
    run = decode(step, backend)
    assert bool((run.output == 0).all())
    assert bool((run.lse == -math.inf).all())
    assert bool((run.partial_lse == -math.inf).all())


def test_one_split_rounds_once_and_empty_splits_say_so(backend: str) -> None:
    step = make_step([500, 6000], heads=96)
    runs = [
        decode(step, backend, partial_dtype=dtype, single_split_chunks=8) for dtype in (torch.bfloat16, torch.float32)
    ]
    assert torch.equal(runs[0].output[0], runs[1].output[0])
    assert not torch.equal(runs[0].output[1], runs[1].output[1])
    for run in runs:
        partial_lse = run.partial_lse
        assert torch.equal(partial_lse[0, 0], run.lse[0])
        assert bool((partial_lse[1:, 0] == -math.inf).all())
        assert bool(partial_lse[:, 1].isfinite().any())


def test_lengths_and_pages_that_lie_stay_inside(backend: str) -> None:
    """On a device nothing can be checked without a sync; wrong integers must still not leave the tensors."""
    step = on_gpu(make_step([500, 600], heads=12, queries=2))
    plan = plan_for(step, backend, max_cache_tokens=640)
    bands: list[torch.Tensor] = []

    def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor between two bands of a marker."""
        count = math.prod(shape)
        whole = torch.full((3 * count,), 7, dtype=dtype, device="cuda")
        bands.extend((whole[:count], whole[2 * count :]))
        return whole[count : 2 * count].view(shape)

    tensors = {
        "output": guarded((4, 12, 512), plan.caps.output_dtype),
        "lse": guarded((4, 12), torch.float32),
        "scratch": {name: guarded(spec.shape, spec.dtype) for name, spec in plan.scratch_specs().items()},
    }
    pages = torch.full_like(step.page_table, -(1 << 30))
    pages[:, ::2] = step.kv_cache.shape[0]
    for name, values in (
        ("page_table", pages),
        ("cache_seqlens", [-5, 1 << 30]),
        ("cu_seqlens_q", [-3, 1 << 28, 7]),
        ("cu_seqlens_q", [3, 1, 4]),
        ("query_cache_seqlens", [-1, 1 << 30, 5, 9999]),
    ):
        wrong = torch.as_tensor(values, dtype=torch.int32, device="cuda")
        densemla.run(bind(step, plan, **{**tensors, name: wrong}))
        torch.cuda.synchronize()
        assert all(bool((band == 7).all()) for band in bands), name


def test_beyond_32_bit_offsets(backend: str) -> None:
    """Pages past 2^31 elements and 2^32 bytes of a real cache."""
    pages = (1 << 31) // (64 * 576) + 300
    cache = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    step = make_step([640, 100], heads=16)
    run = decode(step, backend)
    ids = torch.arange(pages - 12, pages, dtype=torch.int32)
    table = torch.full_like(step.page_table, -1)
    for i, count in enumerate((10, 2)):
        chosen = ids[:count] if i == 0 else ids[10:]
        cache[chosen.long().cuda()] = step.kv_cache[step.page_table[i, :count].long()].cuda()
        table[i, :count] = chosen
    step.page_table = table
    assert same(run, decode(step, backend, changes={"kv_cache": cache}))


def test_the_one_call_form(backend: str) -> None:
    step = make_step([70, 3000], heads=16)
    moved = on_gpu(step)
    output, lse = densemla.decode(
        moved.q, moved.kv_cache, moved.page_table, moved.cache_seqlens, sm_scale=SM_SCALE, backend=backend
    )
    expected, expected_lse = step.oracle()
    assert float((output.cpu().double() - expected).norm() / expected.norm()) < 2.0**-7
    assert float((lse.cpu().double() - expected_lse).abs().max()) < 1e-4


def test_auto_takes_a_gpu_backend() -> None:
    plan = densemla.plan(densemla.Caps(device="cuda", num_q_heads=96))
    assert plan.backend not in ("cpu", "reference")
    assert plan.supports("graph_capture")
