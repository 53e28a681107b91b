"""What must be equal in bits, tested with torch.equal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import densemla
from densemla.backends.cpu import native
from densemla.splits import live_chunks, live_splits
from steps import Step, make_step

PARTIALS = [torch.bfloat16, torch.float32]


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "_library", None)
    elif native.available() is None:
        pytest.skip("the compiled decode was not built (no C compiler)")
    return request.param


def run(step: Step, plan: densemla.Plan, **changes: object) -> densemla.Binding:
    binding = step.bind(plan, **changes)
    densemla.run(binding)
    return binding


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 1500), min_size=1, max_size=5),
    num_splits=st.integers(1, 12),
    threshold=st.sampled_from([-1, 0, 3, 1000]),
    partial=st.sampled_from(PARTIALS),
    queries=st.integers(1, 3),
)
def test_eager_equals_graph_and_batch_equals_alone(
    lengths: list[int], num_splits: int, threshold: int, partial: torch.dtype, queries: int
) -> None:
    step = make_step(lengths, heads=4, queries=queries, seed=sum(lengths))
    caps = step.caps(num_splits=num_splits, single_split_chunks=threshold, partial_dtype=partial, max_cache_tokens=2048)
    plan = densemla.plan(caps)
    graph = run(step, plan)
    eager = run(step, plan, active_splits=plan.launch_splits(max(lengths)))
    assert torch.equal(graph.output, eager.output)
    assert torch.equal(graph.lse, eager.lse)
    for i in range(len(lengths)):
        alone = run(step.request(i), plan)
        rows = slice(i * queries, (i + 1) * queries)
        assert torch.equal(alone.output, graph.output[rows])
        assert torch.equal(alone.lse, graph.lse[rows])


@pytest.mark.parametrize("partial", PARTIALS)
def test_decode_gives_a_request_the_same_bits_in_any_batch(partial: torch.dtype) -> None:
    """Field case 27: one row alone and within batches of 4 and 8 of mixed lengths."""
    step = make_step([6000, 64, 700, 9000, 1, 4096, 5000, 0], heads=6)
    whole, whole_lse = step.decode(partial_dtype=partial)
    for size in (1, 4):
        part = Step(**{**vars(step), "q": step.q[:size], "page_table": step.page_table[:size]})
        part.cache_seqlens, part.cu_seqlens_q = step.cache_seqlens[:size], step.cu_seqlens_q[: size + 1]
        output, lse = part.decode(partial_dtype=partial)
        assert torch.equal(output, whole[:size])
        assert torch.equal(lse, whole_lse[:size])


def test_what_a_table_could_hold_does_not_change_a_request() -> None:
    step = make_step([6400], heads=4)
    wide = torch.zeros(1, 4000, dtype=torch.int32)
    wide[:, :100] = step.page_table
    expected = step.decode()[0]
    step.page_table = wide
    assert torch.equal(step.decode()[0], expected)


def test_repeating_a_run_and_changing_the_threads_keeps_the_bits(kernel: str) -> None:
    step = make_step([3000, 200, 5000], heads=12, queries=2)
    plan = densemla.plan(step.caps(num_splits=6, single_split_chunks=0))
    first = run(step, plan)
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1) if kernel == "native" else (threads,):
            torch.set_num_threads(count)
            again = run(step, plan)
            assert torch.equal(again.output, first.output)
            assert torch.equal(again.lse, first.lse)
    finally:
        torch.set_num_threads(threads)


def test_long_splits_folded_over_many_segments_keep_the_bits_in_any_batch() -> None:
    """A lone split of 9000 tokens is worked on in pieces; which thread took which must not show."""
    step = make_step([9000, 1500], heads=4)
    plan = densemla.plan(step.caps(single_split_chunks=100000))
    together = run(step, plan)
    for i in range(2):
        assert torch.equal(run(step.request(i), plan).output, together.output[i : i + 1])


@pytest.mark.parametrize("partial", PARTIALS)
def test_a_request_under_the_threshold_has_the_bits_of_the_one_split_run(partial: torch.dtype) -> None:
    step = make_step([2048, 4096, 5000], heads=12)
    plan = densemla.plan(step.caps(num_splits=32, partial_dtype=partial))
    assert plan.single_split_chunks == 64, "4096 tokens"
    lone = densemla.plan(step.caps(num_splits=1))
    split, whole = run(step, plan), run(step, lone)
    assert torch.equal(split.output[:2], whole.output[:2])
    assert torch.equal(split.lse[:2], whole.lse[:2])
    assert not torch.equal(split.output[2], whole.output[2]), "5000 tokens are split, and that must show"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, 3000), num_splits=st.integers(1, 40), threshold=st.sampled_from([0, 1, 8]))
def test_empty_splits_publish_minus_infinity_and_nothing_else_reads_scratch(
    length: int, num_splits: int, threshold: int
) -> None:
    step = make_step([length], heads=2, seed=length)
    plan = densemla.plan(step.caps(num_splits=num_splits, single_split_chunks=threshold, max_cache_tokens=4096))
    binding = run(step, plan)
    live = live_splits(live_chunks(length), num_splits, threshold)
    published = binding.scratch["partial_lse"][:, 0]
    assert bool(published[:live].isfinite().all())
    assert bool((published[live:] == -math.inf).all())
    total = torch.logsumexp(published, 0)
    assert torch.allclose(total, binding.lse[0], rtol=1e-6, atol=1e-5)


def test_rebinding_lengths_in_place_equals_a_fresh_decode() -> None:
    """Field case 25: bound at length 64, run at 65, 128 and 4096 by changing the bound tensor only."""
    step = make_step([4096], heads=8)
    plan = densemla.plan(step.caps(num_splits=16, single_split_chunks=0))
    lengths = torch.tensor([64], dtype=torch.int32)
    binding = step.bind(plan, cache_seqlens=lengths)
    for length in (64, 65, 128, 4096, 64):
        lengths.fill_(length)
        densemla.run(binding)
        fresh = run(step, plan, cache_seqlens=torch.tensor([length], dtype=torch.int32))
        assert torch.equal(binding.output, fresh.output)
        assert torch.equal(binding.lse, fresh.lse)


def test_run_allocates_no_tensor(kernel: str) -> None:
    step = make_step([5000, 0, 300], heads=12, queries=2)
    plan = densemla.plan(step.caps(num_splits=6, single_split_chunks=0))
    binding = step.bind(plan)
    densemla.run(binding)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        densemla.run(binding)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    # The torch form asks which of its rows have no score above -inf: a flag for each.
    most = 0 if kernel == "native" else 4096
    assert allocated <= most, profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=10)
