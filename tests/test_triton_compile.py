"""The Triton kernels compiled for every supported capability, without a GPU.

What the compiler asks for must fit the device, and the main loop must keep its accumulators in registers.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import densemla
from densemla.backends.triton import BACKEND
from densemla.backends.triton.tiles import Device, choose

triton = pytest.importorskip("triton")

# Shared memory that one block may have (CUDA programming guide, technical specifications per capability).
DEVICES = {
    "8.0": Device((8, 0), 163 * 1024, 108),
    "8.6": Device((8, 6), 99 * 1024, 82),
    "8.9": Device((8, 9), 99 * 1024, 128),
    "9.0": Device((9, 0), 227 * 1024, 132),
    "10.0": Device((10, 0), 227 * 1024, 148),
    "12.0": Device((12, 0), 99 * 1024, 188),
    "12.1": Device((12, 1), 99 * 1024, 48),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "96 heads": {"num_q_heads": 96, "max_batch": 8, "max_total_q": 8},
    "12 heads, 4 queries, packed": {"num_q_heads": 12, "kv_dtype": "fp8_ds_mla", "max_batch": 2, "max_total_q": 8},
    "16 heads, float16, one-token pages": {
        "num_q_heads": 16,
        "q_dtype": torch.float16,
        "kv_dtype": torch.float16,
        "page_size": 1,
        "partial_dtype": torch.float32,
    },
    "128 heads, fp8": {"num_q_heads": 128, "kv_dtype": torch.float8_e4m3fn},
}

JOBS = [
    (device, variant)
    for device in DEVICES
    for variant in VARIANTS
    # The last two differ between devices by their limits and matrix units only.
    if device in ("8.6", "9.0") or variant in tuple(VARIANTS)[:2]
]


@dataclass(frozen=True)
class Compiled:
    shared_bytes: int
    planned_bytes: int
    main_loop: dict[str, int]


def binding_for(caps: densemla.Caps) -> densemla.Binding:
    """Any binding with these formats; its tensors only lend their types and strides."""
    plan = densemla.plan(caps)
    pages = 4 * max(1, 64 // caps.page_size)
    binding = densemla.bind(
        plan,
        scratch=plan.empty_scratch(),
        q=torch.empty(caps.max_total_q, caps.num_q_heads, caps.head_dim, dtype=caps.q_dtype),
        kv_cache=densemla.kv_cache.empty(pages, caps.page_size, caps.kv_dtype),
        output=torch.empty(caps.max_total_q, caps.num_q_heads, caps.kv_lora_rank, dtype=caps.output_dtype),
        lse=torch.empty(caps.max_total_q, caps.num_q_heads),
        page_table=torch.zeros(caps.max_batch, pages, dtype=torch.int32),
        cache_seqlens=torch.zeros(caps.max_batch, dtype=torch.int32),
        cu_seqlens_q=torch.arange(caps.max_batch + 1, dtype=torch.int32) * (caps.max_total_q // caps.max_batch),
        sm_scale=0.1,
    )
    workspace = BACKEND.workspace(caps, plan.num_splits)
    extra = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in workspace.items()}
    # No plan for the CPU has this workspace, and a binding that is replaced is checked.
    binding.scratch.update(extra)
    return binding


POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def compile_kernel(kernel: Any, arguments: dict[str, Any], capability: tuple[int, int], **options: Any) -> Any:
    """Compile as a launch on a device of this capability would, with aligned pointers."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{POINTERS[value.base.dtype][1:]}[{block}]>"
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options=options)


def smallest_product_loop(kernel: Any, folder: Path) -> dict[str, int]:
    """Instruction counts of the smallest loop that copies ahead and multiplies: the main loop.

    Loops over the edges of what a query sees are longer or copy nothing ahead.
    """
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    file = folder / "kernel.cubin"
    if ".target sm_121a" in kernel.asm["ptx"]:
        # The disassembler knows 12.0 only, of the same family.
        (folder / "kernel.ptx").write_text(kernel.asm["ptx"].replace(".target sm_121a", ".target sm_120a"))
        assembler = [tools / "ptxas-blackwell", "-arch=sm_120a", folder / "kernel.ptx", "-o", file]
        subprocess.run(assembler, capture_output=True, check=True)
    else:
        file.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([tools / "nvdisasm", "-c", file], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if match := re.match(r"(\.L_x_\d+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\d+ ", "", match[1]))
            if (target := re.search(r"BRA.*?(\.L_x_\d+)", match[1])) and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    counts = []
    for begin, end in loops:
        names = [instruction.split()[0].split(".")[0] for instruction in instructions[begin:end]]
        count = {name: names.count(name) for name in set(names)}
        if count.keys() & {"HMMA", "HGMMA"} and count.keys() & {"LDGSTS", "UTMALDG"}:
            counts.append(count)
    return min(counts, key=lambda count: sum(count.values()))


def build(device: str, variant: str, folder: Path) -> Compiled:
    from densemla.backends.triton import launch  # noqa: PLC0415
    from densemla.backends.triton.forward import forward  # noqa: PLC0415
    from densemla.backends.triton.merge import merge  # noqa: PLC0415

    limits = DEVICES[device]
    caps = densemla.Caps(**VARIANTS[variant], backend="cpu")
    tiles = choose(caps, limits)
    assert tiles is not None
    binding = binding_for(caps)
    arguments = launch.forward_arguments(binding, tiles, limits.capability, dependents=True)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compile_kernel(forward, arguments, limits.capability, **options)
    compile_kernel(merge, launch.merge_arguments(binding, limits), limits.capability, num_warps=4)
    return Compiled(compiled.metadata.shared, tiles.shared_bytes, smallest_product_loop(compiled, folder))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Compiled]:
    """Every variant for every device, on all cores."""
    folders = [tmp_path_factory.mktemp("cubin") for _ in JOBS]
    # Fresh processes: the compiler must not inherit this one's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=context) as pool:
        futures = [pool.submit(build, *job, folder) for job, folder in zip(JOBS, folders, strict=True)]
        return {job: future.result() for job, future in zip(JOBS, futures, strict=True)}


@pytest.mark.parametrize(("device", "variant"), JOBS)
def test_fits_and_does_not_spill(compiled: dict[tuple[str, str], Compiled], device: str, variant: str) -> None:
    kernel = compiled[device, variant]
    assert kernel.shared_bytes <= DEVICES[device].shared_bytes
    assert kernel.shared_bytes <= kernel.planned_bytes
    spills = {name: kernel.main_loop.get(name, 0) for name in ("LDL", "STL")}
    assert spills == {"LDL": 0, "STL": 0}


@pytest.mark.parametrize("variant", [variant for device, variant in JOBS if device == "9.0"])
def test_warpgroup_products_run_on(compiled: dict[tuple[str, str], Compiled], variant: str) -> None:
    """The assembler has not put a wait behind every single product, as it does where it loses track of a sum."""
    loop = compiled["9.0", variant].main_loop
    assert loop.get("WARPGROUP", 0) <= loop.get("HGMMA", 0) // 2
