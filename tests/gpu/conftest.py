"""The GPU contract: every test runs for each backend that can run on the device here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import densemla

sys.path.insert(0, str(Path(__file__).parents[1]))

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def _gpu_backends() -> list[str]:
    def runs(name: str) -> bool:
        caps = densemla.Caps(device="cuda", num_q_heads=16, backend=name)
        try:
            return densemla.plan(caps).backend == name
        except densemla.ContractError:
            return False

    return [name for name in densemla.backend_names() if torch.cuda.is_available() and runs(name)]


@pytest.fixture(params=_gpu_backends())
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
