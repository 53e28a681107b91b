"""The checks of a caller's input that more than one module makes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import torch

from .errors import ContractError

_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def is_int(value: object, low: int, high: float = math.inf) -> TypeGuard[int]:
    """Whether ``value`` is an int, and no bool, from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """``value`` must be an int from ``low`` to ``high`` (None: without end)."""
    if not is_int(value, low, math.inf if high is None else high):
        expected = f"an int of at least {low}" if high is None else f"an int in [{low}, {high}]"
        raise ContractError(name, expected, repr(value))


def check_scale(name: str, value: object) -> float:
    """A factor must be a number that float32 can hold, above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _SMALLEST <= value <= _LARGEST:
        raise ContractError(name, "a finite number above 0, in float32", repr(value))
    return float(value)


def check_result_file(path: Path | None) -> None:
    """Refuse a result file that could not be written, before the work rather than after it; None is none."""
    if path is None:
        return
    if path.is_dir():
        raise ContractError(str(path), "a file to write", "a directory")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ContractError(str(path), "a file in a folder that exists", f"no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ContractError(str(path), "a file that can be written", "no permission")


def check_dense(name: str, tensor: object) -> torch.Tensor:
    """``tensor``, which must be one with memory and strides."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise ContractError(name, "a dense tensor", getattr(tensor, "layout", type(tensor).__name__))
    if tensor.is_nested:
        # Its layout is strided too, but it has no sizes to ask for.
        raise ContractError(name, "a dense tensor", "a nested tensor")
    return tensor


def check_dims(name: str, tensor: object, dims: int) -> None:
    """``tensor`` must be dense and have this many dimensions."""
    shape = check_dense(name, tensor).shape
    if len(shape) != dims:
        raise ContractError(name, f"{dims} dimension{'s' if dims > 1 else ''}", list(shape))


def check_leading(name: str, tensor: torch.Tensor, limit: int, limit_name: str) -> int:
    """The tensor's first size, which must be at most ``limit``."""
    check_dense(name, tensor)
    if tensor.dim() == 0 or tensor.shape[0] > limit:
        raise ContractError(name, f"at most {limit_name} = {limit} rows", list(tensor.shape))
    return tensor.shape[0]


def check_tensor(
    name: str,
    value: object,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    unit_stride: bool = True,
) -> None:
    """``value`` must be a dense tensor of this dtype, shape and device, and plain memory to a kernel."""
    tensor = check_dense(name, value)
    if tensor.dtype is not dtype:
        raise ContractError(name, f"dtype {dtype}", tensor.dtype)
    if tuple(tensor.shape) != shape:
        raise ContractError(name, f"shape {list(shape)}", list(tensor.shape))
    if not same_device(tensor.device, device):
        raise ContractError(name, f"device {device}", tensor.device)
    if tensor.is_neg():
        # A view that negates when it is read: kernels read the memory.
        raise ContractError(name, "a tensor without a pending negation (see torch.resolve_neg)", "a negated view")
    if unit_stride and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ContractError(name, "a last dimension of stride 1", f"strides {tensor.stride()}")


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a view in which two elements share memory: the second write would hide the first."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise ContractError(name, "elements that do not overlap", f"strides {tensor.stride()}")
            reach += stride * (size - 1)


def check_values(name: str, values: torch.Tensor, low: int, high: int, expected: str) -> None:
    """In host memory every element must be from ``low`` to ``high``; on a GPU, looking would wait for it."""
    if values.device.type != "cpu" or not values.numel():
        return
    least, most = (int(bound) for bound in values.aminmax())
    if least < low or most > high:
        raise ContractError(name, expected, least if least < low else most)


def check_apart(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse a tensor to be ``written`` in the memory of another. Only where both fill their memory whole: views may
    interleave without touching."""
    whole = {
        name: (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for name, tensor in {**written, **read}.items()
        if tensor is not None and tensor.numel() and tensor.is_contiguous()
    }
    for name in written:
        begin, end = whole.get(name, (0, 0))
        for other, (other_begin, other_end) in whole.items():
            if other != name and begin < other_end and other_begin < end:
                raise ContractError(name, f"memory of its own, apart from {other}", "memory that both use")


def same_device(device: torch.device, planned: torch.device) -> bool:
    """Whether a tensor's ``device`` is the ``planned`` one."""
    # "cuda" in the caps means whichever device is current.
    if planned.type == "cuda" and planned.index is None:
        return device.type == "cuda" and device.index == torch.cuda.current_device()
    return device == planned
