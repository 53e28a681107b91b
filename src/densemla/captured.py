"""Decode steps and their results as safetensors files: save, load, run, check.

A step holds the tensors ``q``, ``kv_cache``, ``page_table`` and ``cache_seqlens``, and where they apply
``cu_seqlens_q``, ``query_cache_seqlens``, ``q_scale`` and ``kv_scale``, with the shapes of
:func:`densemla.bind`; its metadata holds ``sm_scale`` and, where it is not 512, ``kv_lora_rank``.
Tensors and metadata whose names begin with ``layer.`` may say where the step came from; nothing else is
allowed, because a misspelt optional name would otherwise change the answer in silence.

A result holds ``output`` and ``lse`` (natural log); its metadata may say how it was made, and with
``input_sha256`` from which file. Results of other software can be checked as well: all of it is optional.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .backends.reference import decode_float64
from .binding import bind
from .caps import Caps
from .checks import check_dims
from .decoding import decode
from .device import usable
from .errors import ContractError
from .options import SplitOptions, check_partial_dtype
from .planning import plan

PROVENANCE = "layer."
"""Prefix of tensors and metadata that tell where a step came from."""

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Largest ``|output - float64| / |float64|`` of a head that :func:`check` accepts, by the coarsest type that
the result went through. A rounding of bf16 is at most 4e-3 per element."""

