"""Random decode steps with everything poisoned that must not be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import densemla
from densemla.backends.reference import decode_float64
from densemla.kv_formats import PACKED

SM_SCALE = 192**-0.5
FP8 = torch.float8_e4m3fn


@dataclass
class Step:
    """Arguments of one ``densemla.decode`` call."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sm_scale: float = SM_SCALE
    query_cache_seqlens: torch.Tensor | None = None
    q_scale: float | None = None
    kv_scale: float | None = None

    def decode(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return densemla.decode(**vars(self), **options)

    def caps(self, **options: Any) -> densemla.Caps:
        """Caps that fit the step exactly, unless ``options`` say otherwise."""
        return densemla.Caps(
            **{
                "num_q_heads": self.q.shape[1],
                "page_size": self.kv_cache.shape[1],
                "max_total_q": max(self.q.shape[0], 1),
                "max_batch": max(self.cache_seqlens.shape[0], 1),
                "q_dtype": self.q.dtype,
                "kv_dtype": self.kv_cache.dtype,
                "partial_dtype": torch.bfloat16,
                "single_split_chunks": -1,
                **options,
            }
        )

    def bind(self, plan: densemla.Plan, **changes: Any) -> densemla.Binding:
        """Bind with scratch and outputs full of NaN."""
        scratch = plan.empty_scratch()
        for tensor in scratch.values():
            tensor.view(torch.uint8).fill_(0xFF)
        total_q, heads = self.q.shape[:2]
        arguments: dict[str, Any] = {
            **vars(self),
            "scratch": scratch,
            "output": torch.full((total_q, heads, plan.caps.kv_lora_rank), math.nan, dtype=plan.caps.output_dtype),
            "lse": torch.full((total_q, heads), math.nan),
            **changes,
        }
        return densemla.bind(plan, **arguments)

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output and LSE."""
        plan = densemla.plan(self.caps(backend="reference", max_cache_tokens=1 << 24))
        return decode_float64(self.bind(plan))

    def request(self, i: int) -> Step:
        """Request ``i`` alone, over the same cache."""
        begin, end = int(self.cu_seqlens_q[i]), int(self.cu_seqlens_q[i + 1])
        bounds = self.query_cache_seqlens
        return replace(
            self,
            q=self.q[begin:end],
            page_table=self.page_table[i : i + 1],
            cache_seqlens=self.cache_seqlens[i : i + 1],
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            query_cache_seqlens=None if bounds is None else bounds[begin:end],
        )


def make_step(
    lengths: list[int],
    *,
    heads: int = 12,
    queries: int | list[int] = 1,
    page_size: int = 64,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | str = torch.bfloat16,
    logits: float = 1.0,
    heavy_tails: bool = False,
    kv_scale: float | None = None,
    q_scale: float | None = None,
    seed: int = 0,
) -> Step:
    """A step whose unused pages, page tails and page-table entries are poison (NaN bytes, -1 and 2^30).

    ``logits`` scales the queries: about the standard deviation of the scores. ``heavy_tails`` multiplies
    cache rows by log-normal factors, so that a few tokens carry most of the weight.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [queries] * len(lengths) if isinstance(queries, int) else queries
    pages = [-(-length // page_size) for length in lengths]
    width, total = max([*pages, 0]), sum(pages)
    kv_cache = densemla.kv_cache.empty(total + 2, page_size, kv_dtype)
    kv_cache.view(torch.uint8).fill_(0xFF)
    order = torch.randperm(total + 2, generator=generator)[:total].to(torch.int32)
    page_table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    page_table[:, 1::2] = 1 << 30
    first = 0
    for i, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        page_table[i, :count] = order[first : first + count]
        first += count
        rows = torch.randn(length, 576, generator=generator)
        if heavy_tails:
            rows *= torch.exp(1.2 * torch.randn(length, 1, generator=generator))
        slots = page_table[i, :count].long().repeat_interleave(page_size)[:length] * page_size
        slots += torch.arange(length) % page_size
        densemla.kv_cache.append(rows[:, :512], rows[:, 512:], kv_cache, slots, kv_scale=kv_scale)
    # Scores of q . k * 192^-0.5 with unit rows have a deviation of sqrt(576 / 192) = 1.73.
    q = torch.randn(sum(counts), heads, 576, generator=generator) * (logits / math.sqrt(3))
    q = q / (q_scale or 1.0)
    return Step(
        q=densemla.kv_cache.to_fp8(q) if q_dtype is FP8 else q.to(q_dtype),
        kv_cache=kv_cache,
        page_table=page_table,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        q_scale=q_scale,
        kv_scale=kv_scale,
    )


def make_sink_step(*, heads: int = 12, **formats: Any) -> Step:
    """A step whose first token has nearly all of the weight and no value: the others weigh about 2^-29 of it each."""
    step = make_step([700], heads=heads, logits=0.3, **formats)
    height = 29 * math.log(2) / (64 * step.sm_scale)
    page = int(step.page_table[0, 0])
    slots = torch.tensor([page * step.kv_cache.shape[1]])
    sink = torch.full((1, 64), height)
    densemla.kv_cache.append(torch.zeros(1, 512), sink, step.kv_cache, slots, kv_scale=step.kv_scale)
    ones = torch.ones(1, heads, 64) / (step.q_scale or 1.0)
    step.q[..., 512:] = densemla.kv_cache.to_fp8(ones) if step.q.dtype is FP8 else ones
    return step


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| over everything; NaN stays NaN."""
    norm = expected.double().norm()
    return float((got.double() - expected.double()).norm() / norm) if norm else float(got.double().norm())


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
"""Relative error that one rounding to the type explains."""


def assert_close(step: Step, output: torch.Tensor, lse: torch.Tensor, partial_dtype: torch.dtype | None = None) -> None:
    """Compare a result with float64: per row, within what the roundings on its way explain."""
    expected, expected_lse = step.oracle()
    # Scores are float32 sums, and an error in a score is a relative error of its weight.
    finite = expected_lse[expected_lse.isfinite()]
    scores = (float(finite.abs().max()) if finite.numel() else 0.0) + 4.0
    tolerance = ROUNDING[output.dtype] + (ROUNDING[partial_dtype] if partial_dtype else 0.0) + scores * 2.0**-21
    assert not output.isnan().any()
    error = (output.double() - expected).norm(dim=-1)
    assert bool((error <= tolerance * expected.norm(dim=-1) + 1e-30).all()), float(
        (error / expected.norm(dim=-1)).nan_to_num().max()
    )
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert bool((output[empty] == 0).all())
    assert bool(((lse.double() - expected_lse)[~empty].abs() <= 1e-5 * expected_lse[~empty].abs().clamp_min(10)).all())


__all__ = [
    "FP8",
    "PACKED",
    "ROUNDING",
    "SM_SCALE",
    "Step",
    "assert_close",
    "make_sink_step",
    "make_step",
    "relative_error",
]
