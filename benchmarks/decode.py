"""Decode on a GPU: time, bandwidth and rate of every backend and importable peer, in one run.

    python benchmarks/decode.py [--backend NAME ...] [--json FILE] [--cases SUBSTRING]

Times are medians of CUDA-graph replays. ``cold`` rotates over copies of the cache that together exceed the
L2 several times, as layers of a model do; ``warm`` replays over one cache, as the recorded figures of
others were taken. Ceilings (a large copy, a large product) are measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import densemla

SM_SCALE = 192**-0.5
PAGE_SIZE = 64
RANK, WIDTH = 512, 576

ROTATED_BYTES = 512 << 20
"""Cache copies are rotated up to this many bytes: several times any L2."""


@dataclass(frozen=True)
class Case:
    """One row of the table: ``batch`` requests of ``tokens`` tokens each.

    ``flash_mla_us`` and ``vllm_triton_us`` were recorded on one NVIDIA H200 (driver 580.159.04, torch
    2.11.0+cu130, Triton 3.6.0) on 2026-11-30: FlashMLA's dense decode of commit 9241ae3 built for sm_90a,
    and the Triton decode kernel of vLLM 0.32.0, the best of 4 to 64 splits.
    """

    batch: int
    tokens: int
    heads: int
    queries: int
    flash_mla_us: float
    vllm_triton_us: float | None

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.tokens} h{self.heads} q{self.queries}"

    @property
    def cache_bytes(self) -> int:
        """The cache read once, in bf16."""
        return self.batch * self.tokens * WIDTH * 2

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.queries * self.heads * self.tokens * (WIDTH + RANK)


CASES = (
    Case(1, 4096, 96, 1, 19.2, 31.3),
    Case(1, 32768, 96, 1, 37.0, 155.3),
    Case(1, 131072, 96, 1, 78.7, 605.2),
    Case(1, 131072, 16, 1, 69.2, 246.6),
    Case(8, 8192, 96, 1, 42.2, 245.4),
    Case(4, 65536, 96, 1, 130.8, 908.3),
    Case(1, 1048576, 96, 1, 501.9, 4759.3),
    Case(64, 8192, 96, 1, 256.7, 1755.9),
    Case(32, 8192, 16, 1, 82.3, 175.4),
    Case(128, 4096, 16, 1, 151.8, 338.5),
    Case(128, 8192, 128, 1, 525.4, 4810.9),
    Case(1, 131072, 96, 4, 181.1, None),
    Case(32, 8192, 16, 8, 140.7, None),
    Case(16, 32768, 12, 8, 256.3, None),
    Case(1, 16384, 12, 8, 32.0, None),
    Case(128, 4096, 128, 2, 502.3, None),
)


@dataclass
class Inputs:
    """Tensors of a case; ``caches`` are copies to rotate over."""

    case: Case
    q: torch.Tensor
    caches: list[torch.Tensor]
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor


def make_inputs(case: Case) -> Inputs:
    torch.manual_seed(0)
    pages = case.batch * case.tokens // PAGE_SIZE
    copies = max(1, min(16, -(-ROTATED_BYTES // case.cache_bytes)))
    cache = torch.empty(pages, PAGE_SIZE, WIDTH, dtype=torch.bfloat16, device="cuda").normal_().div_(2)
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    return Inputs(
        case=case,
        q=(torch.randn(case.batch * case.queries, case.heads, WIDTH, device="cuda") / 2).bfloat16(),
        caches=[cache, *(cache.clone() for _ in range(copies - 1))],
        page_table=order.view(case.batch, -1),
        cache_seqlens=torch.full((case.batch,), case.tokens, dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.queries,
    )


def bindings_for(inputs: Inputs, backend: str, **options: object) -> list[densemla.Binding]:
    """One binding per cache copy."""
    case = inputs.case
    caps = densemla.Caps(
        device="cuda",
        num_q_heads=case.heads,
        page_size=PAGE_SIZE,
        max_total_q=case.batch * case.queries,
        max_batch=case.batch,
        max_cache_tokens=case.tokens,
        partial_dtype=torch.bfloat16,
        single_split_chunks=-1,
        backend=backend,
        **options,
    )
    plan = densemla.plan(caps)
    output = torch.empty(caps.max_total_q, case.heads, RANK, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(caps.max_total_q, case.heads, device="cuda")
    scratch = plan.empty_scratch()
    return [
        densemla.bind(
            plan,
            scratch=scratch,
            q=inputs.q,
            kv_cache=cache,
            output=output,
            lse=lse,
            page_table=inputs.page_table,
            cache_seqlens=inputs.cache_seqlens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            sm_scale=SM_SCALE,
        )
        for cache in inputs.caches
    ]


def ours(inputs: Inputs, backend: str) -> list[Callable[[], object]]:
    bindings = bindings_for(inputs, backend)
    densemla.compile(bindings[0])
    return [lambda binding=binding: densemla.run(binding) for binding in bindings]


def flash_mla(inputs: Inputs) -> list[Callable[[], object]]:
    import flash_mla as peer  # noqa: PLC0415

    case = inputs.case
    metadata, num_splits = peer.get_mla_metadata(inputs.cache_seqlens, case.queries * case.heads, 1)
    q = inputs.q.view(case.batch, case.queries, case.heads, WIDTH)

    def call(cache: torch.Tensor) -> Callable[[], object]:
        return lambda: peer.flash_mla_with_kvcache(
            q, cache.unsqueeze(2), inputs.page_table, inputs.cache_seqlens, RANK, metadata, num_splits, SM_SCALE, True
        )

    return [call(cache) for cache in inputs.caches]


def vllm_triton(inputs: Inputs) -> list[Callable[[], object]]:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd  # noqa: PLC0415

    case = inputs.case
    if case.queries != 1:
        return []
    splits = 32
    output = torch.empty(case.batch, case.heads, RANK, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(case.batch, case.heads, dtype=torch.bfloat16, device="cuda")
    logits = torch.empty(case.batch, case.heads, splits, RANK + 1, dtype=torch.float32, device="cuda")

    def call(cache: torch.Tensor) -> Callable[[], object]:
        keys = cache.unsqueeze(2)
        return lambda: decode_attention_fwd(
            inputs.q,
            keys,
            keys[..., :RANK],
            output,
            lse,
            inputs.page_table,
            inputs.cache_seqlens,
            logits,
            splits,
            SM_SCALE,
            PAGE_SIZE,
        )

    return [call(cache) for cache in inputs.caches]


def flashinfer(inputs: Inputs) -> list[Callable[[], object]]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # noqa: PLC0415

    case = inputs.case
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device="cuda"))
    pages = case.tokens // PAGE_SIZE
    wrapper.plan(
        inputs.cu_seqlens_q,
        torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * pages,
        inputs.page_table.flatten(),
        inputs.cache_seqlens,
        case.heads,
        RANK,
        WIDTH - RANK,
        PAGE_SIZE,
        True,
        SM_SCALE,
        torch.bfloat16,
        torch.bfloat16,
    )
    q_nope, q_rope = inputs.q[..., :RANK].contiguous(), inputs.q[..., RANK:].contiguous()

    def call(cache: torch.Tensor) -> Callable[[], object]:
        return lambda: wrapper.run(q_nope, q_rope, cache[..., :RANK], cache[..., RANK:])

    return [call(cache) for cache in inputs.caches]


PEERS = {"flash_mla": flash_mla, "flashinfer": flashinfer, "vllm": vllm_triton}
"""Name of the package to what runs it."""


def graph_us(calls: list[Callable[[], object]], seconds: float = 0.12) -> float:
    """Median microseconds of one call, from replays of a graph that holds at least ten."""
    rounds = -(-10 // len(calls))
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    count = rounds * len(calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    spent = 0.0
    graph.replay()
    while spent < seconds or len(times) < 5:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds = start.elapsed_time(end)
        spent += milliseconds / 1e3
        times.append(milliseconds * 1e3 / count)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Measured here and now: copy bandwidth in TB/s (read plus written) and bf16 product rate in TFLOP/s."""
    return {"copy_tb_s": _copy_rate(), "bf16_tflop_s": _product_rate()}


