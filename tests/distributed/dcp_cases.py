"""What every rank runs in test_dcp.py and test_gather.py. All ranks run the same cases in the same order."""

from __future__ import annotations

import itertools
import math
import random
import time

import torch
import torch.distributed as dist
from dcp_problem import HEADS, RANK, Problem, relative_error

import densemla
from densemla.distributed import DcpDecoder, LseMerge, all_gatherv
from densemla.distributed.dcp import FORMS

BF16, FP32 = torch.bfloat16, torch.float32


def refused(call, argument: str) -> str:
    """The message of the ContractError about ``argument`` that ``call`` must raise here."""
    try:
        call()
    except densemla.ContractError as error:
        caught = error
    else:
        raise AssertionError(f"nothing was raised about {argument}")
    assert caught.argument == argument, caught
    return str(caught)


def run_error(problem: Problem, partial: torch.dtype, form: str, **options: object) -> float:
    decoder = DcpDecoder(problem.plan(partial, **options), interleave=problem.interleave, form=form)
    binding = problem.bind(decoder)
    decoder.compile(binding)
    binding.output.fill_(torch.nan)
    binding.lse.fill_(torch.nan)
    decoder.run(binding)
    output, lse = problem.own_answer(decoder)
    empty = lse == -math.inf
    assert torch.equal(binding.lse == -math.inf, empty)
    assert torch.equal(binding.output[empty], torch.zeros_like(binding.output[empty]))
    torch.testing.assert_close(binding.lse[~empty].double(), lse[~empty], atol=2e-5, rtol=1e-5)
    return relative_error(binding.output, output)


def decode_matches_float64() -> None:
    for form, interleave in itertools.product(FORMS, (1, 3)):
        problem = Problem([300, 0, 129, 2, 1], [3, 2, 1, 4, 1], interleave=interleave, seed=interleave)
        errors = {partial: run_error(problem, partial, form) for partial in (BF16, FP32)}
        assert errors[FP32] < 2e-6, (form, errors)
        assert 2e-4 < errors[BF16] < 4e-3, (form, errors)


def decode_of_one_query_each() -> None:
    for form in FORMS:
        assert run_error(Problem([70, 1, 0], [1, 1, 1], seed=1), FP32, form) < 2e-6
        # One row takes the gathered queries as they lie.
        assert run_error(Problem([70], [1], seed=2), FP32, form) < 2e-6


def decode_of_no_query() -> None:
    for form in FORMS:
        assert run_error(Problem([70, 3], [0, 0]), FP32, form) == 0


def decode_follows_explicit_bounds() -> None:
    for interleave in (1, 2, 4):
        problem = Problem([10, 40], [3, 3], interleave=interleave, bounds=[8, 9, 10, 40, 0, 17], seed=interleave)
        decoder = DcpDecoder(problem.plan(FP32), interleave=interleave)
        binding = problem.bind(decoder)
        positions = torch.arange(64)
        holders = positions // interleave % dist.get_world_size()
        expected = [int(((positions < bound) & (holders == decoder.rank)).sum()) for bound in problem.visible]
        assert binding.local.query_cache_seqlens.tolist() == expected
        for form in FORMS:
            assert run_error(problem, FP32, form) < 2e-6


def decode_where_most_ranks_are_empty() -> None:
    # Every token of every request on rank 0: the others have no page at all.
    for form in FORMS:
        assert run_error(Problem([5, 0, 16], [1, 1, 2], interleave=16, seed=3), FP32, form) < 2e-6


def decode_in_half_types() -> None:
    problem = Problem([150, 33], [2, 1], dtype=BF16, seed=4)
    for form in FORMS:
        assert run_error(problem, FP32, form) < 3e-3
        assert run_error(problem, FP32, form, backend="reference") < 3e-3


def decode_of_fp8_queries() -> None:
    problem = Problem([90, 20], [2, 3], dtype=BF16, seed=8)
    problem.q = problem.q.to(torch.float8_e4m3fn)
    for form in FORMS:
        assert run_error(problem, FP32, form, q_dtype=torch.float8_e4m3fn) < 3e-3


