"""Correctness of the Hopper kernels against float64, and their times.

A kernel built on mbarriers hangs when it is wrong: ``--limit`` runs the rest of the command line in a process
of its own with a time limit. Prints one line per case.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise

import torch

import densemla
from densemla.backends import hopper

SM_SCALE = 192**-0.5

# batch, tokens, heads, queries, FlashMLA's microseconds on the same kind of card
ANCHORS = (
    (1, 4096, 96, 1, 19.2),
    (1, 32768, 96, 1, 37.0),
    (1, 131072, 96, 1, 78.7),
    (1, 131072, 16, 1, 69.2),
    (8, 8192, 96, 1, 42.2),
    (4, 65536, 96, 1, 130.8),
    (1, 1048576, 96, 1, 501.9),
    (64, 8192, 96, 1, 256.7),
    (32, 8192, 16, 1, 82.3),
    (128, 4096, 16, 1, 151.8),
    (128, 8192, 128, 1, 525.4),
    (1, 131072, 96, 4, 181.1),
    (32, 8192, 16, 8, 140.7),
    (16, 32768, 12, 8, 256.3),
    (1, 16384, 12, 8, 32.0),
    (128, 4096, 128, 2, 502.3),
)
COPY_TBS, MATMUL_TFLOPS = 4.28, 711.0


@dataclass
class Step:
    binding: densemla.Binding
    lengths: list[int]
    counts: list[int]


def make_step(
    lengths: list[int],
    counts: list[int],
    heads: int,
    *,
    backend: str,
    page_size: int = 64,
    partial_dtype: torch.dtype = torch.bfloat16,
    num_splits: int | None = None,
    single_split_chunks: int = -1,
    scale: float = 0.5,
    explicit: bool = False,
    spare_rows: int = 0,
    poison: bool = True,
    active: int | None = None,
    fp8: bool = False,
) -> Step:
    device = torch.device("cuda")
    total = sum(counts) + spare_rows
    pages_each = [-(-length // page_size) for length in lengths]
    width = max(*pages_each, 1) + 2
    num_pages = sum(pages_each) + 3
    caps = densemla.Caps(
        device=device,
        num_q_heads=heads,
        page_size=page_size,
        max_total_q=total,
        max_batch=len(lengths),
        max_cache_tokens=max(*lengths, 1),
        kv_dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
        partial_dtype=partial_dtype,
        single_split_chunks=single_split_chunks,
        num_splits=num_splits,
        backend=backend,
    )
    plan = densemla.plan(caps)
    q = torch.randn(total, heads, 576, device=device, dtype=torch.bfloat16) * scale
    cache = torch.randn(num_pages, page_size, 576, device=device, dtype=torch.bfloat16) * scale
    order = torch.randperm(num_pages, device=device).to(torch.int32)
    table = torch.full((len(lengths), width), -1, dtype=torch.int32, device=device)
    used = 0
    for i, pages in enumerate(pages_each):
        table[i, :pages] = order[used : used + pages]
        used += pages
        if poison and lengths[i] % page_size:
            cache[order[used - 1].long(), lengths[i] % page_size :] = math.nan
    if poison:
        cache[order[used:].long()] = math.nan
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu[1:] = torch.tensor(counts).cumsum(0)
    visible = None
    if explicit:
        visible = torch.zeros(total, dtype=torch.int32)
        for i, length in enumerate(lengths):
            visible[cu[i] : cu[i + 1]] = torch.randint(0, length + 1, (counts[i],), dtype=torch.int32)
        visible = visible.to(device)
    output = torch.full((total, heads, 512), math.nan, device=device, dtype=torch.bfloat16)
    lse = torch.full((total, heads), math.nan, device=device)
    scratch = plan.empty_scratch()
    for tensor in scratch.values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
    binding = densemla.bind(
        plan,
        scratch=scratch,
        q=q,
        kv_cache=cache,
        output=output,
        lse=lse,
        page_table=table,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=cu.to(device),
        query_cache_seqlens=visible,
        kv_scale=1.0 if fp8 else None,
        sm_scale=SM_SCALE,
        active_splits=active,
    )
    return Step(binding, lengths, counts)


def reference(step: Step, requests: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 output and LSE, and which query rows they cover."""
    b = step.binding
    output = torch.zeros(b.q.shape[0], b.q.shape[1], 512, dtype=torch.float64, device=b.q.device)
    lse = torch.full(b.q.shape[:2], -math.inf, dtype=torch.float64, device=b.q.device)
    covered = torch.zeros(b.q.shape[0], dtype=torch.bool, device=b.q.device)
    covered[sum(step.counts) :] = True
    first = 0
    for i, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True)):
        start, first = first, first + count
        if requests is not None and i not in requests:
            continue
        covered[start:first] = True
        pages = -(-length // b.kv_cache.shape[1])
        rows = b.kv_cache[b.page_table[i, :pages].long()].float().reshape(-1, 576)[:length].double()
        for t in range(count):
            seen = max(length - count + 1 + t, 0)
            if b.query_cache_seqlens is not None:
                seen = int(b.query_cache_seqlens[start + t])
            if seen == 0:
                continue
            scores = SM_SCALE * (b.q[start + t].double() @ rows[:seen].T)
            lse[start + t] = torch.logsumexp(scores, -1)
            output[start + t] = torch.softmax(scores, -1) @ rows[:seen, :512]
    return output, lse, covered


def errors(step: Step, requests: list[int] | None = None) -> tuple[float, float]:
    """Relative output error and largest LSE error; inf where zeros or infinities are misplaced."""
    b = step.binding
    output, lse, covered = reference(step, requests)
    got, got_lse = b.output[covered].double(), b.lse[covered].double()
    output, lse = output[covered], lse[covered]
    empty = lse == -math.inf
    if not torch.equal(got_lse == -math.inf, empty) or bool((got[empty] != 0).any()) or not bool(got.isfinite().all()):
        return math.inf, math.inf
    norm = output.norm()
    worst = (got_lse - lse)[~empty].abs().max() if bool((~empty).any()) else torch.zeros(())
    return float((got - output).norm() / (norm if norm > 0 else 1)), float(worst)


def build(tile: int | None, scorers: int | None, paired: bool) -> None:
    """Make the backend use a tile of so many rows, and a kernel that it does not use by itself."""
    if tile is not None:
        hopper.tile_rows = lambda caps: tile
    if scorers is not None:
        hopper.SCORERS = dict.fromkeys(hopper.SCORERS, scorers)
        hopper.FP8_SCORERS = dict.fromkeys(hopper.FP8_SCORERS, scorers)
    if paired:
        hopper.PAIRED = frozenset((*hopper.SCORERS, *hopper.FP8_SCORERS))


def small(backend: str, tile: int | None, fp8: bool) -> None:
    torch.manual_seed(1)
    f32, bf16 = torch.float32, torch.bfloat16
    lengths = [0, 1, 63, 64, 65, 1000, 130, 2048]
    ones = [1] * len(lengths)
    mixed = [2, 1, 3, 0, 4, 1, 8, 5]
    for name, args, options in (
        ("one split", (lengths, ones, 16), {"num_splits": 1}),
        ("4 splits", (lengths, ones, 96), {"num_splits": 4, "single_split_chunks": 0}),
        ("4 splits f32", (lengths, ones, 96), {"num_splits": 4, "single_split_chunks": 0, "partial_dtype": f32}),
        ("40 splits", (lengths, ones, 128), {"num_splits": 40, "single_split_chunks": 0}),
        ("40 splits f32", (lengths, ones, 12), {"num_splits": 40, "single_split_chunks": 2, "partial_dtype": f32}),
        ("mixed queries", (lengths, mixed, 12), {"num_splits": 3, "single_split_chunks": 1, "spare_rows": 3}),
        ("mixed queries 1", (lengths, mixed, 7), {"num_splits": 1, "spare_rows": 2}),
        ("explicit", (lengths, mixed, 96), {"num_splits": 4, "single_split_chunks": 0, "explicit": True}),
        ("large scale", (lengths, mixed, 64), {"num_splits": 4, "single_split_chunks": 0, "scale": 4.0}),
        ("page 16", (lengths, mixed, 64), {"num_splits": 4, "single_split_chunks": 0, "page_size": 16}),
        ("page 32", (lengths, mixed, 16), {"num_splits": 2, "single_split_chunks": 0, "page_size": 32}),
        ("page 128", (lengths, mixed, 64), {"num_splits": 4, "single_split_chunks": 0, "page_size": 128}),
        ("long", ([70000, 5000], [1, 1], 96), {"num_splits": 8, "single_split_chunks": 0}),
        ("long f32", ([70000, 5000], [2, 1], 96), {"num_splits": 8, "single_split_chunks": 0, "partial_dtype": f32}),
    ):
        step = make_step(*args, backend=backend, fp8=fp8, **{"partial_dtype": bf16, **options})
        densemla.compile(step.binding)
        densemla.run(step.binding)
        torch.cuda.synchronize()
        first = step.binding.output.clone(), step.binding.lse.clone()
        out, lse = errors(step)
        same = True
        for _ in range(5):
            step.binding.output.fill_(math.nan)
            densemla.run(step.binding)
            same &= torch.equal(first[0], step.binding.output) and torch.equal(first[1], step.binding.lse)
        print(
            f"{backend} tile {tile} {name:16s} output {out:.2e} lse {lse:.1e} {'repeats' if same else 'MOVES'}"
            f"{'' if out < 6e-3 and lse < 1e-3 and same else '   <== WRONG'}",
            flush=True,
        )


def capture(binding: densemla.Binding, runs: int) -> torch.cuda.CUDAGraph:
    """A graph of ``runs`` runs."""
    densemla.compile(binding)
    densemla.run(binding)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            densemla.run(binding)
    return graph


def time_in_turn(*bindings: densemla.Binding, runs: int = 10, rounds: int = 16) -> list[float]:
    """Median microseconds of a run of each, over replays in turn of a graph of ``runs`` runs of each."""
    graphs = [capture(binding, runs) for binding in bindings]
    for graph in 3 * graphs:
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(graphs) + 1)]
    for event, graph in zip(events, graphs * rounds, strict=False):
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) / runs for a, b in pairwise(events)]
    return [statistics.median(times[first :: len(graphs)]) for first in range(len(graphs))]


