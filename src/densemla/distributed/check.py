"""``densemla dcp-check``: is the merge across these ranks right, and what does it cost?"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .. import captured, decoding
from ..caps import Caps
from ..checks import check_result_file
from ..errors import ContractError
from ..inputs import RandomStep, random_step
from ..options import PARTIAL_DTYPES
from ..planning import plan
from ..splits import ceil_div
from .collectives import Group, PeerError, end_soon_after_a_timeout
from .dcp import DcpBinding, DcpDecoder, Form
from .gather import all_gatherv
from .lse_merge import FORMS
from .sharding import check_layout, local_length, local_positions

_SM_SCALE = 192**-0.5
_HEADS_PER_RANK = 12
_REPLAYS = 10


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One form and partial type against float64.

    Attributes:
        error: the worst head's ``|output - float64| / |float64|``.
        lse_error: the worst head's ``|lse - float64| / max(1, |float64|)``.
        heads_off: heads beyond what the types allow; 0 is a pass.
        step_us: median time of a whole step, rank 0.
        decode_us: of that the local decode, timed by itself.
    """

    form: Form
    partial_dtype: str
    error: float
    lse_error: float
    heads_off: int
    step_us: float
    decode_us: float


def dcp_check(
    *,
    tokens: Annotated[int, typer.Option(help="Longest request; others of a third, of one token and of none.")] = 4096,
    queries: Annotated[int, typer.Option(help="Queries of each request.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads of all ranks together; 0: 12 for each rank.")] = 0,
    interleave: Annotated[int, typer.Option(help="Consecutive tokens on one rank.")] = 1,
    backend: Annotated[str, typer.Option(help="Decode backend.")] = "auto",
    transport: Annotated[str, typer.Option(help="gloo, nccl, or auto: NCCL where each rank has a GPU.")] = "auto",
    repeat: Annotated[int, typer.Option(help="Timed steps.")] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds after which a missing rank is an error.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """Decode a step spread over the ranks and compare it with float64 on one (exit status 1 on a difference).

    Start it with torchrun --nproc-per-node N -m densemla.cli dcp-check; alone it is a group of one.
    """
    for name, value, least in (
        ("tokens", tokens, 1),
        ("queries", queries, 1),
        ("heads", heads, 0),
        ("repeat", repeat, 1),
    ):
        if value < least:
            raise ContractError(name, f"at least {least}", value)
    if not 1e-3 <= timeout <= 1e6:
        raise ContractError("timeout", "seconds from 0.001 to 1000000", timeout)
    if os.environ.get("RANK", "0") == "0":
        check_result_file(json_file)
    failed = True
    try:
        device = join(transport, timeout)
        check_layout(dist.get_rank(), dist.get_world_size(), interleave)
        heads = heads or _HEADS_PER_RANK * dist.get_world_size()
        lengths = [tokens, tokens // 3, 1, 0]
        caps = Caps(
            device=device,
            num_q_heads=heads,
            max_total_q=len(lengths) * queries,
            max_batch=len(lengths),
            max_cache_tokens=tokens,
            backend=backend,
        )
        step = random_step(caps, lengths, queries=[queries] * len(lengths), seed=seed)
        failed = _check(caps, step, interleave, repeat, json_file)
    except PeerError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if failed:
        raise typer.Exit(1)


def join(transport: str, timeout: float) -> torch.device:
    """Join torchrun's group, or make a group of one; the device this rank works on.

    Raises:
        ContractError: NCCL is asked for and there is not a GPU for each rank, or only a part of torchrun's
            environment is set.
        PeerError: the other ranks did not come.
    """
    if transport not in ("auto", "gloo", "nccl"):
        raise ContractError("transport", "auto, gloo or nccl", repr(transport))
    local_rank, local_world = _number("LOCAL_RANK", "0"), _number("LOCAL_WORLD_SIZE", "1")
    if transport == "auto":
        transport = "nccl" if torch.cuda.device_count() >= local_world else "gloo"
    device = torch.device("cpu")
    if transport == "nccl":
        if torch.cuda.device_count() < local_world:
            raise ContractError("transport", f"a GPU for each of the {local_world} ranks", torch.cuda.device_count())
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    end_soon_after_a_timeout()
    options: dict[str, Any] = {"device_id": device} if transport == "nccl" else {}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    try:
        dist.init_process_group(transport, timeout=timedelta(seconds=timeout), **options)
    except RuntimeError as error:
        raise PeerError(
            f"the ranks did not meet within {timeout:g} s. Start all of them, with one MASTER_ADDR and MASTER_PORT "
            f"(torchrun sets both). ({error})"
        ) from error
    except ValueError as error:
        names = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise ContractError("environment", f"{names} as torchrun sets them, or none of them", error) from error
    return device


def _number(variable: str, default: str) -> int:
    text = os.environ.get(variable, default)
    if not (text.isascii() and text.isdigit()):
        raise ContractError(variable, "a number, as torchrun sets it", repr(text))
    return int(text)


def _check(caps: Caps, step: RandomStep, interleave: int, repeat: int, path: Path | None) -> bool:
    """Run every form and partial type; whether any is off."""
    ranks = Group()
    local = replace(caps, max_cache_tokens=local_length(caps.max_cache_tokens, 0, ranks.world, interleave))
    rows = []
    for form, (name, partial_dtype) in product(FORMS, PARTIAL_DTYPES.items()):
        decoder = DcpDecoder(plan(replace(local, partial_dtype=partial_dtype)), interleave=interleave, form=form)
        binding = bind_step(decoder, step)
        step_us, decode_us = timed_us(decoder, binding, repeat)
        binding.output.fill_(torch.nan)
        binding.lse.fill_(torch.nan)
        decoder.run(binding)
        output, lse = all_gatherv(binding.output, 1), all_gatherv(binding.lse, 1)
        if ranks.rank == 0:
            rows.append(CheckRow(form, name, *_compare(step, output, lse, name), step_us, decode_us))
    if ranks.rank == 0:
        what = (
            f"{ranks.world} rank{'s' if ranks.world > 1 else ''} over {ranks.backend}, {caps.num_q_heads} heads, "
            f"backend {decoder.local_plan.backend}, "
            f"requests of {step.cache_seqlens.tolist()} tokens with {len(step.q) // len(step.cache_seqlens)} queries, "
            f"interleave {interleave}"
        )
        Console().print(what, highlight=False, soft_wrap=True)
        Console().print(_table(rows))
        if path is not None:
            path.write_text(json.dumps({"what": what, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    failed = any(row.heads_off for row in rows)
    return any(row[0] for row in ranks.exchange([failed], "the verdict"))


def bind_step(decoder: DcpDecoder, step: RandomStep) -> DcpBinding:
    """One rank's binding of a global step: its shard of the cache, its heads, outputs full of NaN."""
    caps = decoder.plan.caps
    own = slice(decoder.rank * decoder.own_heads, (decoder.rank + 1) * decoder.own_heads)
    pages, table = shard(step, decoder)
    rows = (step.q.shape[0], decoder.own_heads)
    return decoder.bind(
        q=step.q[:, own].contiguous(),
        kv_cache=pages,
        output=torch.full((*rows, caps.kv_lora_rank), torch.nan, dtype=caps.output_dtype, device=caps.device),
        lse=torch.full(rows, torch.nan, device=caps.device),
        page_table=table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        sm_scale=_SM_SCALE,
    )


def shard(step: RandomStep, decoder: DcpDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache and page table of this rank: its tokens of the global step's, everything else NaN and -1."""
    page = decoder.plan.caps.page_size
    global_pages, width = step.kv_cache, step.kv_cache.shape[2]
    lengths = step.cache_seqlens.tolist()
    layout = (decoder.rank, decoder.world, decoder.interleave)
    counts = [ceil_div(local_length(length, *layout), page) for length in lengths]
    pages = torch.empty(sum(counts), page, width, dtype=global_pages.dtype, device=global_pages.device)
    pages.view(torch.uint8).fill_(0xFF)
    table = torch.full((len(lengths), max(*counts, 1)), -1, dtype=torch.int32, device=global_pages.device)
    # From the last page down, so that a page's number is never its place in the request.
    last = sum(counts)
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = local_positions(length, *layout).to(global_pages.device)
        table[i, :count] = torch.arange(last - 1, last - 1 - count, -1, device=global_pages.device)
        last -= count
        rows = torch.arange(len(mine), device=mine.device)
        source = step.page_table[i].long()[mine // page]
        pages[table[i].long()[rows // page], rows % page] = global_pages[source, mine % page]
    return pages, table


def timed_us(decoder: DcpDecoder, binding: DcpBinding, repeat: int) -> tuple[float, float]:
    """Median microseconds of a step and of its local decode alone; on CUDA both as graph replays."""
    decoder.compile(binding)
    calls: list[Callable[[], None]] = [lambda: decoder.run(binding), lambda: decoding.run(binding.local)]
    step_us, decode_us = (_median_us(call, repeat, decoder if binding.q.is_cuda else None) for call in calls)
    return step_us, decode_us


def captured_graph(call: Callable[[], None]) -> Callable[[], None]:
    """``call`` as the replay of a CUDA graph, after a warm-up."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads go on, NCCL's watchdog among them.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def _median_us(call: Callable[[], None], repeat: int, decoder: DcpDecoder | None) -> float:
    """On the host's clock; with a decoder, which then watches over the ranks, on the device's over graph replays."""
    times = []
    if decoder is None:
        for _ in range(repeat):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times)
    replay = captured_graph(call)
    replay()
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Several in a row: ranks that start apart meet in the first one.
        start.record()
        for _ in range(_REPLAYS):
            replay()
        end.record()
        decoder.watch()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / _REPLAYS)
    return statistics.median(times)


def _compare(step: RandomStep, output: torch.Tensor, lse: torch.Tensor, partial: str) -> tuple[float, float, int]:
    whole = captured.CapturedStep(
        q=step.q,
        kv_cache=step.kv_cache,
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        sm_scale=_SM_SCALE,
    )
    result = captured.Result(output=output.cpu(), lse=lse.cpu(), metadata={"partial_dtype": partial})
    checks = captured.check(whole.to("cpu"), result)
    return (
        captured.largest(query.error for query in checks),
        captured.largest(query.lse_error for query in checks),
        sum(query.heads_off for query in checks),
    )


def _table(rows: list[CheckRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for name in ("form", "partial", "error", "lse error", "step µs", "decode µs", "verdict"):
        table.add_column(name, justify="left" if name in ("form", "partial", "verdict") else "right")
    for row in rows:
        verdict = f"[bold red]{row.heads_off} heads off" if row.heads_off else "[green]ok"
        numbers = f"{row.error:.2e}", f"{row.lse_error:.1e}", f"{row.step_us:.1f}", f"{row.decode_us:.1f}"
        table.add_row(row.form, row.partial_dtype, *numbers, verdict)
    return table