def partials_of_one_rank_are_exact() -> None:
    # A request on one rank alone is that rank's result, in bits: nothing is weighed but by 1.
    problem = Problem([16], [1], interleave=16, seed=5)
    for form in FORMS:
        decoder = DcpDecoder(problem.plan(BF16), interleave=16, form=form)
        binding = problem.bind(decoder)
        decoder.run(binding)
        world_output = all_gatherv(binding.output, dim=1)
        if decoder.rank == 0:
            assert torch.equal(world_output, binding.local.output.float())


def lengths_are_read_anew() -> None:
    problem = Problem([100, 64], [2, 2], seed=6)
    decoder = DcpDecoder(problem.plan(BF16))
    binding = problem.bind(decoder)
    for lengths in ([1, 64], [99, 0], [63, 40]):
        binding.cache_seqlens.copy_(torch.tensor(lengths))
        decoder.run(binding)
        shorter = Problem(lengths, [2, 2], seed=6)
        shorter.q, shorter.tokens = problem.q, [rows[:n] for rows, n in zip(problem.tokens, lengths, strict=True)]
        fresh = DcpDecoder(problem.plan(BF16))
        again = shorter.bind(fresh)
        fresh.run(again)
        assert torch.equal(binding.output, again.output)
        assert torch.equal(binding.lse, again.lse)
        # The local lengths are the decoder's: binding another step must not leave its own behind.
        problem.bind(decoder, cache_seqlens=torch.tensor([5, 5], dtype=torch.int32))
        decoder.run(binding)
        assert torch.equal(binding.output, again.output)
        assert torch.equal(binding.lse, again.lse)


def bits_depend_neither_on_timing_nor_on_the_batch() -> None:
    batch = Problem([130, 77, 0, 40], [1, 1, 1, 1], seed=7)
    alone = Problem([77], [1], seed=7)
    alone.q, alone.tokens = batch.q[1:2], batch.tokens[1:2]
    pace = random.Random(dist.get_rank())
    pinned = {"num_splits": 4, "single_split_chunks": 0}
    for form in FORMS:
        decoder = DcpDecoder(batch.plan(BF16, **pinned), form=form)
        binding = batch.bind(decoder)
        decoder.run(binding)
        first = binding.output.clone(), binding.lse.clone()
        for _ in range(4):
            time.sleep(pace.uniform(0, 0.03))
            binding.output.fill_(torch.nan)
            decoder.run(binding)
            assert torch.equal(binding.output, first[0])
            assert torch.equal(binding.lse, first[1])
        if form == "all_to_all":
            single = DcpDecoder(alone.plan(BF16, **pinned), form=form)
            row = alone.bind(single)
            single.run(row)
            assert torch.equal(row.output[0], binding.output[1])


def _merge_on(device: object) -> LseMerge:
    return LseMerge(None, num_heads=HEADS, width=5, max_rows=1, partial_dtype=FP32, device=device)


def _merge(form: str, partial: torch.Tensor, lses: torch.Tensor, base: float = math.e) -> tuple[torch.Tensor, ...]:
    """Merge [world, rows, heads, width] partials, one of them here; gathered back to all heads."""
    rank = dist.get_rank()
    rows, heads, width = partial.shape[1:]
    merge = LseMerge(
        None, num_heads=heads, width=width, max_rows=rows + 1, partial_dtype=partial.dtype, form=form,
        device=torch.device("cpu"),
    )  # fmt: skip
    output = torch.full((rows, merge.own_heads, width), torch.nan)
    lse = torch.full((rows, merge.own_heads), torch.nan)
    mine, mine_lse = merge.partials(rows)
    mine.copy_(partial[rank])
    mine_lse.copy_(lses[rank])
    merge.run(output, lse, base=base)
    return all_gatherv(output, dim=1), all_gatherv(lse, dim=1)


