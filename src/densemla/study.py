"""What each precision option costs and gains: one decode under all of them, against float64."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import splits
from .backends.reference import attend
from .binding import Binding, bind
from .caps import MOST_TOKENS, Caps
from .checks import check_int
from .decoding import compile as compile_binding
from .decoding import run
from .device import current, usable
from .errors import ContractError
from .inputs import LOGITS, RandomStep, random_step
from .merging import merge
from .options import PARTIAL_DTYPES
from .planning import plan
from .presets import Preset

DEFAULT_TOKENS = (1024, 4096, 16384, 32768)
DEFAULT_THRESHOLDS = (-1, 0)
ONE_SPLIT = "all"
"""Stands in a threshold's place for the run that scans every request with one split."""

_REFERENCE_TOKENS = 8192
_GRAPH_REPLAYS = 20
_ROUND_SECONDS = 0.1
"""What a timed round of all options may cost before no more are added to those asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """What to measure.

    Attributes:
        tokens: context lengths; each is a step of one request and one query.
        capacity: ``Caps.max_cache_tokens``; it fixes how many splits the plan has.
        thresholds: values of ``single_split_chunks``; each is run with both partial types, beside one run
            in which one split scans everything.
        logits: keys of :data:`densemla.inputs.LOGITS`.
        device: cpu, cuda or cuda:N.
        repeat: fewest timed runs of each option; they alternate, and the median counts. Short steps get more.
    """

    preset: Preset
    tokens: Sequence[int] = DEFAULT_TOKENS
    capacity: int = 131072
    thresholds: Sequence[int] = DEFAULT_THRESHOLDS
    logits: Sequence[str] = tuple(LOGITS)
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | str = torch.bfloat16
    device: str = "cpu"
    backend: str = "auto"
    repeat: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "thresholds", "logits"):
            if not getattr(self, name):
                raise ContractError(name, "at least one", "none")
        check_int("capacity", self.capacity, 1, MOST_TOKENS)
        for tokens in self.tokens:
            if not 1 <= tokens <= self.capacity:
                raise ContractError("tokens", f"1 to the capacity of {self.capacity}", tokens)
        if self.repeat < 1:
            raise ContractError("repeat", "at least 1", self.repeat)
        usable(self.device)

    def caps(self, partial_dtype: torch.dtype, single_split_chunks: int) -> Caps:
        shape = self.preset
        return Caps(
            device=torch.device(self.device),
            num_q_heads=shape.num_q_heads,
            kv_lora_rank=shape.kv_lora_rank,
            qk_rope_head_dim=shape.qk_rope_head_dim,
            page_size=shape.page_size,
            max_cache_tokens=self.capacity,
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            partial_dtype=partial_dtype,
            single_split_chunks=single_split_chunks,
            backend=self.backend,
        )

    @property
    def steps(self) -> int:
        """How often :func:`study` reports progress."""
        return len(self.logits) * len(self.tokens) * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One option at one context length.

    Attributes:
        partial_dtype: ``"bf16"`` or ``"fp32"``; None for the one-split run, which has no partials.
        threshold: ``single_split_chunks`` as asked for, or :data:`ONE_SPLIT`.
        live_chunks: 64-token chunks of the request.
        splits: splits that scan at least one of them.
        error: root mean square over the heads of ``|output - float64| / |float64|``.
        max_error: the worst head's.
        added: ``error`` over the one-split run's, less 1.
        differing: share of output elements whose bits differ from the one-split run's.
        time_us: median time of a run, in microseconds.
        gb_per_s: bytes of the visible cache, read once, over that time.
    """

    logits: str
    tokens: int
    partial_dtype: str | None
    threshold: int | str
    live_chunks: int
    splits: int
    error: float
    max_error: float
    added: float
    differing: float
    time_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Rows, in the order logits, tokens, option (the one-split run first), and the plan behind them."""

    config: StudyConfig
    backend: str
    num_splits: int
    default_threshold: int
    """What -1 stands for: the plan's ``chunks_per_split``."""
    rows: list[StudyRow]

    def split_rows(self, partial_dtype: str) -> list[StudyRow]:
        """Rows with this partial type in which it matters: more than one split."""
        return [row for row in self.rows if row.partial_dtype == partial_dtype and row.splits > 1]

    def unsplit_rows(self) -> list[StudyRow]:
        """Rows that an option left in one split."""
        return [row for row in self.rows if row.partial_dtype is not None and row.splits == 1]


def study(config: StudyConfig, on_step: Callable[[str], None] = lambda _: None) -> Study:
    """Run every option on every input.

    Args:
        on_step: told what comes next, ``config.steps`` times.

    Raises:
        ContractError: the backend can't run the preset here, or follows no split options.
    """
    with current(torch.device(config.device)):
        return _study(config, on_step)


