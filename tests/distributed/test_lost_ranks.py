"""A rank that dies, and one that never comes: the others end with a clear error, in time."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import gloo_workers
import torch
import torch.distributed as dist
from dcp_cases import refused
from dcp_problem import Problem

from densemla.distributed import DcpDecoder, PeerError, all_gatherv

TIMEOUT = 2.0


def step_without_peer() -> list[tuple[str, float]]:
    """Ranks 0 and 1 decode, and 1 dies between two steps; ranks 2 and 3 gather, and 3 never comes."""
    rank = dist.get_rank()
    # Only the pair that waits in vain is short of time, and only once all ranks are there.
    pairs = [dist.new_group([0, 1])]
    dist.barrier()
    pairs.append(dist.new_group([2, 3], timeout=timedelta(seconds=TIMEOUT)))
    if rank < 2:
        problem = Problem([50], [2])
        decoder = DcpDecoder(problem.plan(torch.bfloat16), pairs[0])
        binding = problem.bind(decoder)
        decoder.run(binding)
        decoder.watch()
        dist.barrier(pairs[0])
        if rank == 1:
            os._exit(1)
        return [_failure(lambda: decoder.run(binding)), _failure(decoder.watch)]
    if rank == 3:
        time.sleep(2.5 * TIMEOUT)
        return []
    return [_failure(lambda: all_gatherv(torch.zeros(2), 0, pairs[1]))]


def _failure(call) -> tuple[str, float]:
    start = time.monotonic()
    try:
        call()
    except PeerError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_the_others_end_with_a_clear_error():
    results = gloo_workers.run(4, [step_without_peer], deadline=40)
    assert results[1] == []
    for rank, collectives in ((0, ["queries", "signs of life"]), (2, ["shapes"])):
        passed, found = results[rank][0]
        assert passed, found
        for what, (message, seconds) in zip(collectives, found, strict=True):
            expected = f"rank 0 of 2: the all-gather of {what} failed on gloo. A peer has died"
            assert message.startswith(expected), message
            assert seconds < 2 * TIMEOUT


def test_without_a_process_group():
    assert "torchrun" in refused(lambda: all_gatherv(torch.zeros(2)), "group")
