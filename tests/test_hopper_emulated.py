"""The Hopper kernels' own code on a CPU against float64, every order of its threads, loads and products at random.

The emulator runs them as early or late as the kernels' barriers allow, so that one barrier too few is a wrong answer
here, and one too many a deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import densemla
import hopper_emulator
from densemla.backends import hopper
from hopper_emulator import Kernels, decode
from steps import FP8, Step, assert_close, make_sink_step, make_step

pytestmark = pytest.mark.skipif(hopper_emulator.COMPILER is None, reason="needs a C++ compiler")

FP8_CACHE = {"kv_dtype": FP8, "kv_scale": 0.03}
OPERANDS = ("swapped_bf16.cu", "swapped_fp8.cu")
PARTIALS = {"bf16": torch.bfloat16, "f32": torch.float32}
CUTS = [("bf16", 1), ("bf16", 3), ("bf16", 14), ("f32", 14)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


@dataclass(frozen=True)
class Build:
    """A kernel, and the steps that it is for."""

    tile: int
    scorers: int | None = None
    paired: bool = False
    formats: Mapping[str, Any] = field(default_factory=dict)

    def step(self, lengths: list[int], **options: Any) -> Step:
        return make_step(lengths, **{**self.formats, **options})

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "FP8_SCORERS" if self.formats else "SCORERS"
        if self.scorers is not None:
            monkeypatch.setattr(hopper, name, {self.tile: self.scorers})
        monkeypatch.setattr(hopper, "PAIRED", frozenset((self.tile,)) if self.paired else frozenset())


BUILDS = {
    **{str(rows): Build(rows) for rows in hopper.TILES},
    **{f"fp8 {rows}": Build(rows, formats=FP8_CACHE) for rows in hopper.FP8_TILES},
    "16, two scorers": Build(16, scorers=2),
    "48, two scorers, paired": Build(48, scorers=2, paired=True),
}


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    build = BUILDS[request.param]
    build.use(monkeypatch)
    return build


def bind(step: Step, **options: Any) -> densemla.Binding:
    options = {"backend": "cpu", "max_cache_tokens": 4096, "num_splits": 1, "single_split_chunks": 0, **options}
    return step.bind(densemla.plan(step.caps(**options)))


def check(kernels: Kernels, step: Step, build: Build, seed: int, **options: Any) -> densemla.Binding:
    binding = bind(step, **options)
    decode(kernels, binding, build.tile, seed)
    partial_dtype = binding.plan.partial_dtype if binding.plan.num_splits > 1 else None
    # The weights of a product are rounded to bf16, as the output is.
    assert_close(step, binding.output, binding.lse, partial_dtype or torch.bfloat16)
    return binding


@pytest.mark.parametrize(("partial", "num_splits"), CUTS)
def test_splits(kernels: Kernels, build: Build, partial: str, num_splits: int) -> None:
    for seed in range(2):
        step = build.step([400, 65, 0, 1, 64, 1000], heads=20, seed=seed)
        check(kernels, step, build, seed, num_splits=num_splits, partial_dtype=PARTIALS[partial])


def test_fp8_queries(kernels: Kernels, build: Build) -> None:
    for seed in range(2):
        step = build.step([400, 65, 0, 1, 64], heads=20, queries=2, seed=seed, q_dtype=FP8, q_scale=0.02)
        check(kernels, step, build, seed, num_splits=2)


def test_queries_of_any_magnitude(kernels: Kernels, build: Build) -> None:
    step = build.step([200], heads=16)
    step.q *= torch.tensor([2.0 ** (3 - 8 * head) for head in range(16)]).bfloat16()[:, None]
    step.q[0, 1, 5:] *= 2.0**-40
    step.q[0, 2] = 0.0
    check(kernels, step, build, 0)


def test_a_query_that_is_not_finite_spoils_its_own_row(kernels: Kernels, build: Build) -> None:
    for value in (torch.nan, torch.inf):
        step = build.step([200], heads=16)
        step.q[0, 3, 7] = value
        binding = bind(step)
        decode(kernels, binding, build.tile, 0)
        finite = binding.output[0].isfinite().all(-1)
        assert not finite[3]
        assert bool(finite[torch.arange(16) != 3].all())


@pytest.mark.parametrize("heads", [1, 12, 96, 128])
def test_head_counts(kernels: Kernels, build: Build, heads: int) -> None:
    check(kernels, build.step([200, 129], heads=heads, seed=heads), build, heads, num_splits=2)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_page_sizes(kernels: Kernels, build: Build, page_size: int) -> None:
    check(kernels, build.step([700, 129, 5], heads=12, page_size=page_size), build, page_size, num_splits=2)


def test_scores_that_move_the_base(kernels: Kernels, build: Build) -> None:
    for seed, logits in enumerate((0.1, 30.0)):
        check(kernels, build.step([900], heads=12, logits=logits, heavy_tails=True), build, seed, num_splits=2)


def test_weights_far_below_the_largest(kernels: Kernels, build: Build) -> None:
    check(kernels, make_sink_step(**build.formats), build, 0)


def test_queries_with_bounds(kernels: Kernels, build: Build) -> None:
    for seed in range(2):
        step = build.step([300, 2, 0, 64], heads=12, queries=[5, 3, 1, 0], seed=seed)
        check(kernels, step, build, seed, num_splits=2)
        seen = torch.tensor([0, 300, 64, 65, 1, 2, 0, 1, 0], dtype=torch.int32)
        step.query_cache_seqlens = seen
        check(kernels, step, build, seed, num_splits=2)


def test_what_a_query_does_not_see_does_not_reach_it(kernels: Kernels, build: Build) -> None:
    step = build.step([130], heads=12, queries=3)
    bad = step.page_table[0, 129 // 64].long()
    for value in (torch.nan,) if build.formats else (torch.nan, torch.inf):  # e4m3 has no infinities
        step.kv_cache[bad, 129 % 64, 3] = value
        binding = bind(step)
        decode(kernels, binding, build.tile, 0)
        assert bool(binding.output[:2].isfinite().all())
        # An infinite row may have the weight 0.
        assert bool(binding.output[2, :, 3].isnan().all()) or value == torch.inf


def test_rows_of_no_request_are_cleared(kernels: Kernels, build: Build) -> None:
    step = build.step([100, 70], heads=12, queries=[2, 3])
    step.cu_seqlens_q = torch.tensor([0, 2, 3], dtype=torch.int32)
    binding = bind(step, num_splits=2)
    decode(kernels, binding, build.tile, 0)
    assert bool((binding.output[3:] == 0).all())
    assert bool((binding.lse[3:] == -torch.inf).all())


@pytest.mark.parametrize("num_splits", [1, 3])
def test_lengths_of_a_cache_without_pages_are_not_believed(kernels: Kernels, build: Build, num_splits: int) -> None:
    step = build.step([0, 0], heads=12)
    step.kv_cache = step.kv_cache[:0]
    step.page_table = torch.zeros(2, 4, dtype=torch.int32)
    binding = bind(step, num_splits=num_splits)
    step.cache_seqlens[:] = torch.tensor([200, 1 << 30])
    decode(kernels, binding, build.tile, 0)
    assert bool((binding.output == 0).all())
    assert bool((binding.lse == -torch.inf).all())


def test_bits_do_not_depend_on_the_order_of_things(kernels: Kernels, build: Build) -> None:
    step = build.step([700, 65, 300], heads=20, queries=2, logits=5.0)
    first = bind(step, num_splits=3)
    decode(kernels, first, build.tile, 0)
    for seed in range(1, 3):
        again = bind(step, num_splits=3)
        decode(kernels, again, build.tile, seed)
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
        (
            "16, two scorers",
            "barrier_wait(shared_address(&s.turn[SCORER]), SCORER ? buffer.phase : buffer.phase ^ 1);",
            "",
        ),
        ("16, two scorers", "if (s.reduction.moved[warp]) softmax.follow(s.reduction, warp, lane);", ""),
        ("48, two scorers, paired", "PAIRED && loads_slot(i) ? 8 : 4", "4"),
        ("48, two scorers, paired", "    cluster_arrive();\n    cluster_wait();\n", ""),
        (
            "fp8 16",
            "        barrier_wait(shared_address(&s.full[box.slot]), box.phase);\n        read_columns",
            "        read_columns",
        ),
        ("fp8 32", "barrier_wait(shared_address(&s.full[box.slot]), box.phase);\n            read_rows", "read_rows"),
        ("fp8 32", "            mma_wait<1>();  // of", "            // of"),
        ("fp8 48", "        if (T > 0) mma_wait<1>();  // of", "        // of"),
    ],
    ids=[
        "maxima",
        "box",
        "values",
        "weights",
        "slot",
        "scores",
        "turn",
        "bases",
        "pair",
        "meet",
        "fp8 columns",
        "fp8 rows",
        "fp8 row operands",
        "fp8 column operands",
    ],
)
def test_a_missing_wait_is_found(
    build: str, before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator's own test."""
    kernel = BUILDS[build]
    kernel.use(monkeypatch)
    whole = hopper_emulator._project_file
    assert any(before in whole(name) for name in ("decode_rows.cu", "decode_swapped.cu", *OPERANDS))
    with patch.object(hopper_emulator, "_project_file", lambda name: whole(name).replace(before, after)):
        broken = Kernels(tmp_path)
        for seed in range(20):
            # Which kind of step shows a fault depends on the fault.
            long = kernel.step([700, 130], heads=20, logits=3.0, seed=seed)
            short = kernel.step([60, 130], heads=20, logits=3.0, seed=seed)
            try:
                check(broken, long, kernel, seed, num_splits=2)
                check(broken, short, kernel, seed, num_splits=3)
            except AssertionError:
                return
    pytest.fail("not found")
