"""The CPU backend: the compiled decode where it could be built, else the same splits in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .. import SPLIT_FEATURES
from . import native, torch_blocks

if TYPE_CHECKING:
    from ...binding import Binding
    from ...caps import Caps

_SPLITS = 32
"""Default splits. The CPU gains nothing from more, but a request is then cut as on a busy GPU."""


class CpuBackend:
    name = "cpu"
    features = SPLIT_FEATURES
    most_splits = 4096

    def refusal(self, caps: Caps) -> str | None:
        return None if caps.device.type == "cpu" else f"it runs on the CPU, not on {caps.device}"

    def occupancy(self, caps: Caps) -> tuple[int, int]:
        return 1, _SPLITS

    def workspace(self, caps: Caps, num_splits: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return native.workspace(caps) if native.can_run(caps) else torch_blocks.workspace(caps)

    def compile(self, binding: Binding) -> None:
        """Nothing to build: it was built with the package."""

    def run(self, binding: Binding) -> None:
        host = binding.host_lengths()
        if native.can_run(binding.plan.caps):
            native.run(binding)
        else:
            torch_blocks.run(binding, host)


BACKEND = CpuBackend()
