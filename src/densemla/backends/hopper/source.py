"""The CUDA C++ text of a kernel variant: the shared .cu file behind what depends on the variant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from ...splits import ceil_div

SHARED_MEMORY = 227 * 1024
"""Bytes that one block may use on compute capability 9.0."""

_SLOT_BYTES = 64 * 128
_MOST_SLOTS = 24
_MOST_EARLY = 4
_REGISTERS = 512  # per lane and subpartition, over all warps
_FEED_REGISTERS = 32


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """What the decode kernel is compiled for."""

    tile_rows: int
    """Query rows of a block: a multiple of 8, 16 to 64."""
    cluster: int
    """Blocks that share every load of the cache: 1 or 2."""
    partial_f32: bool

    @property
    def threads(self) -> int:
        return 512

    @property
    def p_buffers(self) -> int:
        return 2 if self.tile_rows < 48 else 1

    @property
    def slots(self) -> int:
        return min((SHARED_MEMORY - self._misc_bytes - self._tile_bytes) // _SLOT_BYTES, _MOST_SLOTS)

    @property
    def shared_bytes(self) -> int:
        return self._tile_bytes + self.slots * _SLOT_BYTES + self._misc_bytes

    @property
    def _tile_bytes(self) -> int:
        """The query tile and the buffers of softmax weights."""
        return self.tile_rows * 128 * (9 + self.p_buffers)

    @property
    def _misc_bytes(self) -> int:
        """``struct Shared`` of decode.cu, which asserts that it fits."""
        return 512 + self.tile_rows * (48 + 4 * self.p_buffers) + ceil_div(self.tile_rows, 32) * 1024

    @property
    def accumulate_registers(self) -> int:
        """Of a thread that holds 4 x 64 x tile_rows / 128 accumulators."""
        return max(2 * self.tile_rows + 40, 128)

    def source(self) -> str:
        accumulate = self.accumulate_registers
        score = _REGISTERS - _FEED_REGISTERS - 2 * accumulate
        reallocate = accumulate > 128
        return "\n".join(
            (
                f"#define TILE_N {self.tile_rows}",
                f"#define SLOTS {self.slots}",
                f"#define CLUSTER {self.cluster}",
                f"#define MOST_EARLY {_MOST_EARLY}",
                f"#define P_BUFFERS {self.p_buffers}",
                f"#define MISC_BYTES {self._misc_bytes}",
                f"#define PARTIAL_F32 {int(self.partial_f32)}",
                _registers("grow_registers", "inc", accumulate if reallocate else None),
                _registers("score_registers", "inc" if score > 128 else "dec", score if reallocate else None),
                _registers("shrink_registers", "dec", _FEED_REGISTERS if reallocate else None),
                _mma("mma_scores", self.tile_rows, transposed=False),
                _mma("mma_values", self.tile_rows, transposed=True),
                _file("decode.cu"),
            )
        )


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
                _file("merge.cu"),
            )
        )


@lru_cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _registers(name: str, direction: str, count: int | None) -> str:
    body = "" if count is None else f'asm volatile("setmaxnreg.{direction}.sync.aligned.u32 {count};");'
    return f"__device__ __forceinline__ void {name}() {{ {body} }}"


def _mma(name: str, columns: int, *, transposed: bool) -> str:
    """A wrapper of one wgmma, [64, 16] x [16, columns]; a transposed A has its 64 rows contiguous."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    return (
        f"__device__ __forceinline__ void {name}"
        f"(float (&d)[{count}], unsigned long long a, unsigned long long b, int keep) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n{instruction} '
        f'{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, {int(transposed)}, 0;\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(keep));\n}}'
    )
