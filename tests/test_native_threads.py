"""The compiled decode keeps helper threads between calls: neither other callers nor a fork may upset them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
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


# Only the team's state, which threads claim tickets from, has 64 bits.
SLEEPY_ATOMICS = """
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#define SLEEP_AT(at) (sizeof(*(at)) == 8 ? usleep(rand() % 400) : 0)
#undef atomic_fetch_add
#define atomic_fetch_add(at, n) (SLEEP_AT(at), atomic_fetch_add_explicit(at, n, memory_order_seq_cst))
#undef atomic_store
#define atomic_store(at, value) (SLEEP_AT(at), atomic_store_explicit(at, value, memory_order_seq_cst))
"""


@pytest.fixture
def sleepy_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """native.c built so that a thread may lose its core for a while before every claim and every change of phase."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    (tmp_path / "sleepy.h").write_text(SLEEPY_ATOMICS)
    source = Path(native.__file__).with_name("native.c")
    built = tmp_path / "_native.abi3.so"
    flags = ["-O1", "-pthread", "-Wno-psabi", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    command = [*compiler, *flags, "-include", str(tmp_path / "sleepy.h"), str(source), "-o", str(built), "-lm"]
    subprocess.run(command, check=True, timeout=300)
    name = "densemla.backends.cpu._native"
    loader = importlib.machinery.ExtensionFileLoader(name, str(built))
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, built, loader=loader))
    loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(native, "_library", native._load())


@pytest.mark.usefixtures("sleepy_library")
def test_threads_that_lose_their_core_at_any_time_take_no_ticket_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last round has few segments and the merge many tickets; the longest request is merged last.
    step = make_step([300, 64, 2000], heads=96, queries=4)
    plan = densemla.plan(step.caps(num_splits=3, single_split_chunks=0))
    alone = step.bind(plan)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    densemla.run(alone)
    monkeypatch.setattr(native, "_MAX_THREADS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    binding = step.bind(densemla.plan(plan.caps))
    for _ in range(5):
        binding.output.fill_(torch.nan)
        densemla.run(binding)
        assert torch.equal(binding.output, alone.output)
        assert torch.equal(binding.lse, alone.lse)


FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from steps import make_step

# Large enough for torch itself to use its threads in the parent, which a child does not have; so the child
# compares without torch.
step = make_step([int(sys.argv[2])], heads=int(sys.argv[3]), queries=12, page_size=int(sys.argv[4]))
before = step.decode()[0].view(torch.int16).numpy()
child = os.fork()
same = bool((step.decode()[0].view(torch.int16).numpy() == before).all())
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
sys.exit(0 if same and status == 0 else 1)
"""


@pytest.mark.parametrize(("length", "heads", "page_size"), [(3000, 96, 64), (40000, 1, 1)])
def test_a_forked_child_decodes_too(length: int, heads: int, page_size: int) -> None:
    sizes = map(str, (length, heads, page_size))
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(Path(__file__).parent), *sizes]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            assert process.wait(60) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the child that hangs, too
            raise