def merge_is_the_single_process_merge() -> None:
    world = dist.get_world_size()
    for form, partial, base in itertools.product(FORMS, (BF16, FP32), (math.e, 2)):
        generator = torch.Generator().manual_seed(11)
        outputs = torch.randn(world, 3, HEADS, 5, generator=generator).to(partial)
        lses = 20 * torch.randn(world, 3, HEADS, generator=generator)
        found, found_lse = _merge(form, outputs, lses, base)
        right, right_lse = densemla.merge(outputs.double(), lses, base=base)
        torch.testing.assert_close(found_lse, right_lse.float(), atol=1e-5, rtol=1e-6)
        if form == "all_to_all":
            assert torch.equal(found, densemla.merge(outputs.float(), lses, base=base)[0])
        else:
            assert relative_error(found, right) < (1e-2 if partial is BF16 else 1e-6)


def merge_drops_empty_shards() -> None:
    world = dist.get_world_size()
    for form, partial, nothing in itertools.product(FORMS, (BF16, FP32), (-math.inf, math.inf)):
        outputs = torch.full((world, 3, HEADS, 4), torch.nan, dtype=partial)
        lses = torch.full((world, 3, HEADS), nothing)
        # Row 0 is empty on all ranks, row 1 on all but the last, row 2 on the first alone.
        outputs[-1, 1:], lses[-1, 1:] = 2.5, -30.0
        outputs[1:, 2], lses[1:, 2] = 2.5, torch.linspace(-90, 90, world - 1).unsqueeze(1)
        found, found_lse = _merge(form, outputs, lses)
        assert torch.equal(found[0], torch.zeros_like(found[0]))
        assert torch.equal(found_lse[0], torch.full_like(found_lse[0], -math.inf))
        assert torch.equal(found[1], torch.full_like(found[1], 2.5))
        assert torch.equal(found_lse[1], torch.full_like(found_lse[1], -30.0))
        torch.testing.assert_close(found[2], torch.full_like(found[2], 2.5), atol=0, rtol=1e-2)


def merge_converts_the_base() -> None:
    world = dist.get_world_size()
    outputs = torch.zeros(world, 1, HEADS, 1)
    sums = torch.zeros(world, 1, HEADS)
    # The published pair: Z = [2, 8] with outputs 0 and 10 is 8; base 2 taken for e gives 7.2330317.
    sums[0], sums[1], outputs[1] = 2.0, 8.0, 10.0
    for form in FORMS:
        for base, lses in ((math.e, sums.log()), (2, sums.log2())):
            found, lse = _merge(form, outputs, lses, base)
            torch.testing.assert_close(found, torch.full_like(found, 8.0))
            torch.testing.assert_close(lse, torch.full_like(lse, math.log(10)))


def merge_shows_a_faulty_rank() -> None:
    world = dist.get_world_size()
    lses = torch.zeros(world, 1, HEADS)
    lses[-1] = torch.nan
    for form in FORMS:
        found, lse = _merge(form, torch.ones(world, 1, HEADS, 1), lses)
        assert found.isnan().all()
        assert lse.isnan().all()


def merge_shows_a_nan_however_little_it_weighs() -> None:
    world = dist.get_world_size()
    outputs, lses = torch.ones(world, 1, HEADS, 2), torch.zeros(world, 1, HEADS)
    outputs[-1], lses[-1] = torch.nan, -300.0
    for form in FORMS:
        assert _merge(form, outputs, lses)[0].isnan().all()


