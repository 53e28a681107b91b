"""Results as a person reads them (rich) and as a program does (JSON)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from . import presets
from .captured import LSE_TOLERANCE, CapturedStep, QueryCheck, Result, largest
from .doctor import Finding, State
from .inputs import LOGITS
from .study import ONE_SPLIT, Study, StudyRow

_ERROR_TEXT = (
    "error: root mean square over the heads of |output - float64| / |float64|. "
    "added: that over the one-split run's. differ: output elements with other bits than the one-split run's."
)


def _table(*columns: str, title: str | None = None, text_columns: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right", no_wrap=i >= text_columns)
    return table


def presets_table() -> Table:
    table = _table("preset", "what", "q heads", "latent", "rope", "page", "sm_scale", text_columns=2)
    for preset in presets.PRESETS.values():
        table.add_row(
            preset.name,
            preset.note,
            str(preset.num_q_heads),
            str(preset.kv_lora_rank),
            str(preset.qk_rope_head_dim),
            str(preset.page_size),
            f"{preset.sm_scale:.4f}",
        )
    return table


_STATE_STYLES = {State.OK: "green", State.NOTE: "dim", State.PROBLEM: "bold red"}


def doctor_table(findings: Iterable[Finding]) -> Table:
    table = _table("what", "state", "finding", text_columns=3)
    for finding in findings:
        table.add_row(Text(finding.subject), Text(finding.state, _STATE_STYLES[finding.state]), Text(finding.text))
    return table


def study_tables(study: Study) -> Iterable[Table]:
    """One table for each kind of logits."""
    for logits in study.config.logits:
        table = _table(
            "tokens",
            "partial",
            "one split\nup to",
            "live\nchunks",
            "splits",
            "error",
            "added",
            "differ",
            "time\nms",
            "GB/s",
            title=LOGITS[logits],
            text_columns=0,
        )
        rows = [row for row in study.rows if row.logits == logits]
        for i, row in enumerate(rows):
            first = row.threshold == ONE_SPLIT
            table.add_row(
                f"{row.tokens}" if first else "",
                row.partial_dtype or "-",
                _threshold(row, study),
                f"{row.live_chunks}",
                f"{row.splits}",
                _scientific(row.error),
                "" if first else _signed(row.added),
                "" if first else _share(row.differing),
                _short(row.time_us / 1e3),
                _short(row.gb_per_s),
                end_section=i + 1 < len(rows) and rows[i + 1].threshold == ONE_SPLIT,
            )
        yield table


def _scientific(value: float) -> str:
    """Like 1.65e-3: without the padding zero of Python's exponent."""
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _short(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _signed(ratio: float) -> str:
    if ratio > 10:
        return f"x{ratio + 1:.0f}" if math.isfinite(ratio) else "new"
    # Adding 0 turns -0.0 into 0.0.
    return f"{round(ratio, 3) + 0.0:+.1%}"


def _share(ratio: float) -> str:
    """A share in which exactly 0 can be told from nearly 0."""
    if ratio == 0:
        return "0"
    return f"{ratio:.2%}" if ratio >= 1e-4 else "<0.01%"


def _threshold(row: StudyRow, study: Study) -> str:
    return f"-1 = {study.default_threshold}" if row.threshold == -1 else str(row.threshold)


def study_header(study: Study) -> str:
    config = study.config
    return (
        f"{config.preset.name}: {config.preset.num_q_heads} heads, q {dtype_name(config.q_dtype)}, "
        f"cache {dtype_name(config.kv_dtype)}, one request, one query, on {config.device} "
        f"(backend {study.backend}), seed {config.seed}. "
        f"The plan for {config.capacity} tokens has {study.num_splits} splits; "
        f"single_split_chunks -1 is {study.default_threshold} chunks of 64 tokens here."
    )


def study_summary(study: Study) -> list[str]:
    lines = [_ERROR_TEXT]
    for name in ("bf16", "fp32"):
        if rows := study.split_rows(name):
            low, high = min(row.added for row in rows), max(row.added for row in rows)
            lines.append(f"{name} partials, where split: {_signed(low)} to {_signed(high)} error over one split.")
    pairs = list(zip(study.split_rows("bf16"), study.split_rows("fp32"), strict=True))
    if pairs:
        below = sum(fp32.error < bf16.error for bf16, fp32 in pairs)
        lines.append(f"fp32 partials have the smaller error in {below} of {len(pairs)} split cases.")
    if rows := study.unsplit_rows():
        equal = sum(row.differing == 0 for row in rows)
        lines.append(f"Left in one split: {equal} of {len(rows)} rows equal the one-split run in every bit.")
    return lines


def study_json(study: Study, version: str) -> dict[str, Any]:
    config = study.config
    return {
        "densemla": version,
        "torch": torch.__version__,
        "device": device_name(torch.device(config.device)),
        "backend": study.backend,
        "preset": asdict(config.preset),
        "q_dtype": dtype_name(config.q_dtype),
        "kv_dtype": dtype_name(config.kv_dtype),
        "capacity": config.capacity,
        "num_splits": study.num_splits,
        "default_single_split_chunks": study.default_threshold,
        "repeat": config.repeat,
        "seed": config.seed,
        "logits": {name: LOGITS[name] for name in config.logits},
        "rows": [asdict(row) for row in study.rows],
    }


def decoded(result: Result, path: Path) -> str:
    names = ("backend", "partial_dtype", "single_split_chunks")
    words = ", ".join(f"{name} {result.metadata[name]}" for name in names if name in result.metadata)
    shape = " x ".join(str(size) for size in result.output.shape)
    return f"{path}: output {shape} {dtype_name(result.output.dtype)} and lse ({words})"


def check_summary(checks: Sequence[QueryCheck], result: Result, tolerance: float | None) -> str:
    limit = result.tolerance if tolerance is None else tolerance
    off = sum(query.heads_off > 0 for query in checks)
    verdict = f"{off} of {len(checks)} queries are off" if off else f"all {len(checks)} queries agree with float64"
    worst = _scientific(largest(query.error for query in checks))
    lse = _scientific(largest(query.lse_error for query in checks))
    return (
        f"{verdict}: worst |output - float64| / |float64| of a head {worst} (tolerance {_scientific(limit)}), "
        f"worst lse error {lse} (tolerance {_scientific(LSE_TOLERANCE)})"
    )


def check_table(checks: Sequence[QueryCheck], step: CapturedStep, most: int = 20) -> Table:
    """The queries that are off, at most ``most``."""
    off = [query for query in checks if query.heads_off]
    table = _table(
        "query",
        "request",
        "cache_seqlen",
        "heads off",
        "worst head",
        "error",
        "lse error",
        title=f"the first {most} of {len(off)}" if len(off) > most else None,
        text_columns=0,
    )
    sums = step.cu_seqlens_q.tolist() if step.cu_seqlens_q is not None else list(range(len(checks) + 1))
    for query in off[:most]:
        request = bisect_right(sums, query.query) - 1
        inside = request < len(step.cache_seqlens)
        table.add_row(
            str(query.query),
            str(request) if inside else "none",
            str(int(step.cache_seqlens[request])) if inside else "0",
            f"{query.heads_off} of {step.q.shape[1]}",
            str(query.worst_head),
            _scientific(query.error),
            _scientific(query.lse_error),
        )
    return table


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads"
