"""A request's bits: alone or in a batch, again and again, eager or from a graph."""

from __future__ import annotations

import pytest
import torch
from gpu_steps import Run, assert_right, bind, decode, make_step, on_gpu, plan_for, poison, same

import densemla
from steps import FP8, PACKED

LENGTHS = [5000, 64, 0, 900, 1, 8000, 2500, 333]
KINDS = {
    "16": {"heads": 16},
    "96": {"heads": 96},
    "12 heads, 4 queries": {"heads": 12, "queries": 4},
    "fp8": {"heads": 96, "kv_dtype": FP8, "kv_scale": 0.03},
    "packed": {"heads": 16, "kv_dtype": PACKED},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, object]:
    found: dict[str, object] = KINDS[request.param]
    return found


@pytest.mark.parametrize("threshold", [-1, 0])
def test_alone_or_in_a_batch(backend: str, kind: dict[str, object], threshold: int) -> None:
    step = make_step(LENGTHS, **kind)
    options = {
        "kv_dtype": kind.get("kv_dtype", torch.bfloat16),
        "single_split_chunks": threshold,
        "max_batch": 8,
        "max_total_q": step.q.shape[0],
    }
    whole = decode(step, backend, **options)
    for i in range(len(LENGTHS)):
        alone = decode(step.request(i), backend, **options)
        begin, end = step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1]
        assert same((whole.output[begin:end], whole.lse[begin:end]), alone)


def test_repeats_are_equal(backend: str, kind: dict[str, object]) -> None:
    step = make_step(LENGTHS, **kind)
    run = decode(step, backend, kv_dtype=kind.get("kv_dtype", torch.bfloat16))
    first = run.output.clone(), run.lse.clone()
    for _ in range(20):
        assert same(first, run.again())


@pytest.mark.parametrize("lengths", [[64, 1], [700, 129], [5000, 64], [8000, 0]])
@pytest.mark.parametrize("threshold", [-1, 0, 5])
def test_eager_launches_give_a_graphs_bits(backend: str, lengths: list[int], threshold: int) -> None:
    step = on_gpu(make_step(lengths, heads=96))
    plan = plan_for(step, backend, single_split_chunks=threshold)
    full = Run(bind(step, plan)).again()
    fewest = Run(bind(step, plan, active_splits=plan.launch_splits(max(lengths)))).again()
    assert same(full, fewest)


def test_a_graph_replays_with_other_lengths(backend: str, kind: dict[str, object]) -> None:
    options = {"kv_dtype": kind.get("kv_dtype", torch.bfloat16), "single_split_chunks": 5}
    longest = make_step([6000] * 4, **kind)
    step = on_gpu(longest)
    plan = plan_for(step, backend, **options)
    assert plan.supports("graph_capture")
    binding = bind(step, plan)
    densemla.compile(binding)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        densemla.run(binding)
    for lengths in ([6000] * 4, [0, 1, 64, 65], [320, 321, 6000, 63], [0, 0, 0, 0], [4097, 12, 5999, 1000]):
        step.cache_seqlens.copy_(torch.tensor(lengths))
        poison(binding)
        graph.replay()
        replayed = binding.output.clone(), binding.lse.clone()
        eager = Run(bind(step, plan, active_splits=plan.launch_splits(max(lengths)))).again()
        assert same(replayed, eager)
        longest.cache_seqlens = torch.tensor(lengths, dtype=torch.int32)
        assert_right(longest, eager)


def test_run_allocates_nothing(backend: str) -> None:
    step = on_gpu(make_step([3000, 5], heads=96))
    binding = bind(step, plan_for(step, backend))
    densemla.compile(binding)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        densemla.run(binding)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
