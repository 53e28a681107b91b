"""Every CPU path against float64: formats, pages, heads, queries, options."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import densemla
from densemla.backends.cpu import native
from densemla.backends.reference import attend
from steps import FP8, PACKED, Step, assert_close, make_sink_step, make_step, relative_error

MIXED = [1000, 0, 65, 3000, 1, 64, 1100]


@pytest.fixture(params=["native", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both decodes of the CPU backend: the compiled one and the one in torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_library", None)
    elif native.available() is None:
        pytest.skip("the compiled decode was not built (no C compiler)")
    return request.param


@pytest.mark.usefixtures("kernel")
class TestAgainstFloat64:
    @pytest.mark.parametrize("partial_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("threshold", [-1, 0, 7, 100000])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_options(self, dtype: torch.dtype, threshold: int, partial_dtype: torch.dtype) -> None:
        step = make_step(MIXED, q_dtype=dtype, kv_dtype=dtype, logits=4.0)
        output, lse = step.decode(partial_dtype=partial_dtype, single_split_chunks=threshold, num_splits=9)
        assert_close(step, output, lse, partial_dtype)

    @pytest.mark.parametrize("heavy_tails", [False, True])
    @pytest.mark.parametrize("logits", [0.1, 1.0, 10.0, 60.0])
    def test_scales(self, logits: float, heavy_tails: bool) -> None:
        step = make_step(
            [3000, 700], logits=logits, heavy_tails=heavy_tails, q_dtype=torch.float32, kv_dtype=torch.float32
        )
        output, lse = step.decode(partial_dtype=torch.float32, single_split_chunks=0)
        assert_close(step, output, lse, torch.float32)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_weights_far_below_the_largest(self, dtype: torch.dtype) -> None:
        step = make_sink_step(kv_dtype=dtype)
        assert_close(step, *step.decode(partial_dtype=torch.float32, num_splits=1))

    def test_a_long_sum_of_one_sign_does_not_drift(self) -> None:
        """A million times one page, in one split."""
        step = make_step([64], heads=1, q_dtype=torch.float32, kv_dtype=torch.float32)
        page = step.page_table[0, 0]
        step.kv_cache[page] = 1 / 3
        step.kv_cache[page, :, 512:] = 0.0
        step.q.zero_()
        step.page_table = page.repeat(1, 1 << 14)
        step.cache_seqlens = torch.tensor([1 << 20], dtype=torch.int32)
        output, lse = step.decode(partial_dtype=torch.float32, single_split_chunks=1 << 14)
        assert float((3 * output - 1).abs().max()) < 5e-5
        assert float((lse - math.log(1 << 20)).abs().max()) < 5e-5

    def test_what_is_not_finite_shows_however_it_is_split(self) -> None:
        """A page of scores of -inf weighs 0, and 0 * -inf is NaN."""
        step = make_step([300], heads=2, q_dtype=torch.float32, kv_dtype=torch.float32)
        step.kv_cache[step.page_table[0, 0], :, 5] = -math.inf
        step.q[..., 5] = 1.0
        expected, expected_lse = step.oracle()
        for num_splits in (1, 5):
            output, lse = step.decode(num_splits=num_splits, single_split_chunks=0, partial_dtype=torch.float32)
            assert torch.equal(output.isnan(), expected.isnan())
            assert bool(output[..., 5].isnan().all())
            assert bool(((lse - expected_lse).abs() < 1e-5).all())

    @pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64, 128, 37, 4096])
    def test_page_sizes(self, page_size: int) -> None:
        step = make_step([777, 13, 0, 1500], page_size=page_size)
        assert_close(step, *step.decode(partial_dtype=torch.float32, single_split_chunks=0))

    @pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 32, 64, 96, 128, 200])
    def test_heads(self, heads: int) -> None:
        step = make_step([300, 70], heads=heads, queries=2)
        assert_close(step, *step.decode(partial_dtype=torch.float32, single_split_chunks=0))

    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32, FP8, PACKED])
    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
    def test_formats(self, q_dtype: torch.dtype, kv_dtype: torch.dtype | str) -> None:
        step = make_step(
            [900, 130],
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            q_scale=0.25 if q_dtype is FP8 else None,
            kv_scale=0.03 if kv_dtype is FP8 else None,
        )
        output, lse = step.decode(partial_dtype=torch.float32, single_split_chunks=0)
        assert output.dtype is (torch.bfloat16 if q_dtype is FP8 else q_dtype)
        assert_close(step, output, lse, torch.float32)

    @pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_output_types(self, output_dtype: torch.dtype) -> None:
        step = make_step([900, 130])
        plan = densemla.plan(step.caps(output_dtype=output_dtype, partial_dtype=torch.float32, single_split_chunks=0))
        binding = step.bind(plan)
        densemla.run(binding)
        assert binding.output.dtype is output_dtype
        assert_close(step, binding.output, binding.lse, torch.float32)

    @pytest.mark.parametrize("queries", [[3, 3], [1, 9], [0, 5], [40, 2]])
    @pytest.mark.parametrize("threshold", [0, 100000])
    def test_many_queries_are_causal(self, queries: list[int], threshold: int) -> None:
        step = make_step([1337, 20], heads=8, queries=queries)
        assert_close(step, *step.decode(partial_dtype=torch.float32, single_split_chunks=threshold))

    @pytest.mark.parametrize("threshold", [0, 100000])
    def test_explicit_bounds_replace_the_causal_rule(self, threshold: int) -> None:
        step = make_step([3000, 64, 500], heads=8, queries=[4, 3, 2])
        step.query_cache_seqlens = torch.tensor([3000, 1, 0, 1700, 64, 64, 63, 0, 500], dtype=torch.int32)
        output, lse = step.decode(partial_dtype=torch.float32, single_split_chunks=threshold)
        assert_close(step, output, lse, torch.float32)

    @pytest.mark.parametrize("threshold", [0, 100000])
    def test_a_later_token_that_is_nan_does_not_reach_an_earlier_query(self, threshold: int) -> None:
        step = make_step([200], heads=8, queries=4)
        clean, clean_lse = step.decode(single_split_chunks=threshold)
        newest = step.page_table[0, 199 // 64]
        step.kv_cache[newest, 199 % 64] = math.nan
        output, lse = step.decode(single_split_chunks=threshold)
        assert torch.equal(output[:3], clean[:3])
        assert torch.equal(lse[:3], clean_lse[:3])
        assert output[3].isnan().all(), "the query that does see it must show it"
        assert lse[3].isnan().all()

    @pytest.mark.parametrize("hidden", [1, 64, 300, 500])
    @pytest.mark.parametrize("threshold", [-1, 0, 3])
    def test_scores_of_minus_infinity_weigh_nothing(self, threshold: int, hidden: int) -> None:
        """Also where they fill a chunk, a split, or all that there is."""
        step = make_step([500], heads=2, q_dtype=torch.float32, kv_dtype=torch.float32)
        step.q[..., 575] = 1.0
        rows = step.kv_cache[step.page_table[0].long()]
        rows.view(-1, 576)[:hidden, 575] = -math.inf
        step.kv_cache[step.page_table[0].long()] = rows
        output, lse = step.decode(partial_dtype=torch.float32, single_split_chunks=threshold)
        assert_close(step, output, lse, torch.float32)

    def test_tensors_that_want_a_gradient_or_come_from_inference_mode(self) -> None:
        step = make_step([500, 64], heads=2, q_dtype=torch.float32, kv_dtype=torch.float32)
        expected = step.decode(single_split_chunks=0)[0]
        step.q.requires_grad_()
        step.kv_cache.requires_grad_()
        assert torch.equal(step.decode(single_split_chunks=0)[0], expected)
        with torch.inference_mode():
            step = make_step([500, 64], heads=2, q_dtype=torch.float32, kv_dtype=torch.float32)
            binding = step.bind(densemla.plan(step.caps(num_splits=32, single_split_chunks=0)))
        densemla.run(binding)
        assert torch.equal(binding.output, expected)

    def test_other_widths(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for rank, rope in ((64, 64), (128, 0), (96, 16)):
            caps = {"num_q_heads": 4, "kv_lora_rank": rank, "qk_rope_head_dim": rope, "max_total_q": 2, "max_batch": 2}
            step = Step(
                q=torch.randn(2, 4, rank + rope, generator=generator),
                kv_cache=torch.randn(8, 64, rank + rope, generator=generator),
                page_table=torch.arange(8, dtype=torch.int32).view(2, 4),
                cache_seqlens=torch.tensor([250, 97], dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
            )
            results = []
            for backend in ("cpu", "reference"):
                plan = densemla.plan(
                    step.caps(
                        **caps,
                        backend=backend,
                        single_split_chunks=0,
                        partial_dtype=torch.float32,
                        max_cache_tokens=256,
                    )
                )
                binding = step.bind(plan)
                densemla.run(binding)
                results.append(binding.output)
            assert relative_error(*results) < 1e-6


@pytest.mark.skipif(native.available() is None, reason="the compiled decode was not built")
@pytest.mark.parametrize("isa", [0, 1, 2])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32, FP8, PACKED])
def test_every_instruction_set(isa: int, kv_dtype: torch.dtype | str) -> None:
    """Asking for more than the machine has takes the best it has."""
    step = make_step([1200, 0, 77], queries=3, kv_dtype=kv_dtype, q_dtype=torch.float32, heavy_tails=True)
    plan = densemla.plan(step.caps(single_split_chunks=0, partial_dtype=torch.float32, num_splits=7))
    binding = step.bind(plan)
    native.run(binding, isa)
    assert_close(step, binding.output, binding.lse, torch.float32)


@pytest.mark.parametrize("height", [0.0, -1e9, 1e12, 1e16, 1e30])
def test_the_oracles_weights_add_up_to_one(height: float) -> None:
    q, rows = torch.full((1, 3), height, dtype=torch.float64), torch.zeros(777, 3, dtype=torch.float64)
    rows[:, 0], rows[:, 1] = 1.0, 0.5
    output, lse = attend(q, rows, 2, 2 / 3)
    assert torch.allclose(output, rows[:1, :2], rtol=1e-12, atol=0.0)
    assert float(lse - height - math.log(777)) == pytest.approx(0.0, abs=1e-13 + 2.0**-50 * abs(height))
