"""The Hopper kernels on a CPU: the CUDA C++ itself, over emulated threads, tensor cores and TMA (emulator.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

import densemla
from densemla.backends import hopper
from densemla.backends.hopper import source
from densemla.backends.hopper.source import DecodeVariant, Formats, MergeVariant

COMPILER = shutil.which("g++") or shutil.which("clang++")

_ENTRY = """
static {parameters}
static void run() {{ {call}; }}
extern "C" const char* emulate(unsigned blocks, unsigned cluster, unsigned threads, unsigned long long seed,
                               const void* const* arguments) {{
    {unpack}
    emulated::entry = run;
    emulated::blocks.x = blocks;
    emulated::cluster_blocks = cluster;
    emulated::threads.x = threads;
    emulated::chance.seed(seed);
    emulated::failure[0] = 0;
    for (unsigned first = 0; first < blocks && !emulated::failure[0]; first += cluster) emulated::run_cluster(first);
    return emulated::failure;
}}
"""
_DECODE = _ENTRY.format(
    parameters="const TensorMap* map; static const Params* params;",
    call="decode(*map, *params)",
    unpack="map = (const TensorMap*)arguments[0], params = (const Params*)arguments[1];",
)
_MERGE = _ENTRY.format(
    parameters="const Params* params;", call="merge(*params)", unpack="params = (const Params*)arguments[0];"
)


def _file(name: str) -> str:
    """The project's own text; of primitives.cu only what is not PTX."""
    text = _project_file(name)
    if name != "primitives.cu":
        return text
    kept = (part for part in text.split("\n\n") if "asm" not in part or '"+r"(address)' in part)
    return "\n\n".join(part for part in kept if "extern" not in part)


_project_file = source._file


def _mma(name: str, columns: int, *, transposed: bool = False, b_transposed: bool = False) -> str:
    return (
        f"inline void {name}(float (&d)[{columns // 2}], u64 a, u64 b, int keep) "
        f"{{ emulated_mma<{columns}, {int(transposed)}, {int(b_transposed)}>(d, a, b, keep); }}"
    )


def _register_mma(name: str, columns: int, *, b_transposed: bool = False, element: str = "bf16") -> str:
    return (
        f"inline void {name}(float (&d)[{columns // 2}], const u32 (&a)[4], u64 b, int keep) "
        f"{{ emulated_mma<{columns}, {int(b_transposed)}, {str(element == 'f16').lower()}>(d, a, b, keep); }}"
    )


def emulated_source(variant: DecodeVariant | MergeVariant) -> str:
    with (
        patch.object(source, "_file", _file),
        patch.object(source, "_mma", _mma),
        patch.object(source, "_register_mma", _register_mma),
        patch.object(source, "_registers", lambda name, *_: f"inline void {name}() {{}}"),
    ):
        text = variant.source()
    merges = isinstance(variant, MergeVariant)
    storage = "static" if merges else ""
    return f'#define SHARED_STORAGE {storage}\n#include "emulator.h"\n{text}{_MERGE if merges else _DECODE}'


def build(text: str, path: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    cpp = path.with_suffix(".cpp")
    cpp.write_text(text)
    # Fortified, longjmp refuses to change stacks.
    options = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{Path(__file__).parent}"]
    command = [COMPILER, *options, "-shared", "-fPIC", "-o", str(path), str(cpp)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(path))
    library.emulate.restype = ctypes.c_char_p
    unsigned = ctypes.c_uint
    library.emulate.argtypes = (unsigned, unsigned, unsigned, ctypes.c_ulonglong, ctypes.POINTER(ctypes.c_void_p))
    return library


class EmulatedKernel:
    """What the backend launches in place of a :class:`densemla.backends.hopper.driver.Kernel`."""

    def __init__(self, library: ctypes.CDLL, threads: int, seed: int, cluster: int = 1) -> None:
        self._library, self._threads, self._seed, self._cluster = library, threads, seed, cluster

    def launch(self, blocks: int, stream: int, parameters: Sequence[object], *, early: bool = False) -> None:
        addresses = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(each) for each in parameters))  # type: ignore[arg-type]
        failure = self._library.emulate(blocks, self._cluster, self._threads, self._seed, addresses)
        if failure:
            raise AssertionError(failure.decode())


def tensor_map(
    data: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], element_bytes: int
) -> ctypes.Array[ctypes.c_char]:
    """What emulator.h reads as a descriptor: address, sizes, strides, sizes of the box, bytes of an element."""
    words = (ctypes.c_uint64 * 16)(data, *sizes, *strides, *box, element_bytes)
    return (ctypes.c_char * 128).from_buffer(words)


class Kernels:
    """Emulated kernels, built once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[DecodeVariant | MergeVariant, ctypes.CDLL] = {}

    def _library(self, variant: DecodeVariant | MergeVariant) -> ctypes.CDLL:
        if variant not in self._built:
            self._built[variant] = build(emulated_source(variant), self._folder / f"kernel{len(self._built)}.so")
        return self._built[variant]

    @contextmanager
    def replacing(self, tile: int, seed: int) -> Iterator[None]:
        """Within it, the Hopper backend decodes on the CPU with tiles of so many rows."""

        def decode(rows: int, formats: Formats, device: object) -> EmulatedKernel:
            variant = hopper.decode_variant(rows, formats)
            return EmulatedKernel(self._library(variant), variant.threads, seed, variant.blocks)

        def merge(variant: MergeVariant, device: object) -> EmulatedKernel:
            return EmulatedKernel(self._library(variant), hopper._MERGE_THREADS, seed)

        with (
            patch.object(hopper, "_decode_kernel", decode),
            patch.object(hopper, "_merge_kernel", merge),
            patch.object(hopper, "tensor_map", tensor_map),
            patch.object(hopper, "tile_rows", lambda caps: tile),
            patch.object(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)),
        ):
            yield


def decode(kernels: Kernels, binding: densemla.Binding, tile: int, seed: int) -> None:
    """Run a binding of the CPU through the Hopper backend."""
    with kernels.replacing(tile, seed):
        hopper._launch(binding)
