"""Tile sizes from what the device has: its shared memory and its kind of matrix unit.

The formula counts what the compiled kernel keeps in shared memory: the query tile, the cache blocks in
flight, the block in its computing type where it is stored in another, and the weights. The compile tests
hold it to what the compiler really asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...caps import Caps
from ...splits import ceil_div
from ..cuda import rows_per_request

_MOST_STAGES = 5
"""Deeper pipelines than four blocks in flight bring nothing."""

CONVERTED_Q = "converted_q"
"""Scratch for queries of another type than the products'."""

NATIVE_FP8 = (8, 9)
"""First capability that converts e4m3 in hardware."""

_SLACK = 1024
"""Barriers, and what alignment costs."""


@dataclass(frozen=True, slots=True)
class Device:
    """What tile sizes depend on.

    Attributes:
        capability: (major, minor).
        shared_bytes: shared memory that one block may ask for.
        multiprocessors: blocks that run at once, one each.
    """

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int


INTERPRETED = Device((8, 0), 99 * 1024, 1)
"""What Triton's interpreter stands in for."""


def device_of(device: torch.device) -> Device:
    """A CUDA device's limits; without an index, those of the current device."""
    return _device_at(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=16)
def _device_at(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        (properties.major, properties.minor),
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        properties.multi_processor_count,
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one program.

    Attributes:
        block_h: query rows (queries times heads).
        block_n: cache rows in one block; divides a chunk.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        tile_loads: whole blocks may be fetched by the tensor copy engine, where the cache allows it.
        shared_bytes: shared memory that the kernel asks for, at most.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    tile_loads: bool
    shared_bytes: int


def padded(width: int) -> int:
    """Columns of a tile that holds ``width``: a power of two, at least what a matrix unit takes."""
    return max(16, 1 << (width - 1).bit_length())


def converted(caps: Caps) -> bool:
    """Whether cache rows are stored in another type than they are multiplied in."""
    return caps.kv_format.dtype.itemsize == 1


def computing_dtype(caps: Caps) -> torch.dtype:
    """What both products multiply in: the cache's type, or for fp8 caches one that holds every value."""
    if caps.kv_format.packed:
        # Value times scale needs more digits than bf16 has; latents are normalised, far below 65504.
        return torch.float16
    dtype = caps.q_dtype if caps.kv_format.scaled else caps.kv_format.dtype
    return torch.float16 if dtype is torch.float16 else torch.bfloat16


@lru_cache(maxsize=256)
def choose(caps: Caps, device: Device) -> Tiles | None:
    """The largest tiles that fit; None when none does."""
    # Warpgroup products take tiles of 64 rows; below, they would mostly multiply padding. Elsewhere (10.x
    # too, whose own matrix unit was never measured) warps multiply tiles of 16.
    wide = device.capability[0] == 9 and rows_per_request(caps) > 16
    return (_fit(caps, device, wide=True) if wide else None) or _fit(caps, device, wide=False)


def _fit(caps: Caps, device: Device, *, wide: bool) -> Tiles | None:
    block_h = 64 if wide else 16
    for least_stages in (2,) if wide else (3, 2):
        for block_n in _block_sizes(caps, device, wide):
            for stages in range(_most_stages(caps), least_stages - 1, -1):
                shared = _shared_bytes(caps, block_h, block_n, stages, wide)
                if shared <= device.shared_bytes:
                    return Tiles(
                        block_h,
                        block_n,
                        num_warps=8 if padded(caps.kv_lora_rank) > 128 else 4,
                        num_stages=stages,
                        tile_loads=device.capability[0] == 9 and not converted(caps),
                        shared_bytes=shared,
                    )
    return None


def _most_stages(caps: Caps) -> int:
    # Packed rows are three loads, whose addresses take the registers that a deeper pipeline would need.
    return 3 if caps.kv_format.packed else _MOST_STAGES


def _block_sizes(caps: Caps, device: Device, wide: bool) -> tuple[int, ...]:
    """Cache rows in a block, largest first. Rows are converted in registers, which must hold them too."""
    if caps.kv_format.packed:
        return (32, 16) if device.capability >= NATIVE_FP8 else (16,)
    return (64, 32, 16) if wide or not converted(caps) else (32, 16)


def _shared_bytes(caps: Caps, block_h: int, block_n: int, stages: int, wide: bool) -> int:
    columns = padded(caps.kv_lora_rank) + (padded(caps.qk_rope_head_dim) if caps.qk_rope_head_dim else 0)
    block = block_n * columns * 2
    # Warpgroup products read a block while the next arrives, so it must outlive its own turn.
    in_flight = stages if wide and not converted(caps) else stages - 1
    total = block_h * columns * 2 + block_h * block_n * 2 + _SLACK
    if converted(caps):
        return total + in_flight * block_n * ceil_div(caps.kv_format.row_bytes, 16) * 16 + block
    return total + in_flight * block
