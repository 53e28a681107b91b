"""Runs functions on several real processes that are joined by gloo, and brings their failures back."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# Torch is imported once, not by every worker.
_CONTEXT.set_forkserver_preload(["torch", "densemla.distributed", "densemla.vision"])

FAILURES = (ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def _work(
    rank: int, world: int, store: str, timeout: float, cases: Sequence[Callable[[], object]], end: Connection
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    for case in cases:
        try:
            end.send((True, case()))
        except FAILURES:
            end.send((False, traceback.format_exc()))
    end.send(None)
    dist.destroy_process_group()


def run(
    world: int, cases: Sequence[Callable[[], object]], *, timeout: float = 20, deadline: float = 100
) -> list[list[tuple[bool, object]]]:
    """Call every case, in order, on each of ``world`` processes.

    Args:
        timeout: of the process group, in seconds.
        deadline: after which whatever still runs is killed.

    Returns:
        For each rank, for each case that ended: (True, its result) or (False, a traceback). A rank that died
        has fewer.
    """
    stop = time.monotonic() + deadline
    with tempfile.TemporaryDirectory() as folder:
        workers, ends = [], []
        for rank in range(world):
            end, theirs = _CONTEXT.Pipe(duplex=False)
            args = (rank, world, str(Path(folder) / "store"), timeout, cases, theirs)
            worker = _CONTEXT.Process(target=_work, args=args)
            worker.start()
            theirs.close()
            workers.append(worker)
            ends.append(end)
        results = [_drain(end, stop) for end in ends]
        for worker in workers:
            worker.join(max(stop - time.monotonic(), 0.1))
            if worker.is_alive():
                worker.kill()
                worker.join()
    return results


def _drain(end: Connection, stop: float) -> list[tuple[bool, object]]:
    found = []
    with end:
        while end.poll(max(stop - time.monotonic(), 0)):
            try:
                message = end.recv()
            except EOFError:
                break
            if message is None:
                break
            found.append(message)
    return found
