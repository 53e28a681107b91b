"""What decode context parallelism costs beside the decode, and whether it is right on NCCL.

    torchrun --nproc-per-node 2 benchmarks/dcp_merge.py --out benchmarks/results

Checks first (both forms, both partial types, empty shards full of NaN, graph replay against eager in bits,
uneven gathers, query-sharded attention), then times a step of one request of 131072 tokens, all heads
over each rank's share of them, for 1, 4 and 8 queries, in CUDA graphs of 20 such layers. The merge and the gather
are measured first, without a decode. Also runs on gloo, without graphs and times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

import densemla
from densemla import decoding
from densemla.backends.reference import attend
from densemla.distributed import DcpDecoder, LseMerge, all_gatherv
from densemla.distributed.check import bind_step, captured_graph, join
from densemla.distributed.dcp import FORMS
from densemla.inputs import random_step
from densemla.vision import even_shares, query_sharded_attention

PARTIALS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SM_SCALE = 192**-0.5
LAYERS, REPLAYS, ROUNDS = 20, 3, 11

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def graph_or_call(call: Callable[[], None], device: torch.device, watch: Callable[[], None]) -> Callable[[], None]:
    """``call``, on a GPU as the replay of a graph with ``watch`` behind it, so that a lost rank ends the others."""
    if device.type != "cuda":
        return call
    replay = captured_graph(call)

    def watched() -> None:
        replay()
        watch()

    return watched


def time_us(call: Callable[[], None], device: torch.device, watch: Callable[[], None]) -> float:
    """Median over rounds, the slowest rank's. Calls follow each other inside one graph, as layers do.

    ``watch`` is launched behind what is timed.
    """
    if device.type != "cuda":
        call()
        return math.nan

    def layers() -> None:
        for _ in range(LAYERS):
            call()

    replay = captured_graph(layers)
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The first replay lets ranks that start apart meet.
        replay()
        start.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        watch()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (REPLAYS * LAYERS))
    slowest = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def check(name: str, good: bool, found: list[str]) -> None:
    verdict = torch.tensor([int(good)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    found.append(f"{'ok' if int(verdict) else 'FAILED'}: {name}")


def check_merges(device: torch.device, watch: Callable[[], None], found: list[str]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    heads, width = 12 * world, 512
    for form, (name, dtype), base, rows in product(FORMS, PARTIALS.items(), (math.e, 2), (1, 8)):
        generator = torch.Generator().manual_seed(rows)
        outputs = torch.randn(world, rows, heads, width, generator=generator).to(dtype)
        lses = 20 * torch.randn(world, rows, heads, generator=generator)
        lses[torch.rand(lses.shape, generator=generator) < 0.3] = -math.inf
        outputs[lses.isinf()] = torch.nan
        right, right_lse = densemla.merge(outputs.double(), lses, base=base)
        merge = LseMerge(
            None, num_heads=heads, width=width, max_rows=8, partial_dtype=dtype, form=form, device=device
        )  # fmt: skip
        mine, mine_lse = merge.partials(rows)
        mine.copy_(outputs[rank])
        mine_lse.copy_(lses[rank])
        output = torch.full((rows, merge.own_heads, width), torch.nan, device=device)
        lse = torch.full((rows, merge.own_heads), torch.nan, device=device)
        call = partial(merge.run, output, lse, base=base)
        call()
        eager = output.clone(), lse.clone()
        replay = graph_or_call(call, device, watch)
        same = True
        for _ in range(5):
            output.fill_(torch.nan)
            lse.fill_(torch.nan)
            replay()
            same = same and torch.equal(output, eager[0]) and torch.equal(lse, eager[1])
        own = slice(rank * merge.own_heads, (rank + 1) * merge.own_heads)
        error = (output.cpu().double() - right[:, own]).norm() / right.norm()
        limit = 5e-3 if form == "reduce_scatter" and dtype is torch.bfloat16 else 1e-6
        near = torch.allclose(lse.cpu(), right_lse[:, own].float(), atol=1e-5, rtol=1e-6)
        label = f"merge {form} {name} base {base:.3g} rows {rows}, empty parts NaN, replay = eager in bits"
        check(f"{label}, error {error:.1e}", same and near and bool(error < limit), found)


def check_gathers(device: torch.device, found: list[str]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for sizes in ([3] * world, list(range(world)), [0] * (world - 1) + [5], [0] * world):
        pieces = [torch.full((size, 4), float(r), device=device) for r, size in enumerate(sizes)]
        for known in (None, sizes):
            check(f"all_gatherv {sizes}", torch.equal(all_gatherv(pieces[rank], sizes=known), torch.cat(pieces)), found)
    try:
        all_gatherv(torch.zeros(2, 4 + rank, device=device))
        refused = False
    except densemla.ContractError:
        refused = True
    check("all_gatherv refuses other widths on every rank", refused, found)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1300, 16, 72, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    bounds = [0, 1000, 1000, 1300]
    for sizes in (even_shares(1300, world), [1300] + [0] * (world - 1)):
        start = sum(sizes[:rank])
        output = query_sharded_attention(q[start : start + sizes[rank]], k, v, bounds)
        right = [
            (torch.softmax(q[a:b].double().transpose(0, 1) @ k[a:b].double().permute(1, 2, 0) * 72**-0.5, -1)
             @ v[a:b].double().transpose(0, 1)).transpose(0, 1)
            for a, b in ((0, 1000), (1000, 1300))
        ]  # fmt: skip
        error = (output.double() - torch.cat(right)).norm() / torch.cat(right).norm()
        check(f"query_sharded_attention shares {sizes}, error {error:.1e}", bool(error < 5e-3), found)


def check_decodes(device: torch.device, backend: str, found: list[str]) -> None:
    world = dist.get_world_size()
    lengths, queries = [5000, 9, 1, 700], 3
    shared = densemla.Caps(
        device=device, num_q_heads=12 * world, max_total_q=len(lengths) * queries, max_batch=len(lengths),
        max_cache_tokens=5000, backend=backend,
    )  # fmt: skip
    step = random_step(shared, lengths, queries=[queries] * len(lengths))
    for form, (name, dtype), interleave in product(FORMS, PARTIALS.items(), (1, 16)):
        decoder = DcpDecoder(densemla.plan(replace(shared, partial_dtype=dtype)), interleave=interleave, form=form)
        binding = bind_step(decoder, step)
        decoder.compile(binding)

        whole = partial(decoder.run, binding)
        replay = graph_or_call(whole, device, decoder.watch)
        good, worst = True, 0.0
        for now in (lengths, [4096, 0, 1, 64], [1, 5, 0, 699]):
            step.cache_seqlens.copy_(torch.tensor(now))
            whole()
            eager = binding.output.clone(), binding.lse.clone()
            binding.output.fill_(torch.nan)
            binding.lse.fill_(torch.nan)
            replay()
            good = good and torch.equal(binding.output, eager[0]) and torch.equal(binding.lse, eager[1])
            own = slice(decoder.rank * decoder.own_heads, (decoder.rank + 1) * decoder.own_heads)
            for row in range(len(lengths) * queries):
                request, bound = row // queries, max(now[row // queries] - queries + 1 + row % queries, 0)
                rows = step.kv_cache[step.page_table[request].clamp_min(0).long()].flatten(0, 1)[:bound].double()
                output, lse = attend(step.q[row, own].double(), rows, 512, SM_SCALE)
                if bound:
                    worst = max(worst, float((binding.output[row].double() - output).norm() / output.norm()))
                    good = good and torch.allclose(binding.lse[row].double(), lse, atol=1e-3, rtol=1e-3)
                else:
                    good = good and not binding.output[row].any() and bool((binding.lse[row] == -math.inf).all())
        step.cache_seqlens.copy_(torch.tensor(lengths))
        label = f"decode {form} {name} interleave {interleave}, three sets of lengths, replay = eager in bits"
        check(f"{label}, worst error {worst:.1e}", good and worst < 1e-2, found)


def measure(device: torch.device, tokens: int, heads: int, backend: str, with_decode: bool) -> list[dict[str, object]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    local = -(-tokens // world)
    pages = -(-local // 64)
    generator = torch.Generator(device).manual_seed(rank)
    cache = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device=device).normal_(generator=generator).div_(2)
    table = torch.randperm(pages, device=device).to(torch.int32).unsqueeze(0)
    for queries, form, (name, dtype) in product((1, 4, 8), FORMS, PARTIALS.items()):
        caps = densemla.Caps(
            device=device, num_q_heads=heads, max_total_q=queries, max_batch=1, max_cache_tokens=local,
            partial_dtype=dtype, backend=backend,
        )  # fmt: skip
        decoder = DcpDecoder(densemla.plan(caps), form=form)
        binding = decoder.bind(
            q=torch.randn(queries, decoder.own_heads, 576, device=device).to(torch.bfloat16) / 2,
            kv_cache=cache,
            output=torch.full((queries, decoder.own_heads, 512), torch.nan, dtype=torch.bfloat16, device=device),
            lse=torch.full((queries, decoder.own_heads), torch.nan, device=device),
            page_table=table,
            cache_seqlens=torch.tensor([tokens], dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device=device),
            sm_scale=SM_SCALE,
        )
        row: dict[str, object] = {"queries": queries, "form": form, "partial": name}
        if with_decode:
            decoder.compile(binding)
            step_us = time_us(partial(decoder.run, binding, localise=False), device, decoder.watch)
            decode_us = time_us(partial(decoding.run, binding.local), device, decoder.watch)
            row |= {
                "backend": decoder.local_plan.backend,
                "step_us": step_us,
                "decode_us": decode_us,
                "added_us": step_us - decode_us,
            }
        else:
            binding.local.output.zero_()
            binding.local.lse.zero_()
        for part, call in (
            ("gather_us", decoder.gather_queries),
            ("merge_us", decoder.merge),
            ("localise_us", decoder.localise),
        ):
            row[part] = time_us(partial(call, binding), device, decoder.watch)
        rows.append(row)
    return rows


def collectives(device: torch.device, heads: int, watch: Callable[[], None]) -> list[dict[str, object]]:
    """The collectives by themselves, at the sizes of a step."""
    world = dist.get_world_size()
    rows = []
    for queries in (1, 4, 8):
        own = heads // world
        sizes = {
            "all_gather of queries, bf16": queries * own * 576 * 2,
            "all_gather of LSEs": queries * heads * 4,
            "all_to_all of partials with LSEs, bf16": queries * own * 528 * 2,
            "all_to_all of partials with LSEs, fp32": queries * own * 528 * 4,
        }
        for name, size in sizes.items():
            one = torch.zeros(size, dtype=torch.uint8, device=device)
            many = torch.zeros(world * size, dtype=torch.uint8, device=device)
            other = torch.zeros_like(many)
            call = partial(ALL_GATHER, many, one) if "gather" in name else partial(dist.all_to_all_single, many, other)
            rows.append({"queries": queries, "what": name, "bytes": size, "us": time_us(call, device, watch)})
        for name, dtype in PARTIALS.items():
            send = torch.zeros(world * queries * own * 512, dtype=dtype, device=device)
            part = send[: queries * own * 512].clone()
            us = time_us(partial(REDUCE_SCATTER, part, send), device, watch)
            rows.append({"queries": queries, "what": f"reduce_scatter, {name}", "bytes": part.nbytes, "us": us})
    return rows


def environment(device: torch.device) -> dict[str, object]:
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "transport": dist.get_backend(),
        "peer_access": torch.cuda.can_device_access_peer(0, 1) if torch.cuda.device_count() > 1 else None,
        "nccl_settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "command": " ".join(["torchrun --nproc-per-node", str(dist.get_world_size()), *sys.argv]),
    }


def markdown(report: dict) -> str:
    lines = ["# DCP: what the merge costs beside the decode", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    lines += ["", f"## One request of {report['tokens']} tokens, {report['heads']} heads", ""]
    for title in ("steps", "collectives"):
        rows = report[title]
        if rows:
            names = list(rows[0])
            lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
            for row in rows:
                cells = (f"{row[n]:.1f}" if isinstance(row[n], float) else str(row[n]) for n in names)
                lines.append("| " + " | ".join(cells) + " |")
            lines.append("")
    lines += ["## Checks", "", *[f"- {line}" for line in report["checks"]], ""]
    return "\n".join(lines)


def write(report: dict, folder: Path) -> None:
    if dist.get_rank():
        return
    folder.mkdir(parents=True, exist_ok=True)
    card = "h200" if "H200" in report["environment"]["device"] else "cpu"
    stem = folder / f"{card}-x{dist.get_world_size()}-dcp"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--backend", default="auto", help="decode backend")
    options = parser.parse_args()
    device = join("auto", 120)
    found: list[str] = []
    report = {"environment": environment(device), "tokens": options.tokens, "heads": options.heads, "checks": found}
    # For its watch alone, which is the group's: merges and collectives by themselves have no decoder.
    smallest = densemla.Caps(device=device, num_q_heads=dist.get_world_size(), max_cache_tokens=1)
    watch = DcpDecoder(densemla.plan(smallest)).watch
    check_merges(device, watch, found)
    check_gathers(device, found)
    report["collectives"] = collectives(device, options.heads, watch)
    report["steps"] = measure(device, options.tokens, options.heads, options.backend, with_decode=False)
    write(report, options.out)
    # After the first report: where the decode fails, the merge has been measured all the same.
    check_decodes(device, options.backend, found)
    report["steps"] = measure(device, options.tokens, options.heads, options.backend, with_decode=True)
    write(report, options.out)
    if dist.get_rank() == 0:
        print(markdown(report))
    dist.destroy_process_group()
    sys.exit(any(line.startswith("FAILED") for line in found))


if __name__ == "__main__":
    main()
