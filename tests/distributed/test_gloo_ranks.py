"""Decode context parallelism and gathers on 2, 3 and 4 real processes."""

from __future__ import annotations

import functools

import dcp_cases
import gloo_workers
import pytest


@functools.cache
def results(world: int) -> list[list[tuple[bool, object]]]:
    # One start of the processes serves every case.
    return gloo_workers.run(world, dcp_cases.CASES)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", dcp_cases.CASES, ids=lambda case: case.__name__)
def test_on_every_rank(case, world):
    index = dcp_cases.CASES.index(case)
    for rank, outcomes in enumerate(results(world)):
        assert len(outcomes) > index, f"rank {rank} ended before this case"
        passed, found = outcomes[index]
        assert passed, f"rank {rank}:\n{found}"