def disagreement_is_refused_everywhere() -> None:
    rank = dist.get_rank()
    problem = Problem([40], [2])
    plan = problem.plan(FP32)
    message = refused(lambda: DcpDecoder(plan, interleave=1 + (rank == 1)), "interleave")
    assert "[1]" in message
    other = problem.plan(BF16 if rank == 1 else FP32)
    refused(lambda: DcpDecoder(other), "plan")
    refused(lambda: DcpDecoder(plan, interleave=0 if rank == 1 else 1), "interleave" if rank == 1 else "group")
    refused(lambda: DcpDecoder(None if rank == 1 else plan), "plan" if rank == 1 else "group")
    refused(lambda: DcpDecoder(plan, "x"), "group")
    refused(lambda: DcpDecoder(problem.plan(FP32, num_q_heads=HEADS + 1)), "num_heads")
    refused(lambda: DcpDecoder(plan, form="ring"), "form")
    for device in ("nope", "cuda:-1", torch.device("meta")):
        refused(lambda device=device: _merge_on(device), "device")
    decoder = DcpDecoder(plan)
    wrong = torch.zeros(2, decoder.own_heads, RANK, dtype=torch.float64)
    change = {"output": wrong} if rank == 1 else {}
    refused(lambda: problem.bind(decoder, **change), "output" if rank == 1 else "group")
    bounds = torch.tensor([3, 4], dtype=torch.int32)
    refused(lambda: problem.bind(decoder, query_cache_seqlens=bounds if rank == 1 else None), "query_cache_seqlens")
    # Each rank's share of -1 tokens would be another one, on rank 0 none.
    for name, lengths in (("cache_seqlens", [-1]), ("query_cache_seqlens", [3, -1])):
        refused(lambda name=name, lengths=lengths: problem.bind(decoder, **{name: torch.tensor(lengths).int()}), name)
    refused(lambda: problem.bind(decoder, sm_scale=0.5 if rank == 1 else 0.25), "sm_scale")
    refused(lambda: problem.bind(decoder, cache_seqlens=torch.tensor([4000], dtype=torch.int32)), "cache_seqlens")
    # And the group still works.
    decoder.run(problem.bind(decoder))


def results_without_memory_of_their_own_are_refused() -> None:
    problem = Problem([40], [2])
    decoder = DcpDecoder(problem.plan(FP32))
    own = decoder.own_heads
    output, lse = torch.full((2, own, RANK), torch.nan), torch.full((2, own), torch.nan)
    refused(lambda: problem.bind(decoder, output=output[:1].expand_as(output)), "output")
    refused(lambda: problem.bind(decoder, lse=lse[:1].expand_as(lse)), "lse")
    shared = output.view(-1)[: lse.numel()].view_as(lse)
    refused(lambda: problem.bind(decoder, output=output, lse=shared), "output")
    merge = LseMerge(None, num_heads=HEADS, width=RANK, max_rows=2, partial_dtype=FP32, device="cpu")
    for name, outputs in (
        ("output", (output[:1].expand_as(output), lse)),
        ("lse", (output, lse[:1].expand_as(lse))),
        ("output", (output, shared)),
        ("output", (output.to_sparse(), lse)),
        ("lse", (output, lse.to_sparse())),
        ("lse", (output, torch._neg_view(lse))),
        ("output", (None, lse)),
        ("lse", (output, lse.double())),
    ):
        refused(lambda outputs=outputs: merge.run(*outputs), name)
        assert output.isnan().all()


def parameters_are_as_good_as_tensors() -> None:
    problem = Problem([40, 7], [2, 1])
    for form in FORMS:
        decoder = DcpDecoder(problem.plan(FP32), form=form)
        plain = problem.bind(decoder)
        decoder.run(plain)
        parameter = torch.nn.Parameter(torch.empty_like(plain.output))
        binding = problem.bind(decoder, q=torch.nn.Parameter(plain.q), output=parameter)
        decoder.run(binding)
        assert torch.equal(binding.output, plain.output)


def a_merge_of_no_such_size_is_refused() -> None:
    for name, value in (
        *(("num_heads", value) for value in (0, -2, 4.0, "4", None)),
        *(("width", value) for value in (0, -1, "5")),
        *(("max_rows", value) for value in (-1, 1.5, None)),
    ):
        sizes = {"num_heads": HEADS, "width": 5, "max_rows": 1, name: value}
        refused(lambda sizes=sizes: LseMerge(None, partial_dtype=FP32, device="cpu", **sizes), name)


