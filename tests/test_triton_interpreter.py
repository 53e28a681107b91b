"""The Triton kernels without a GPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import densemla
from interpret_triton_decode import CASES

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PROCESSES = 2


@pytest.fixture(scope="module")
def faults() -> dict[str, str | None]:
    """What went wrong in each case. Triton decides at import whether it interprets, so in other processes."""
    script = Path(__file__).parent / "interpret_triton_decode.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    names = list(CASES)
    running = [
        subprocess.Popen(
            [sys.executable, str(script), *names[i::PROCESSES]],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    lines = [line for process in running for line in process.communicate(timeout=300)[0].splitlines()]
    return {result["case"]: result["fault"] for result in map(json.loads, lines)}


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_case(faults: dict[str, str | None], case: str) -> None:
    assert case in faults, "the process ended before this case"
    assert faults[case] is None, faults[case]


def test_auto_does_not_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert densemla.plan(densemla.Caps(num_q_heads=16)).backend == "cpu"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, "would lose digits"),
        ({"q_dtype": torch.float16}, "rounded to bf16"),
        ({"max_cache_tokens": (1 << 30) + 1}, "counts tokens in 32 bits"),
        ({"max_total_q": 1 << 22}, "counts query rows in 32 bits"),
        ({"kv_lora_rank": 1024}, "at most 512 latent"),
    ],
)
@needs_triton
def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, options: dict[str, object], reason: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(densemla.ContractError, match=reason):
        densemla.plan(densemla.Caps(**{"num_q_heads": 16, "backend": "triton", **options}))


def test_a_device_that_is_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(densemla.ContractError, match="needs a CUDA device, not cpu"):
        densemla.plan(densemla.Caps(num_q_heads=16, backend="triton"))