def _study(config: StudyConfig, on_step: Callable[[str], None]) -> Study:
    default_plan = plan(config.caps(torch.bfloat16, -1))
    if not default_plan.supports("partial_dtype"):
        raise ContractError("backend", "one that follows the split options, which a study compares", config.backend)
    one_split = config.caps(torch.float32, splits.ceil_div(config.capacity, splits.CHUNK_TOKENS))
    options: list[tuple[str | None, int | str, Caps]] = [(None, ONE_SPLIT, one_split)]
    for threshold in config.thresholds:
        for name, dtype in PARTIAL_DTYPES.items():
            options.append((name, threshold, config.caps(dtype, threshold)))
    rows = []
    for logits in config.logits:
        for tokens in config.tokens:
            case = f"{tokens} tokens, {logits}"
            on_step(f"{case}: drawing inputs")
            step = random_step(one_split, [tokens], logits=logits, seed=config.seed)
            bindings = [_bind(caps, step, tokens, config.preset.sm_scale) for _, _, caps in options]
            on_step(f"{case}: float64")
            exact = decode_in_blocks(bindings[0])
            on_step(f"{case}: {len(options)} options")
            times = _time_us(bindings, config.repeat)
            one_error = _errors(bindings[0].output, exact)[0]
            for option, binding, time_us in zip(options, bindings, times, strict=True):
                error, max_error = _errors(binding.output, exact)
                chunks = splits.live_chunks(tokens)
                launched, single = binding.active_splits, binding.plan.single_split_chunks
                rows.append(
                    StudyRow(
                        logits=logits,
                        tokens=tokens,
                        partial_dtype=option[0],
                        threshold=option[1],
                        live_chunks=chunks,
                        splits=splits.live_splits(chunks, launched, single),
                        error=error,
                        max_error=max_error,
                        added=_added(error, one_error),
                        differing=_differing(binding.output, bindings[0].output),
                        time_us=time_us,
                        gb_per_s=tokens * one_split.kv_format.row_bytes / time_us / 1e3,
                    )
                )
    return Study(
        config=config,
        backend=default_plan.backend,
        num_splits=default_plan.num_splits,
        default_threshold=default_plan.single_split_chunks,
        rows=rows,
    )


def _bind(caps: Caps, step: RandomStep, tokens: int, sm_scale: float) -> Binding:
    chosen = plan(caps)
    rows = (1, caps.num_q_heads)
    return bind(
        chosen,
        scratch=chosen.empty_scratch(),
        q=step.q,
        kv_cache=step.kv_cache,
        # NaN: an element that no split writes must show in the error.
        output=torch.full((*rows, caps.kv_lora_rank), torch.nan, dtype=caps.output_dtype, device=caps.device),
        lse=torch.full(rows, torch.nan, device=caps.device),
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        sm_scale=sm_scale,
        active_splits=chosen.launch_splits(tokens),
    )


def decode_in_blocks(binding: Binding) -> torch.Tensor:
    """The float64 output [1, num_q_heads, kv_lora_rank] of a step of one request and one query.

    Scans 8192 tokens at a time, on the step's own device, so that memory stays bounded at any length.
    """
    caps = binding.plan.caps
    fmt, page_size = caps.kv_format, caps.page_size
    tokens = int(binding.cache_seqlens)
    q = binding.q[0].double()
    outputs, lses = [], []
    for start in range(0, tokens, _REFERENCE_TOKENS):
        end = min(start + _REFERENCE_TOKENS, tokens)
        first = start // page_size
        pages = binding.page_table[0, first : splits.ceil_div(end, page_size)].long()
        offset = start - first * page_size
        stored = binding.kv_cache[pages].reshape(-1, fmt.row_width)[offset : offset + end - start]
        rows = q.new_empty(end - start, caps.head_dim)
        fmt.widen(stored, rows)
        output, lse = attend(q, rows, caps.kv_lora_rank, binding.sm_scale)
        outputs.append(output)
        lses.append(lse)
    return merge(torch.stack(outputs), torch.stack(lses))[0].unsqueeze(0)


def relative_errors(output: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """``|output - exact| / |exact|`` [..., num_q_heads] in float64, the output as returned, not rounded further."""
    errors: torch.Tensor = (output.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return errors


def _errors(output: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    errors = relative_errors(output, exact)
    return float(errors.square().mean().sqrt()), float(errors.max())


def _added(error: float, one_error: float) -> float:
    # A request of one token is copied, without error.
    if error == one_error:
        return 0.0
    return error / one_error - 1 if one_error else math.inf


def _differing(output: torch.Tensor, other: torch.Tensor) -> float:
    bits = {2: torch.int16, 4: torch.int32}[output.dtype.itemsize]
    return float((output.view(bits) != other.view(bits)).double().mean())


def _time_us(bindings: Sequence[Binding], repeat: int) -> list[float]:
    """Median microseconds per run. Rounds alternate, so that the machine's mood is shared."""
    calls = [_timed_call(binding) for binding in bindings]
    rounds: list[list[float]] = []
    end = time.perf_counter() + repeat * _ROUND_SECONDS
    while len(rounds) < repeat or time.perf_counter() < end:
        rounds.append([call() for call in calls])
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _timed_call(binding: Binding) -> Callable[[], float]:
    """Warm a binding; the result runs it and returns the microseconds."""
    compile_binding(binding)
    run(binding)
    if binding.plan.caps.device.type != "cuda":

        def on_host() -> float:
            start = time.perf_counter()
            run(binding)
            return (time.perf_counter() - start) * 1e6

        return on_host

    # A graph, because launching from Python takes longer than a short step.
    torch.cuda.synchronize(binding.plan.caps.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(binding)

    def on_device() -> float:
        start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        start.record()
        for _ in range(_GRAPH_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / _GRAPH_REPLAYS

    return on_device