LSE_TOLERANCE = 1e-3
"""Largest ``|lse - float64| / max(1, |float64|)``; the LSE is float32 under every option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """One decode step; shapes and meanings are those of :func:`densemla.bind`."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    sm_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    query_cache_seqlens: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    kv_scale: torch.Tensor | None = None
    kv_lora_rank: int = 512

    def tensors(self) -> dict[str, Any]:
        """The tensors that the step has, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def to(self, device: str | torch.device) -> CapturedStep:
        """The step on ``device``, or a :class:`ContractError` if torch can't use that here."""
        target = usable(device)
        return replace(self, **{name: tensor.to(target) for name, tensor in self.tensors().items()})

    def decode(self, options: SplitOptions | None, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        """``(output, lse)`` as :func:`densemla.decode` gives them; None for a backend without split options."""
        return decode(
            **self.tensors(),
            sm_scale=self.sm_scale,
            kv_lora_rank=self.kv_lora_rank,
            partial_dtype=None if options is None else options.partial_dtype,
            single_split_chunks=None if options is None else options.single_split_chunks,
            backend=backend,
        )

    def decode_float64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and natural-log LSE in float64, unrounded; a step in host memory."""
        for name, dims in (("q", 3), ("kv_cache", 3), ("page_table", 2)):
            check_dims(name, getattr(self, name), dims)
        page_size, width = self.kv_cache.shape[1], self.page_table.shape[1]
        caps = Caps(
            num_q_heads=self.q.shape[1],
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.q.shape[2] - self.kv_lora_rank,
            page_size=page_size,
            max_total_q=max(self.q.shape[0], 1),
            max_batch=max(self.page_table.shape[0], 1),
            max_cache_tokens=max(width * page_size, 1),
            q_dtype=self.q.dtype,
            kv_dtype=self.kv_cache.dtype,
            backend="reference",
        )
        chosen = plan(caps)
        rows = self.q.shape[:2]
        return decode_float64(
            bind(
                chosen,
                scratch=chosen.empty_scratch(),
                output=torch.empty(*rows, self.kv_lora_rank, dtype=caps.output_dtype, device="cpu"),
                lse=torch.empty(rows, dtype=torch.float32, device="cpu"),
                sm_scale=self.sm_scale,
                **self.tensors(),
            )
        )


_REQUIRED = tuple(field.name for field in fields(CapturedStep) if field.type == "torch.Tensor")
_OPTIONAL = tuple(field.name for field in fields(CapturedStep) if field.type == "torch.Tensor | None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a step decoded to: ``output``, ``lse`` (natural log) and how, in words."""

    output: torch.Tensor
    lse: torch.Tensor
    metadata: Mapping[str, str]

    @property
    def tolerance(self) -> float:
        """That of the coarsest type it went through; partials of unknown type count as the output's."""
        partial = self.metadata.get("partial_dtype")
        partial_dtype = self.output.dtype if partial is None else check_partial_dtype(partial)
        return max(TOLERANCES[self.output.dtype], TOLERANCES[partial_dtype])


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    path.open("rb").close()  # raises an OSError that names the file; safetensors' own does not
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ContractError(str(path), "a safetensors file", error) from error


def check_target(path: Path) -> None:
    """Refuse a name under which no file can be written or replaced.

    Raises:
        IsADirectoryError: it is a directory.
        ContractError: it is a device, a pipe or a socket, in whose place a file would come.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise ContractError(str(path), "a file to write", "a device, a pipe or a socket")


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write all or nothing: a reader never sees half a file."""
    check_target(path)
    part = path.with_name(path.name + ".part")
    # Copies, because the format holds neither strides nor tensors that share memory.
    copies = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    data = save(copies, dict(metadata))
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        # Of the part file the caller knows nothing.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def save_step(
    path: Path,
    step: CapturedStep,
    *,
    provenance: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a step; ``provenance`` and ``metadata`` are stored under names that begin with ``layer.``.

    Raises as :func:`check_target` does, or an ``OSError`` with the name of ``path``; then nothing is left there.
    """
    extra = {PROVENANCE + name: tensor for name, tensor in (provenance or {}).items()}
    words = {PROVENANCE + name: text for name, text in (metadata or {}).items()}
    words["sm_scale"] = repr(step.sm_scale)
    words["kv_lora_rank"] = str(step.kv_lora_rank)
    _write(path, {**step.tensors(), **extra}, words)


def load_step(path: Path) -> CapturedStep:
    """Read a step.

    Raises:
        ContractError: the file is not safetensors, lacks a tensor or ``sm_scale``, or holds a name that no
            step has; the message says which.
        OSError: the file can't be read.
    """
    tensors, metadata = _read(path)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PROVENANCE)}
    metadata = {name: text for name, text in metadata.items() if not name.startswith(PROVENANCE)}
    for name in _REQUIRED:
        if name not in tensors:
            raise ContractError(
                f"{path}: {name}", f"a tensor of this name (a step has {', '.join(_REQUIRED)})", _listed(tensors)
            )
    for name in tensors:
        if name not in (*_REQUIRED, *_OPTIONAL):
            raise ContractError(
                f"{path}: {name}",
                f"only {', '.join((*_REQUIRED, *_OPTIONAL))}, or a name that begins with {PROVENANCE!r}",
                "a tensor of that name",
            )
    for name in metadata:
        # Libraries that save tensors state their own "format".
        if name not in ("sm_scale", "kv_lora_rank", "format"):
            raise ContractError(
                f"{path}: metadata {name}",
                f"only sm_scale, kv_lora_rank, or a name that begins with {PROVENANCE!r}",
                repr(metadata[name]),
            )
    if "sm_scale" not in metadata:
        raise ContractError(
            f"{path}: sm_scale",
            "it in the metadata: save_file(tensors, path, metadata={'sm_scale': '0.0722'})",
            _listed(metadata),
        )
    try:
        sm_scale = float(metadata["sm_scale"])
        kv_lora_rank = int(metadata.get("kv_lora_rank", "512"))
    except ValueError as error:
        raise ContractError(f"{path}: metadata", "sm_scale a number and kv_lora_rank an int", error) from error
    return CapturedStep(**tensors, sm_scale=sm_scale, kv_lora_rank=kv_lora_rank)


def _listed(names: Mapping[str, object]) -> str:
    return "a file with " + (", ".join(sorted(names)) or "none")


def save_result(path: Path, result: Result) -> None:
    _write(path, {"output": result.output, "lse": result.lse}, result.metadata)


def load_result(path: Path, input_path: Path) -> Result:
    """Read a result that was made from the step in ``input_path``; raises as :func:`load_step` does."""
    tensors, metadata = _read(path)
    for name in ("output", "lse"):
        if name not in tensors:
            raise ContractError(f"{path}: {name}", "a tensor of this name (a result has output, lse)", _listed(tensors))
    if (partial := metadata.get("partial_dtype")) is not None:
        check_partial_dtype(partial, f"{path}: partial_dtype")
    made_from, came = metadata.get("input_sha256"), sha256(input_path)
    if made_from is not None and made_from != came:
        raise ContractError(f"{path}: input_sha256", f"{came}, which {input_path} has", made_from)
    return Result(output=tensors["output"], lse=tensors["lse"], metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCheck:
    """How far one query's rows are from float64.

    Attributes:
        query: index of the query row.
        error: the worst head's ``|output - float64| / |float64|``; NaN where only one of the two is NaN.
        worst_head: that head.
        lse_error: the worst head's ``|lse - float64| / max(1, |float64|)``.
        heads_off: heads beyond a tolerance. A query that sees nothing must give exactly 0 and -inf.
    """

    query: int
    error: float
    worst_head: int
    lse_error: float
    heads_off: int


def check(step: CapturedStep, result: Result, tolerance: float | None = None) -> list[QueryCheck]:
    """Compare a result with float64, query by query.

    Args:
        tolerance: largest relative error of a head; None is ``result.tolerance``.

    Raises:
        ContractError: the result's shapes or types are not those of the step, or the step is no good.
    """
    exact, exact_lse = step.decode_float64()
    output, lse = result.output, result.lse
    if tuple(output.shape) != tuple(exact.shape) or output.dtype not in TOLERANCES:
        raise ContractError(
            "output", f"{list(exact.shape)} in bf16, float16 or float32", f"{output.dtype} {list(output.shape)}"
        )
    if tuple(lse.shape) != tuple(exact_lse.shape) or lse.dtype is not torch.float32:
        raise ContractError("lse", f"float32 {list(exact_lse.shape)}", f"{lse.dtype} {list(lse.shape)}")
    limit = result.tolerance if tolerance is None else tolerance
    if not limit > 0:
        raise ContractError("tolerance", "a number above 0", limit)
    unseen = exact_lse == -torch.inf
    distance = _difference(output, exact).norm(dim=-1)
    # Of rows that see nothing, the size of the wrong answer; of an exact answer 0, also where float64 is 0.
    errors = torch.where(
        unseen | (distance == 0), distance, distance / torch.where(exact.isfinite(), exact, 0.0).norm(dim=-1)
    )
    lse_errors = _difference(lse, exact_lse).abs() / torch.where(exact_lse.isnan(), 1.0, exact_lse.abs().clamp_min(1))
    lse_errors = torch.where(unseen, torch.where(lse == -torch.inf, 0.0, torch.inf), lse_errors)
    # NaN > limit is False, so ask the other way.
    good = torch.where(unseen, errors == 0, errors <= limit) & (lse_errors <= LSE_TOLERANCE)
    # NaN counts as the worst of all.
    ranked = errors.nan_to_num(nan=torch.inf)
    return [
        QueryCheck(
            query=query,
            error=float(errors[query, head]),
            worst_head=head,
            lse_error=float(lse_errors[query].max()),
            heads_off=int((~good[query]).sum()),
        )
        for query, head in enumerate(ranked.argmax(-1).tolist())
    ]


def largest(errors: Iterable[float]) -> float:
    """The largest; NaN is larger than all, and none at all is 0."""
    return max(errors, default=0.0, key=lambda error: math.inf if math.isnan(error) else error)


def _difference(tensor: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """``tensor - exact`` in float64, 0 where both are the same infinity or both are NaN."""
    same = (tensor == exact) | (tensor.isnan() & exact.isnan())
    return torch.where(same, 0.0, tensor.double() - exact)
