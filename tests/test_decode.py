"""Every CPU path against float64: formats, pages, heads, queries, options."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import densemla
from densemla.backends.cpu import native
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
