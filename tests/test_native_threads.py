"""The compiled decode keeps helper threads between calls: neither other callers nor a fork may upset them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import densemla
from densemla.backends.cpu import native
from steps import make_step

pytestmark = pytest.mark.skipif(native.available() is None, reason="the compiled decode was not built")


def test_decodes_at_the_same_time_do_not_mix() -> None:
    steps = [make_step([2000 + 64 * i, 100], heads=8, seed=i) for i in range(6)]
    alone = [step.decode(single_split_chunks=0) for step in steps]
    with ThreadPoolExecutor(6) as callers:
        for _ in range(5):
            together = list(callers.map(lambda step: step.decode(single_split_chunks=0), steps))
            for (output, lse), (expected, expected_lse) in zip(together, alone, strict=True):
                assert torch.equal(output, expected)
                assert torch.equal(lse, expected_lse)


def test_more_threads_than_cores_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step([5000, 300, 0, 64], heads=8, queries=3)
    expected = step.decode(single_split_chunks=0)
    monkeypatch.setattr(native, "_MAX_THREADS", 13)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    plan = densemla.plan(step.caps(num_splits=32, single_split_chunks=0))
    binding = step.bind(plan)
    for _ in range(5):
        binding.output.fill_(torch.nan)
        densemla.run(binding)
        assert torch.equal(binding.output, expected[0])
        assert torch.equal(binding.lse, expected[1])


FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from steps import make_step

# Large enough for torch itself to use its threads in the parent, which a child does not have; so the child
# compares without torch.
step = make_step([3000], heads=96, queries=12)
before = step.decode()[0].view(torch.int16).numpy()
child = os.fork()
same = bool((step.decode()[0].view(torch.int16).numpy() == before).all())
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
sys.exit(0 if same and status == 0 else 1)
"""


def test_a_forked_child_decodes_too() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, str(Path(__file__).parent)], check=True, timeout=120)
