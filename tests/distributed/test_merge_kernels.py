"""The CUDA side of the merge, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_do_what_the_torch_code_does():
    # Triton decides at its import whether it interprets: a process of its own leaves other tests alone.
    script = Path(__file__).parent / "interpret_merge_kernels.py"
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "24 merges agree" in result.stdout
