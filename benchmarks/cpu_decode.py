"""The CPU backend beside torch's scaled_dot_product_attention on the same latent data, in one run.

The peer gets its data contiguous (no pages to gather) and its best form: heads as rows of one attention
head, so the latent rows are read once, with values either the 512 columns or padded to 576 (which lets
torch's flash kernel in). Rounds alternate between the contestants; medians.

    python benchmarks/cpu_decode.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import densemla

SM_SCALE = 192**-0.5
HEADS = (12, 96)
LENGTHS = (1024, 8192, 32768)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def contestants(heads: int, length: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    rows = (torch.randn(length, 576) / 2).to(dtype)
    q = (torch.randn(1, heads, 576) / 2).to(dtype)
    pages = length // 64
    order = torch.randperm(pages)
    cache = torch.empty(pages, 64, 576, dtype=dtype)
    cache[order] = rows.view(pages, 64, 576)
    caps = densemla.Caps(
        num_q_heads=heads, q_dtype=dtype, kv_dtype=dtype, partial_dtype=torch.bfloat16, single_split_chunks=-1
    )
    plan = densemla.plan(caps)
    binding = densemla.bind(
        plan,
        scratch=plan.empty_scratch(),
        q=q,
        kv_cache=cache,
        output=torch.empty(1, heads, 512, dtype=dtype),
        lse=torch.empty(1, heads),
        page_table=order.to(torch.int32)[None],
        cache_seqlens=torch.tensor([length], dtype=torch.int32),
        sm_scale=SM_SCALE,
        active_splits=plan.launch_splits(length),
    )

    def sdpa(values: torch.Tensor) -> Callable[[], object]:
        return lambda: F.scaled_dot_product_attention(q[None], rows[None, None], values[None, None], scale=SM_SCALE)

    return {"densemla": lambda: densemla.run(binding), "sdpa": sdpa(rows[:, :512]), "sdpa_padded": sdpa(rows)}


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median microseconds of each call; rounds alternate so that the machine's mood is shared."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["densemla"]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0, help="per case")
    args = parser.parse_args()
    torch.manual_seed(0)
    results = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(f"{'dtype':>6} {'heads':>6} {'tokens':>7} {'densemla us':>12} {'best sdpa us':>13} {'ratio':>6}")
    for name, dtype in DTYPES.items():
        for heads in HEADS:
            for length in LENGTHS:
                with torch.inference_mode():
                    us = medians(contestants(heads, length, dtype), args.seconds)
                peer = min(us["sdpa"], us["sdpa_padded"])
                ratio = peer / us["densemla"]
                results.append({"dtype": name, "heads": heads, "tokens": length, **us, "ratio": ratio})
                print(f"{name:>6} {heads:>6} {length:>7} {us['densemla']:>12.0f} {peer:>13.0f} {ratio:>6.2f}")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
