"""The Triton backend: one portable kernel pair for every CUDA GPU of compute capability 8.0 and above.

``forward`` scans the splits, ``merge`` joins them; tiles come from the device's own limits. Importing this
package imports neither Triton nor CUDA: that waits for caps that could run here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...splits import ceil_div
from .. import SPLIT_FEATURES, cuda
from .tiles import CONVERTED_Q, INTERPRETED, Device, Tiles, choose, computing_dtype, device_of

if TYPE_CHECKING:
    from ...binding import Binding
    from ...caps import Caps

_OLDEST_TRITON = (3, 6)
_OLDEST_CAPABILITY = (8, 0)
_WIDEST_RANK = 512
_MOST_ROWS = 1 << 24


class TritonBackend:
    name = "triton"
    features = SPLIT_FEATURES | {"graph_capture"}
    most_splits = 4096

    def refusal(self, caps: Caps) -> str | None:
        if (why := _device_refusal(caps)) is not None:
            return why
        if (why := _format_refusal(caps)) is not None:
            return why
        if (why := cuda.token_refusal(caps)) is not None:
            return why
        if caps.max_total_q * caps.num_q_heads > _MOST_ROWS:
            return f"it counts query rows in 32 bits: at most {_MOST_ROWS}, queries times heads"
        if caps.kv_lora_rank > _WIDEST_RANK or caps.qk_rope_head_dim > _WIDEST_RANK:
            return f"it holds at most {_WIDEST_RANK} latent and {_WIDEST_RANK} rope columns"
        device = _device(caps)
        if choose(caps, device) is None:
            return f"no tile fits the {device.shared_bytes} bytes of shared memory of a block on {caps.device}"
        return None

    def occupancy(self, caps: Caps) -> tuple[int, int]:
        device, tiles = _device(caps), _tiles(caps)
        return caps.max_batch * ceil_div(cuda.rows_per_request(caps), tiles.block_h), device.multiprocessors

    def workspace(self, caps: Caps, num_splits: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        dtype = computing_dtype(caps)
        if caps.q_dtype is dtype:
            return {}
        return {CONVERTED_Q: ((caps.max_total_q, caps.num_q_heads, caps.head_dim), dtype)}

    def compile(self, binding: Binding) -> None:
        """Build, load and warm the kernels of this binding by running them once."""
        self.run(binding)
        if binding.q.is_cuda:
            torch.cuda.synchronize(binding.q.device)

    def run(self, binding: Binding) -> None:
        from .launch import launch  # noqa: PLC0415  # Triton is imported when it is needed

        caps = binding.plan.caps
        if not binding.q.is_cuda:
            binding.host_lengths()
            launch(binding, _tiles(caps), INTERPRETED)
            return
        with torch.cuda.device(binding.q.device):
            launch(binding, _tiles(caps), _device(caps))


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device(caps: Caps) -> Device:
    return device_of(caps.device) if caps.device.type == "cuda" else INTERPRETED


def _tiles(caps: Caps) -> Tiles:
    tiles = choose(caps, _device(caps))
    assert tiles is not None, "refused when the plan was made"
    return tiles


def _device_refusal(caps: Caps) -> str | None:
    if caps.device.type == "cpu" and caps.backend == "triton" and _interpreting():
        return None if _triton_found() else _NO_TRITON
    if (why := cuda.device_refusal(caps)) is not None:
        return why
    if not _triton_found():
        return _NO_TRITON
    from .launch import version  # noqa: PLC0415  # Triton is imported when it is needed

    if version() < _OLDEST_TRITON:
        return f"it needs Triton {_OLDEST_TRITON[0]}.{_OLDEST_TRITON[1]} or later, not {'.'.join(map(str, version()))}"
    capability = device_of(caps.device).capability
    if capability < _OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0 or higher, {caps.device} has {capability[0]}.{capability[1]}"
    return None


_NO_TRITON = "the package triton is not installed: pip install 'triton>=3.6'"


def _triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None


def _format_refusal(caps: Caps) -> str | None:
    fmt = caps.kv_format
    if caps.q_dtype is torch.float32 or fmt.dtype is torch.float32:
        return "it multiplies in bf16 or float16: float32 queries and caches would lose digits"
    if caps.q_dtype is torch.float16 and fmt.dtype is torch.bfloat16:
        return "float16 queries over a bf16 cache would have to be rounded to bf16"
    return None


BACKEND = TritonBackend()
