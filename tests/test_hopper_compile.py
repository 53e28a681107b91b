"""The Hopper kernels without a GPU: every variant that a plan can ask for compiles for sm_90a as it was written.

Needs a CUDA compiler, nvcc or NVRTC; neither comes with a CPU build of torch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import densemla
from densemla.backends import hopper
from densemla.backends.hopper.driver import compile_cubin, find_compiler
from densemla.backends.hopper.source import SHARED_MEMORY, Formats, MergeVariant, SwappedVariant

NVCC = shutil.which("nvcc")
FORMATS = (
    Formats(),
    Formats(partial_f32=True),
    Formats(q_fp8=True),
    Formats(kv_fp8=True),
    Formats(partial_f32=True, q_fp8=True, kv_fp8=True),
)
TILES = [(rows, each) for each in FORMATS for rows in (hopper.FP8_TILES if each.kv_fp8 else hopper.TILES)]


def ptxas_report(source: str, tmp_path: Path) -> str:
    assert NVCC is not None
    (tmp_path / "kernel.cu").write_text(source)
    done = subprocess.run(
        [NVCC, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-std=c++17", "-Xptxas=-v", "-o", "kernel.cubin",
         "kernel.cu"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_clean(report: str) -> None:
    """No spills, and neither wgmma nor setmaxnreg given up by ptxas."""
    assert re.findall(r"(\d+) bytes spill (?:stores|loads)", report) == ["0", "0"], report
    assert "serialized" not in report, report
    assert "setmaxnreg" not in report, report
    assert "warning" not in report, report


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(("rows", "formats"), TILES)
def test_the_decode_kernel_compiles_without_spills_or_serialised_products(
    rows: int, formats: Formats, tmp_path: Path
) -> None:
    variant = hopper.decode_variant(rows, formats)
    assert_clean(ptxas_report(variant.source(), tmp_path))


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(("rows", "scorers", "paired"), [(16, 2, False), (48, 1, True), (48, 2, False), (48, 2, True)])
def test_so_do_the_kernels_that_await_measurement(rows: int, scorers: int, paired: bool, tmp_path: Path) -> None:
    variant = SwappedVariant(rows, Formats(), scorers, paired)
    assert variant.shared_bytes <= SHARED_MEMORY
    assert_clean(ptxas_report(variant.source(), tmp_path))


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("partial_f32", [False, True])
@pytest.mark.parametrize("unit_warps", [1, 8])
def test_the_merge_kernel_compiles_without_spills(unit_warps: int, partial_f32: bool, tmp_path: Path) -> None:
    assert_clean(ptxas_report(MergeVariant(unit_warps, partial_f32).source(), tmp_path))


@pytest.mark.skipif(find_compiler() is None, reason="needs NVRTC")
def test_nvrtc_builds_what_nvcc_builds() -> None:
    cubin = compile_cubin(hopper.decode_variant(16, Formats()).source(), "decode.cu")
    assert cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize(("rows", "formats"), TILES)
def test_a_block_fits_the_shared_memory(rows: int, formats: Formats) -> None:
    assert hopper.decode_variant(rows, formats).shared_bytes <= SHARED_MEMORY


def caps(**changes: object) -> densemla.Caps:
    return densemla.Caps(**{"num_q_heads": 96, "device": torch.device("cuda"), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"q_dtype": torch.float16, "kv_dtype": torch.float16}, "bf16"),
        ({"kv_dtype": "fp8_ds_mla"}, "bf16"),
        ({"output_dtype": torch.float32}, "bf16"),
        ({"kv_lora_rank": 256}, "kv_lora_rank"),
        ({"page_size": 1}, "page size"),
        ({"page_size": 48}, "page size"),
        ({"num_q_heads": 129}, "128 heads"),
        ({"max_cache_tokens": (1 << 30) + 1}, "tokens"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(changes: dict[str, object], word: str) -> None:
    why = hopper.unsupported(caps(**changes))
    assert why is not None
    assert word in why


def test_auto_leaves_fp8_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.cuda, "device_refusal", lambda caps: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "find_compiler", lambda: "here")
    for formats in ({"kv_dtype": torch.float8_e4m3fn}, {"q_dtype": torch.float8_e4m3fn}):
        assert "only when named" in (hopper.BACKEND.refusal(caps(**formats)) or "")
        assert hopper.BACKEND.refusal(caps(backend="hopper", **formats)) is None
    assert hopper.BACKEND.refusal(caps()) is None


def test_the_published_models_are_taken() -> None:
    for heads in (12, 16, 64, 96, 128):
        assert hopper.unsupported(caps(num_q_heads=heads)) is None


def test_rows_off_16_byte_boundaries_go_to_triton_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Triton:
        def __init__(self, why: str | None) -> None:
            self.why = why

        def refusal(self, caps: densemla.Caps) -> str | None:
            return self.why

    cache = torch.empty(3, 64, 577, dtype=torch.bfloat16)[..., :576]
    aligned = torch.empty(3, 96, 576, dtype=torch.bfloat16)
    plan = SimpleNamespace(caps=None)
    binding = SimpleNamespace(plan=plan, q=aligned, kv_cache=cache, output=aligned[..., :512])
    name = hopper._misaligned(binding)  # type: ignore[arg-type]
    assert name == "kv_cache"
    monkeypatch.setattr(hopper, "load", lambda _: Triton(None))
    assert isinstance(hopper._substitute(binding, name), Triton)  # type: ignore[arg-type]
    monkeypatch.setattr(hopper, "load", lambda _: Triton("not here"))
    with pytest.raises(densemla.ContractError, match="16-byte"):
        hopper._substitute(binding, name)  # type: ignore[arg-type]
    binding.kv_cache = torch.empty(3, 2, 64, 576, dtype=torch.bfloat16)[:, 1]
    assert hopper._misaligned(binding) is None  # type: ignore[arg-type]


def test_a_machine_without_a_gpu_is_told_so() -> None:
    backend = hopper.BACKEND
    assert "CUDA" in (backend.refusal(densemla.Caps(num_q_heads=96)) or "")


@pytest.mark.parametrize(("heads", "counts", "tile"), [(12, [8, 1, 0, 3], 96), (96, [1] * 5, 96), (7, [3, 3], 16)])
def test_the_grid_holds_every_tile_however_queries_are_shared_out(heads: int, counts: list[int], tile: int) -> None:
    needed = sum(-(-count * heads // tile) for count in counts)
    assert needed <= hopper.most_tiles(sum(counts), len(counts), heads, tile)


def test_the_grid_is_exact_for_whole_tiles() -> None:
    assert hopper.most_tiles(64, 64, 96, 96) == 64
    assert hopper.most_tiles(4, 1, 96, 96) == 4


def test_tiles_fit_the_rows_and_lengths_of_the_known_models() -> None:
    def fit(heads: int, queries: int = 1, batch: int = 64, tokens: int = 8192) -> int:
        return hopper.tile_rows(
            caps(num_q_heads=heads, max_total_q=queries * batch, max_batch=batch, max_cache_tokens=tokens)
        )

    assert fit(12) == fit(16) == 16
    assert fit(32) == 48
    assert fit(64) == fit(96) == fit(128) == fit(12, 8) == fit(16, 8) == 64
    assert fit(96, batch=1) == 48  # short: the tile with the shorter beginning and end