def anchor_step(
    backend: str, index: int, partial_dtype: torch.dtype, num_splits: int | None = None, fp8: bool = False
) -> Step:
    batch, tokens, heads, queries, _ = ANCHORS[index]
    torch.manual_seed(index)
    return make_step(
        [tokens] * batch,
        [queries] * batch,
        heads,
        backend=backend,
        partial_dtype=partial_dtype,
        poison=False,
        num_splits=num_splits,
        fp8=fp8,
    )


def partials(backend: str, index: int) -> None:
    """What float32 partials cost over bf16."""
    batch, tokens, heads, queries, _ = ANCHORS[index]
    steps = [anchor_step(backend, index, dtype) for dtype in (torch.bfloat16, torch.float32)]
    bf16, f32 = time_in_turn(*(step.binding for step in steps), rounds=64)
    print(
        f"{backend} {index:2d} {batch}x{tokens}x{heads}x{queries} splits {steps[0].binding.plan.num_splits} "
        f"bf16 {bf16:8.1f} us  float32 {f32:8.1f} us  {100 * (f32 / bf16 - 1):+.1f} %",
        flush=True,
    )


def anchor(backend: str, index: int, partial: str, num_splits: int | None, check: bool, fp8: bool) -> None:
    batch, tokens, heads, queries, flash = ANCHORS[index]
    step = anchor_step(backend, index, torch.float32 if partial == "f32" else torch.bfloat16, num_splits, fp8)
    nbytes, flops = batch * tokens * (576 if fp8 else 1152), 2 * batch * queries * heads * tokens * 1088
    floor = max(nbytes / COPY_TBS / 1e6, flops / MATMUL_TFLOPS / 1e6)
    (us,) = time_in_turn(step.binding)
    out, lse = errors(step, [0]) if check else (math.nan, math.nan)
    rows = hopper.tile_rows(step.binding.plan.caps) if backend == "hopper" else ""
    print(
        f"{backend} {index:2d} {batch}x{tokens}x{heads}x{queries} tile {rows} splits {step.binding.plan.num_splits} "
        f"{partial} {us:8.1f} us  flash {flash:6.1f} x{flash / us:.2f}  floor {100 * floor / us:3.0f}%  "
        f"{nbytes / us / 1e6:.2f} TB/s {flops / us / 1e6:5.0f} TFLOP/s  err {out:.2e} lse {lse:.1e}",
        flush=True,
    )