def _copy_rate() -> float:
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    # A kernel: in a graph, copy_ would become a copy-engine node, which is slower.
    return 2 * source.numel() * source.element_size() / graph_us([lambda: torch.neg(source, out=target)]) / 1e6


def _product_rate() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * 8192**3 / graph_us([lambda: torch.mm(a, b, out=product)]) / 1e6


def measure(case: Case, contestants: dict[str, Callable[[Inputs], list[Callable[[], object]]]]) -> dict[str, object]:
    inputs = make_inputs(case)
    row: dict[str, object] = {**asdict(case), "name": case.name}
    for name, make in contestants.items():
        try:
            calls = make(inputs)
        except densemla.ContractError as error:
            row[f"{name}_refused"] = str(error)
            continue
        if calls:
            row[f"{name}_cold_us"] = graph_us(calls)
            row[f"{name}_warm_us"] = graph_us(calls[:1])
    return row


def floors_us(case: Case, ceiling: dict[str, float]) -> tuple[float, float]:
    """The least time for the bytes and for the arithmetic."""
    return case.cache_bytes / ceiling["copy_tb_s"] / 1e6, case.flop / ceiling["bf16_tflop_s"] / 1e6


def print_table(rows: list[dict[str, object]], names: list[str], ceiling: dict[str, float]) -> None:
    print(f"copy {ceiling['copy_tb_s']:.2f} TB/s, bf16 product {ceiling['bf16_tflop_s']:.0f} TFLOP/s")
    print(
        f"{'case':22s} {'who':10s} {'cold us':>8s} {'warm us':>8s} {'TB/s':>6s} {'TFLOP/s':>8s} "
        f"{'floor us':>9s} {'% floor':>8s} {'% FlashMLA':>11s} {'x vLLM':>7s}"
    )
    for row, case in zip(rows, (case for case in CASES if any(r["name"] == case.name for r in rows)), strict=True):
        floor = max(floors_us(case, ceiling))
        for name in names:
            if f"{name}_cold_us" not in row:
                print(f"{case.name:22s} {name:10s} {row.get(f'{name}_refused', 'does not run this')}")
                continue
            cold, warm = float(row[f"{name}_cold_us"]), float(row[f"{name}_warm_us"])
            vllm = f"{case.vllm_triton_us / warm:7.2f}" if case.vllm_triton_us else "      -"
            print(
                f"{case.name:22s} {name:10s} {cold:8.1f} {warm:8.1f} {case.cache_bytes / cold / 1e6:6.2f} "
                f"{case.flop / cold / 1e6:8.0f} {floor:9.1f} {100 * floor / cold:8.0f} "
                f"{100 * case.flash_mla_us / warm:11.0f} {vllm}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="default: every GPU backend that runs here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here: see `densemla doctor`")
    names = args.backend or [name for name in densemla.backend_names() if name not in ("cpu", "reference")]
    contestants: dict[str, Callable[[Inputs], list[Callable[[], object]]]] = {}
    for name in names:
        contestants[name] = lambda inputs, name=name: ours(inputs, name)
    contestants |= {name: make for name, make in PEERS.items() if importlib.util.find_spec(name)}
    ceiling = ceilings()
    rows = [measure(case, contestants) for case in CASES if args.cases in case.name]
    print_table(rows, list(contestants), ceiling)
    if args.json:
        properties = torch.cuda.get_device_properties(0)
        about = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "card": properties.name,
            "driver": _driver(),
            "torch": torch.__version__,
            "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
            "python": platform.python_version(),
            "densemla": densemla.__version__,
            "ceilings": ceiling,
        }
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _driver() -> str:
    import subprocess  # noqa: PLC0415

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
