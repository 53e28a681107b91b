"""A decode must not copy the cache: its peak memory is measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import json, sys
from pathlib import Path
import torch
import densemla
from densemla.backends.cpu import native

if sys.argv[1] == "torch":
    native._library = None
dtype = getattr(torch, sys.argv[2])

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

def step(tokens, heads):
    pages = tokens // 64
    cache = torch.randn(pages, 64, 576).to(dtype)
    q = torch.randn(1, heads, 576).to(dtype)
    table = torch.randperm(pages).to(torch.int32)[None]
    return q, cache, table, torch.tensor([tokens], dtype=torch.int32)

# Threads and libraries come in with a small decode first; only the large one is measured.
densemla.decode(*step(128, 1), sm_scale=0.07, single_split_chunks=0, partial_dtype=torch.float32)
large = step(32768, 96)
cache_bytes = large[1].nbytes
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
densemla.decode(*large, sm_scale=0.07, single_split_chunks=0, partial_dtype=torch.float32)
print(json.dumps({"extra": status("VmHWM") - before, "cache": cache_bytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak memory")
@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_extra_memory_at_32k_tokens_and_96_heads(kernel: str, dtype: str) -> None:
    """At most 64 MiB: scratch, workspace and results together. The float32 cache alone has 72 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kernel, dtype], capture_output=True, text=True, check=True, timeout=120
    )
    measured = json.loads(done.stdout)
    assert 0 < measured["extra"] < 64 << 20, measured