def without_limit(arguments: list[str]) -> list[str]:
    """The command line without ``--limit``, however it is spelt: a child with it would start one of its own."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--limit")
    return parser.parse_known_args(arguments)[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("small", "anchors", "partials"))
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--tile", type=int, choices=sorted({*hopper.TILES, *hopper.FP8_TILES}))
    parser.add_argument("--cases", default=",".join(map(str, range(len(ANCHORS)))))
    parser.add_argument("--partial", default="bf16")
    parser.add_argument("--splits", type=int)
    parser.add_argument("--scorers", type=int, choices=(1, 2), help="scoring warpgroups of the tiles of 16 to 48 rows")
    parser.add_argument("--paired", action="store_true", help="two such tiles load the cache together")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="the cache in float8_e4m3fn")
    parser.add_argument("--limit", type=int, help="run in a process with this time limit in seconds")
    args = parser.parse_args()
    if args.limit:
        command = [sys.executable, __file__, *without_limit(sys.argv[1:])]
        try:
            done = subprocess.run(command, timeout=args.limit, check=False)
            print(f"-- exit {done.returncode}: {' '.join(command[2:])}", flush=True)
            sys.exit(done.returncode)
        except subprocess.TimeoutExpired:
            print(f"-- HUNG after {args.limit} s: {' '.join(command[2:])}", flush=True)
            sys.exit(1)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU and a CUDA build of torch")
    build(args.tile, args.scorers, args.paired)
    if args.what == "small":
        small(args.backend, args.tile, args.fp8)
        return
    for index in map(int, args.cases.split(",")):
        if args.what == "partials":
            partials(args.backend, index)
        else:
            anchor(args.backend, index, args.partial, args.splits, not args.no_check, args.fp8)


if __name__ == "__main__":
    main()
