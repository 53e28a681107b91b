"""The GPU contract: every test runs for each backend that can run on the device here, of Hopper's for each tile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import densemla
from densemla.backends import hopper

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


def _contestants() -> list[str]:
    """The backends, and ``hopper-N``: every plan with tiles of N rows, which its own choice keeps for long caches."""
    found = _gpu_backends()
    return found + [f"hopper-{rows}" for rows in sorted({*hopper.TILES, *hopper.FP8_TILES}) if "hopper" in found]


@pytest.fixture(params=_contestants())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, rows = request.param.partition("-")

    def tile_rows(caps: densemla.Caps) -> int:
        if int(rows) not in hopper.tiles(caps):
            pytest.skip(f"no tiles of {rows} rows for a cache of {caps.kv_dtype}")
        return int(rows)

    if rows:
        monkeypatch.setattr(hopper, "tile_rows", tile_rows)
    return name
