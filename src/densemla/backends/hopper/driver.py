"""The CUDA driver and its run-time compiler through ctypes: what torch does not offer of them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

ARCHITECTURE = "sm_90a"
"""The kernels use wgmma and setmaxnreg, which exist in this target alone."""

_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DATA_TYPES = {1: 0, 2: 9}  # CU_TENSOR_MAP_DATA_TYPE_UINT8 and _BFLOAT16, by the bytes of an element
_SWIZZLES = {1: 2, 2: 3}  # CU_TENSOR_MAP_SWIZZLE_64B and _128B, likewise: of rows of 64 elements
_L2_PROMOTION_NONE = 0  # CU_TENSOR_MAP_L2_PROMOTION_*
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """A call of the driver or the run-time compiler failed."""


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{name} failed with {status}: {(text.value or b'unknown').decode()}")


@lru_cache
def find_compiler() -> ctypes.CDLL | None:
    """NVRTC, from the loader's path or from the packages that come with torch; None when there is none."""
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    for root in sys.path:
        for name in names:
            for path in sorted(Path(root).glob(f"nvidia/*/lib/{name}")):
                return ctypes.CDLL(str(path))
    return None


def compile_cubin(source: str, name: str) -> bytes:
    """Machine code of CUDA C++ ``source`` for :data:`ARCHITECTURE`.

    Raises:
        CudaError: there is no NVRTC, or the source does not compile; the message holds its log.
    """
    nvrtc = find_compiler()
    if nvrtc is None:
        raise CudaError("libnvrtc was not found: install the nvidia-cuda-nvrtc package of torch's CUDA version")
    program = ctypes.c_void_p()

    def call(function: str, *arguments: object) -> None:
        status = getattr(nvrtc, function)(*arguments)
        if status:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{function} of {name} failed with {status}\n{log.value.decode(errors='replace')}")

    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    try:
        options = (f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17")
        call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """A loaded kernel of the current device's context."""

    def __init__(self, cubin: bytes, name: str, *, threads: int, shared_bytes: int = 0) -> None:
        module = ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._function = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        if shared_bytes:
            _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        self._threads = threads
        self._shared_bytes = shared_bytes

    def launch(self, blocks: int, stream: int, parameters: Sequence[object], *, early: bool = False) -> None:
        """Launch on ``stream``; ``early`` lets it start while the kernel before it still runs.

        Args:
            parameters: ctypes structures, one per kernel parameter.
        """
        attribute = _LaunchAttribute(_PROGRAMMATIC_SERIALIZATION)
        attribute.value[0] = 1
        config = _LaunchConfig(
            (blocks, 1, 1),
            (self._threads, 1, 1),
            self._shared_bytes,
            stream,
            ctypes.pointer(attribute) if early else None,
            int(early),
        )
        addresses = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(each) for each in parameters))  # type: ignore[arg-type]
        _call("cuLaunchKernelEx", ctypes.byref(config), self._function, addresses, None)


def tensor_map(
    data: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], element_bytes: int
) -> ctypes.Array[ctypes.c_char]:
    """A TMA descriptor over bf16 elements or bytes; outside the sizes it reads 0.

    Args:
        data: device address, a multiple of 16.
        sizes: elements per dimension, innermost first.
        strides: bytes per step of every dimension but the innermost, multiples of 16.
        box: elements of one load, innermost first: 64, so rows of 128 or 64 bytes, which are swizzled.
        element_bytes: 2 for bf16, 1 for bytes.
    """
    rank = len(sizes)
    room = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    offset = -ctypes.addressof(room) % _TENSOR_MAP_ALIGNMENT
    encoded = (ctypes.c_char * _TENSOR_MAP_BYTES).from_buffer(room, offset)
    _call(
        "cuTensorMapEncodeTiled",
        encoded,
        _DATA_TYPES[element_bytes],
        rank,
        ctypes.c_void_p(data),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,
        _SWIZZLES[element_bytes],
        _L2_PROMOTION_NONE,
        0,
    )
    return encoded