def gatherv_concatenates() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtypes = (torch.float32, BF16, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64)
    size_lists = ([3] * world, list(range(world)), [0] * (world - 1) + [2], [0] * world, [5, *[1] * (world - 1)])
    for dtype, sizes, dim in itertools.product(dtypes, size_lists, (0, 1, -1)):
        shapes = [[2, 3, 4] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[dim] = size
        generator = torch.Generator().manual_seed(5)
        slices = [torch.randint(0, 2, shape, generator=generator).to(dtype) for shape in shapes]
        for known in (None, sizes):
            found = all_gatherv(slices[rank], dim, sizes=known)
            right = torch.cat([_plain(piece) for piece in slices], dim)
            assert found.dtype is dtype
            assert found.is_contiguous()
            assert torch.equal(_plain(found), right)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes for the one-byte types: torch.cat and torch.equal know no fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def gatherv_takes_any_strides() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(60.0).view(3, 20)
    found = all_gatherv(whole.T[rank::world], 0)
    assert torch.equal(found, torch.cat([whole.T[r::world] for r in range(world)]))


def gatherv_writes_pending_signs_out() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
    for sizes in ([2] * world, list(range(world))):
        for view in (whole.conj(), torch._neg_view(whole.real), whole.conj().imag):
            found = all_gatherv(view[: sizes[rank]])
            values = view.resolve_conj().resolve_neg()
            assert torch.equal(found, torch.cat([values[:size] for size in sizes]))


def gatherv_in_a_group_of_one() -> None:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    tensor = torch.arange(6.0).view(2, 3).T
    assert all_gatherv(tensor, 1, alone) is tensor
    refused(lambda: all_gatherv(tensor, 2, alone), "dim")


def gatherv_refuses_on_every_rank() -> None:
    rank = dist.get_rank()
    odd = rank == 1
    good = torch.zeros(rank, 4)
    for bad in (good.double(), torch.zeros(rank, 5), torch.zeros(4), torch.zeros(rank, 4, 1)):
        refused(lambda bad=bad: all_gatherv(bad if odd else good), "tensor")
    refused(lambda: all_gatherv(torch.zeros(4, 4), 1 if odd else 0), "tensor")
    for bad in (None, torch.tensor(1.0), torch.zeros(1, 4, requires_grad=True), torch.zeros(1, 4).to_sparse()):
        message = refused(lambda bad=bad: all_gatherv(bad if odd else good), "tensor")
        assert odd or "[1]" in message
    refused(lambda: all_gatherv(good, 7 if odd else 0), "dim" if odd else "tensor")
    world = dist.get_world_size()
    for sizes in ([9] * world, 5, "x" * world, [None] * world, [float(rank)] * world, [-1] * world, [rank]):
        refused(lambda sizes=sizes: all_gatherv(good, sizes=sizes), "sizes")
    refused(lambda: all_gatherv(good, 0, "x"), "group")
    assert all_gatherv(good).shape[0] == sum(range(world))


CASES = (
    decode_matches_float64,
    decode_of_one_query_each,
    decode_of_no_query,
    decode_follows_explicit_bounds,
    decode_where_most_ranks_are_empty,
    decode_in_half_types,
    decode_of_fp8_queries,
    partials_of_one_rank_are_exact,
    lengths_are_read_anew,
    bits_depend_neither_on_timing_nor_on_the_batch,
    merge_is_the_single_process_merge,
    merge_drops_empty_shards,
    merge_converts_the_base,
    merge_shows_a_faulty_rank,
    merge_shows_a_nan_however_little_it_weighs,
    disagreement_is_refused_everywhere,
    results_without_memory_of_their_own_are_refused,
    parameters_are_as_good_as_tensors,
    a_merge_of_no_such_size_is_refused,
    gatherv_concatenates,
    gatherv_takes_any_strides,
    gatherv_writes_pending_signs_out,
    gatherv_in_a_group_of_one,
    gatherv_refuses_on_every_rank,
)
