"""The Hopper kernels' own code on a CPU against float64, every order of its threads, loads and products at random.

The emulator runs them as early or late as the kernels' barriers allow, so that one barrier too few is a wrong answer
here, and one too many a deadlock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import densemla
import hopper_emulator
from densemla.backends import hopper
from hopper_emulator import Kernels, decode
from steps import FP8, Step, assert_close, make_step

pytestmark = pytest.mark.skipif(hopper_emulator.COMPILER is None, reason="needs a C++ compiler")

FORMATS = {
    "fp8 cache": {"kv_dtype": FP8, "kv_scale": 0.03},
    "fp8 queries": {"q_dtype": FP8, "q_scale": 0.02},
    "both fp8": {"kv_dtype": FP8, "kv_scale": 0.03, "q_dtype": FP8, "q_scale": 0.02},
}
PARTIALS = {"bf16": torch.bfloat16, "f32": torch.float32}
CUTS = [("bf16", 1), ("bf16", 3), ("bf16", 14), ("f32", 14)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


# Tile, and what differs from what the backend uses: scoring warpgroups, blocks that load together.
BUILDS = {
    **{str(rows): (rows, {}, frozenset()) for rows in hopper.TILES},
    "16, two scorers": (16, {16: 2}, frozenset()),
    "48, two scorers, paired": (48, {48: 2}, frozenset((48,))),
}


def use(build: str, monkeypatch: pytest.MonkeyPatch) -> int:
    rows, scorers, paired = BUILDS[build]
    monkeypatch.setattr(hopper, "SCORERS", {**hopper.SCORERS, **scorers})
    monkeypatch.setattr(hopper, "PAIRED", hopper.PAIRED | paired)
    return rows


@pytest.fixture(params=BUILDS)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    return use(request.param, monkeypatch)


def bind(step: Step, **options: Any) -> densemla.Binding:
    options = {"backend": "cpu", "max_cache_tokens": 4096, "num_splits": 1, "single_split_chunks": 0, **options}
    return step.bind(densemla.plan(step.caps(**options)))


def check(kernels: Kernels, step: Step, tile: int, seed: int, **options: Any) -> densemla.Binding:
    binding = bind(step, **options)
    decode(kernels, binding, tile, seed)
    partial_dtype = binding.plan.partial_dtype if binding.plan.num_splits > 1 else None
    # The weights of a product are rounded to bf16, as the output is.
    assert_close(step, binding.output, binding.lse, partial_dtype or torch.bfloat16)
    return binding


@pytest.mark.parametrize(("partial", "num_splits"), CUTS)
def test_splits(kernels: Kernels, tile: int, partial: str, num_splits: int) -> None:
    for seed in range(2):
        step = make_step([400, 65, 0, 1, 64, 1000], heads=20, seed=seed)
        check(kernels, step, tile, seed, num_splits=num_splits, partial_dtype=PARTIALS[partial])


@pytest.mark.parametrize("name", FORMATS)
def test_fp8(kernels: Kernels, tile: int, name: str) -> None:
    for seed in range(2):
        step = make_step([400, 65, 0, 1, 64], heads=20, queries=2, seed=seed, **FORMATS[name])
        check(kernels, step, tile, seed, num_splits=2)


def test_an_fp8_row_that_is_nan_reaches_only_the_queries_that_see_it(kernels: Kernels, tile: int) -> None:
    step = make_step([130], heads=12, queries=3, kv_dtype=FP8, kv_scale=0.03)
    step.kv_cache.view(torch.uint8)[step.page_table[0, 129 // 64].long(), 129 % 64, 3] = 0x7F
    binding = bind(step)
    decode(kernels, binding, tile, 0)
    assert bool(binding.output[:2].isfinite().all())
    assert bool(binding.output[2, :, 3].isnan().all())


@pytest.mark.parametrize("heads", [1, 12, 96, 128])
def test_head_counts(kernels: Kernels, tile: int, heads: int) -> None:
    check(kernels, make_step([200, 129], heads=heads, seed=heads), tile, heads, num_splits=2)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_page_sizes(kernels: Kernels, tile: int, page_size: int) -> None:
    check(kernels, make_step([700, 129, 5], heads=12, page_size=page_size), tile, page_size, num_splits=2)


def test_scores_that_move_the_base(kernels: Kernels, tile: int) -> None:
    for seed, logits in enumerate((0.1, 30.0)):
        check(kernels, make_step([900], heads=12, logits=logits, heavy_tails=True), tile, seed, num_splits=2)


def test_queries_with_bounds(kernels: Kernels, tile: int) -> None:
    for seed in range(2):
        step = make_step([300, 2, 0, 64], heads=12, queries=[5, 3, 1, 0], seed=seed)
        check(kernels, step, tile, seed, num_splits=2)
        seen = torch.tensor([0, 300, 64, 65, 1, 2, 0, 1, 0], dtype=torch.int32)
        step.query_cache_seqlens = seen
        check(kernels, step, tile, seed, num_splits=2)


def test_what_a_query_does_not_see_does_not_reach_it(kernels: Kernels, tile: int) -> None:
    step = make_step([130], heads=12, queries=3)
    bad = step.page_table[0, 129 // 64].long()
    for value in (torch.nan, torch.inf):
        step.kv_cache[bad, 129 % 64, 3] = value
        binding = bind(step)
        decode(kernels, binding, tile, 0)
        assert bool(binding.output[:2].isfinite().all())
        # An infinite row may have the weight 0.
        assert bool(binding.output[2, :, 3].isnan().all()) or value == torch.inf


def test_rows_of_no_request_are_cleared(kernels: Kernels, tile: int) -> None:
    step = make_step([100, 70], heads=12, queries=[2, 3])
    step.cu_seqlens_q = torch.tensor([0, 2, 3], dtype=torch.int32)
    binding = bind(step, num_splits=2)
    decode(kernels, binding, tile, 0)
    assert bool((binding.output[3:] == 0).all())
    assert bool((binding.lse[3:] == -torch.inf).all())


def test_bits_do_not_depend_on_the_order_of_things(kernels: Kernels, tile: int) -> None:
    step = make_step([700, 65, 300], heads=20, queries=2, logits=5.0)
    first = bind(step, num_splits=3)
    decode(kernels, first, tile, 0)
    for seed in range(1, 3):
        again = bind(step, num_splits=3)
        decode(kernels, again, tile, seed)
        assert torch.equal(first.output, again.output)
        assert torch.equal(first.lse, again.lse)


@pytest.mark.parametrize(
    ("build", "before", "after"),
    [
        # It once was missing: the sums replaced maxima that another warp had yet to read.
        ("48", "    group_sync<SCORERS_BARRIER, 128 * SCORERS>();  // every warp has read the last maxima", "    //"),
        ("48", "barrier_wait(shared_address(&s.full[box.slot]), box.phase);", ""),
        ("48", "    mma_wait<3 - T>(); \\\n", ""),
        ("64", "barrier_wait(shared_address(&s.p_ready[OTHER]), other_phase);", ""),
        ("64", "        barrier_wait(shared_address(&s.empty[owner][half]), phase ^ 1);\n", ""),
        ("64", "        mma_wait<0>();\n        pin(scores);\n        pin(output);\n", ""),
        ("64", "    group_sync<7, 128>();", ""),
        (
            "16, two scorers",
            "barrier_wait(shared_address(&s.turn[SCORER]), SCORER ? buffer.phase : buffer.phase ^ 1);",
            "",
        ),
        ("16, two scorers", "if (s.reduction.moved[warp]) softmax.follow(s.reduction, warp, lane);", ""),
        ("48, two scorers, paired", "PAIRED && loads_slot(i) ? 8 : 4", "4"),
        ("48, two scorers, paired", "    cluster_arrive();\n    cluster_wait();\n", ""),
        ("48", "__all_sync(~0u, barrier_over(shared_address(&s.landed[boxes.slot()]), boxes.phase()))", "true"),
    ],
    ids=[
        "maxima",
        "box",
        "values",
        "weights",
        "slot",
        "scores",
        "fp8 read",
        "turn",
        "bases",
        "pair",
        "meet",
        "fp8 landed",
    ],
)
def test_a_missing_wait_is_found(
    build: str, before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator's own test."""
    tile = use(build, monkeypatch)
    whole = hopper_emulator._project_file
    assert before in "".join(map(whole, ("decode_swapped.cu", "decode_rows.cu", "widen.cu")))
    formats = FORMATS["fp8 cache"] if before in whole("widen.cu") else {}
    with patch.object(hopper_emulator, "_project_file", lambda name: whole(name).replace(before, after)):
        broken = Kernels(tmp_path)
        for seed in range(20):
            # Which kind of step shows a fault depends on the fault.
            long = make_step([700, 130], heads=20, logits=3.0, seed=seed, **formats)
            short = make_step([60, 130], heads=20, logits=3.0, seed=seed, **formats)
            try:
                check(broken, long, tile, seed, num_splits=2)
                check(broken, short, tile, seed, num_splits=3)
            except AssertionError:
                return
    pytest.fail("not found")
