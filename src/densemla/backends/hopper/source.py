"""The CUDA C++ text of a kernel variant: the shared .cu file behind what depends on the variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import ClassVar, Protocol

from ...splits import ceil_div

SHARED_MEMORY = 227 * 1024
"""Bytes that one block may use on compute capability 9.0."""

_BOX_BYTES = 64 * 128
"""Of a ring's slot for bf16, half of it for fp8."""

_MOST_SLOTS = 24
_MOST_FP8_SLOTS = 40
_MOST_EARLY = 4
_REGISTERS = 65536
_FEED_REGISTERS = 24


class DecodeVariant(Protocol):
    """What a decode kernel is compiled for."""

    @property
    def blocks(self) -> int: ...  # of a cluster, which decodes so many tiles
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    def source(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Formats:
    """Types that a decode kernel is compiled for; what is not fp8 is bf16."""

    partial_f32: bool = False
    q_fp8: bool = False
    kv_fp8: bool = False

    def defines(self) -> dict[str, int]:
        return {"PARTIAL_F32": int(self.partial_f32), "Q_FP8": int(self.q_fp8), "KV_FP8": int(self.kv_fp8)}


@dataclass(frozen=True, slots=True)
class SwappedVariant:
    """16 to 48 query rows a block, as columns of its products: decode_swapped.cu."""

    tile_rows: int
    """Query rows of a tile: a multiple of 8, 16 to 64."""
    formats: Formats
    scorers: int = 1
    """Warpgroups that do scores and softmax, 1 or 2."""
    paired: bool = False
    """Whether the blocks of two neighbouring tiles load the cache together, as a cluster."""

    @property
    def blocks(self) -> int:
        return 1 + self.paired

    @property
    def threads(self) -> int:
        return 128 * (3 + self.scorers)

    @property
    def p_buffers(self) -> int:
        return 2 if self.tile_rows < 48 or self.scorers > 1 or self.formats.kv_fp8 else 1

    @property
    def slots(self) -> int:
        slots = min((SHARED_MEMORY - self._misc_bytes - self._tile_bytes) // self._slot_bytes, self._most_slots)
        return slots // self.blocks * self.blocks

    @property
    def shared_bytes(self) -> int:
        return self._tile_bytes + self.slots * self._slot_bytes + self._misc_bytes

    @property
    def _slot_bytes(self) -> int:
        return _BOX_BYTES // (1 + self.formats.kv_fp8)

    @property
    def _most_slots(self) -> int:
        return _MOST_FP8_SLOTS if self.formats.kv_fp8 else _MOST_SLOTS

    @property
    def _tile_bytes(self) -> int:
        """The query tile and the buffers of softmax weights."""
        return self.tile_rows * 128 * (9 + self.p_buffers)

    @property
    def _misc_bytes(self) -> int:
        """``struct Shared`` of decode_swapped.cu, which asserts that it fits."""
        barriers = 16 * self._most_slots
        reduction = (512 * ceil_div(self.tile_rows, 32) + 32) * (self.scorers - 1)
        of_row = 48 + 4 * self.p_buffers + 4 * self.formats.kv_fp8
        rows = self.tile_rows * of_row + ceil_div(self.tile_rows, 32) * 1024
        return 168 + barriers + rows + reduction

    @property
    def accumulate_registers(self) -> int:
        """Of a thread that holds 4 x 64 x tile_rows / 128 accumulators, and the operands of two fp8 boxes."""
        if self.formats.kv_fp8:
            return 2 * self.tile_rows + 64
        return max(2 * self.tile_rows + (40 if self.scorers == 1 else 32), 128)

    def source(self) -> str:
        sizes = {
            "TILE_N": self.tile_rows,
            "SCORERS": self.scorers,
            "PAIRED": int(self.paired),
            "SLOTS": self.slots,
            "MOST_EARLY": _MOST_EARLY if self.scorers == 1 and not self.formats.kv_fp8 else 0,
            "P_BUFFERS": self.p_buffers,
            "MISC_BYTES": self._misc_bytes,
            **self.formats.defines(),
        }
        if self.formats.kv_fp8:
            names = ("mma_scores", "mma_values")
            products = tuple(_register_mma(name, self.tile_rows, element="f16") for name in names)
        else:
            products = (_mma("mma_scores", self.tile_rows), _mma("mma_values", self.tile_rows, transposed=True))
        operands = "swapped_fp8.cu" if self.formats.kv_fp8 else "swapped_bf16.cu"
        files = ("swapped_ring.cu", operands, "decode_swapped.cu")
        return _decode_source(sizes, (*self._register_shares(), *products), files)

    def _register_shares(self) -> tuple[str, str, str]:
        """Registers for the warpgroups that accumulate, those that score, and the one that loads."""
        largest, launched = self.accumulate_registers, _REGISTERS // self.threads // 8 * 8
        if self.tile_rows < 48 and not self.formats.kv_fp8:
            return (_registers("grow_registers"), _registers("score_registers"), _registers("shrink_registers"))
        rest = launched * (3 + self.scorers) - _FEED_REGISTERS - 2 * largest
        score = min(rest // self.scorers, 240) // 8 * 8
        return (
            _registers("grow_registers", "inc" if largest > launched else "dec", largest),
            _registers("score_registers", "inc" if score > launched else "dec", score),
            _registers("shrink_registers", "dec", _FEED_REGISTERS),
        )


@dataclass(frozen=True, slots=True)
class RowsVariant:
    """64 query rows a block, which are rows of its products too; of bf16 caches: decode_rows.cu."""

    formats: Formats

    blocks: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        return 384

    @property
    def shared_bytes(self) -> int:
        return (8 + 2 * 9 + 2) * _BOX_BYTES + self._misc_bytes

    @property
    def _misc_bytes(self) -> int:
        """``struct Shared`` of decode_rows.cu, which asserts that it fits."""
        return 2048 + 256 * self.formats.q_fp8

    def source(self) -> str:
        sizes = {
            "TILE_N": 64,
            "PAIRED": 0,
            "MISC_BYTES": self._misc_bytes,
            **self.formats.defines(),
        }
        products = (
            _mma("mma_scores", 64),
            _register_mma("mma_rope", 64),
            _mma("mma_values", 256, b_transposed=True),
            _register_mma("mma_own_values", 256, b_transposed=True),
        )
        compute = (3 * 168 - _FEED_REGISTERS) // 16 * 8
        registers = (
            _registers("grow_registers", "inc", compute),
            _registers("shrink_registers", "dec", _FEED_REGISTERS),
        )
        return _decode_source(sizes, (*registers, *products), ("decode_rows.cu",))


def _decode_source(sizes: Mapping[str, int], functions: Sequence[str], files: Sequence[str]) -> str:
    """``functions``: those that depend on the sizes of the products."""
    defines = (f"#define {key} {value}" for key, value in sizes.items())
    return "\n".join((*defines, _file("primitives.cu"), *functions, *map(_file, ("tile.cu", *files))))


@dataclass(frozen=True, slots=True)
class MergeVariant:
    """What the merge kernel is compiled for."""

    unit_warps: int
    """Warps that share half a row: 1 or 8."""
    partial_f32: bool

    def source(self) -> str:
        return "\n".join(
            (
                f"#define UNIT_WARPS {self.unit_warps}",
                f"#define PARTIAL_F32 {int(self.partial_f32)}",
                _file("primitives.cu"),
                _file("merge.cu"),
            )
        )


@lru_cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _registers(name: str, direction: str = "", count: int | None = None) -> str:
    body = "" if count is None else f'asm volatile("setmaxnreg.{direction}.sync.aligned.u32 {count};");'
    return f"__device__ __forceinline__ void {name}() {{ {body} }}"


def _mma(name: str, columns: int, *, transposed: bool = False, b_transposed: bool = False) -> str:
    """A wrapper of one wgmma, [64, 16] x [16, columns]; a transposed A or B has its rows or columns contiguous."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    return (
        f"__device__ __forceinline__ void {name}"
        f"(float (&d)[{count}], unsigned long long a, unsigned long long b, int keep) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n{instruction} '
        f'{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, {int(transposed)}, {int(b_transposed)};\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(keep));\n}}'
    )


def _register_mma(name: str, columns: int, *, b_transposed: bool = False, element: str = "bf16") -> str:
    """The same with A in registers."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}"
    return (
        f"__device__ __forceinline__ void {name}"
        f"(float (&d)[{count}], const unsigned int (&a)[4], unsigned long long b, int keep) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n{instruction} '
        f'{{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1, {int(b_transposed)};\\n}}"\n'
        f'        : {outputs} : {inputs}, "l"(b), "r"(keep));\n}}'
    )
