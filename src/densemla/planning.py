"""From caps to a plan: which backend, how many splits, which scratch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .backends import Backend, resolve
from .caps import Caps
from .checks import check_int, is_int
from .errors import ContractError
from .splits import ceil_div, default_num_splits, launch_splits

PARTIAL_OUTPUT = "partial_output"
PARTIAL_LSE = "partial_lse"


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """One scratch tensor: contiguous, of this shape and dtype, on the plan's device."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Plan:
    """How every step that fits ``caps`` is decoded. Made by :func:`plan`; immutable and reusable.

    ``dataclasses.replace`` raises :class:`ContractError` for fields that do not fit each other.

    Attributes:
        caps: what was asked for, options resolved.
        backend: name of the backend that runs it.
        num_splits: splits that a graph launches, and the most that any request is cut into.
        chunks_per_split: 64-token chunks per split of a request at full capacity.
        single_split_chunks: the resolved threshold: a request of at most this many chunks is one split.
    """

    caps: Caps
    backend: str
    num_splits: int
    chunks_per_split: int
    single_split_chunks: int
    _backend: Backend = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        caps, backend = self.caps, self._backend
        if not isinstance(caps, Caps):
            raise ContractError("caps", "a densemla.Caps", type(caps).__name__)
        if self.backend != backend.name:
            raise ContractError("backend", f"{backend.name!r}, which the plan was made for", repr(self.backend))
        if (why := backend.refusal(caps)) is not None:
            raise ContractError("caps", f"caps that {backend.name!r} can run here", why)
        check_int("num_splits", self.num_splits, 1, backend.most_splits)
        per_split = ceil_div(caps.max_chunks, self.num_splits)
        if self.chunks_per_split != per_split:
            raise ContractError(
                "chunks_per_split",
                f"{per_split}, as num_splits = {self.num_splits} has it",
                repr(self.chunks_per_split),
            )
        check_int("single_split_chunks", self.single_split_chunks, 0)

    @property
    def partial_dtype(self) -> torch.dtype:
        """Type in which a split's output waits for the merge."""
        assert self.caps.partial_dtype is not None
        return self.caps.partial_dtype

    def scratch_specs(self) -> dict[str, ScratchSpec]:
        """The scratch tensors that :func:`densemla.bind` wants, by name.

        ``partial_output`` [num_splits, max_total_q, num_q_heads, kv_lora_rank] in the partial dtype and
        ``partial_lse`` [num_splits, max_total_q, num_q_heads] float32 (natural log, -inf for an empty
        split) are common to all backends; a backend may add workspace of its own.
        """
        caps = self.caps
        rows = (self.num_splits, caps.max_total_q, caps.num_q_heads)
        specs = {
            PARTIAL_OUTPUT: ScratchSpec((*rows, caps.kv_lora_rank), self.partial_dtype),
            PARTIAL_LSE: ScratchSpec(rows, torch.float32),
        }
        for name, (shape, dtype) in self._backend.workspace(caps, self.num_splits).items():
            specs[name] = ScratchSpec(shape, dtype)
        return specs

    def empty_scratch(self) -> dict[str, torch.Tensor]:
        """Uninitialised scratch. One set serves every layer that runs one after another."""
        return {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=self.caps.device)
            for name, spec in self.scratch_specs().items()
        }

    def launch_splits(self, longest_cache_seqlen: int) -> int:
        """``active_splits`` for an eager step whose longest visible length is known on the host.

        Raises:
            ContractError: the length is no int from 0 to ``max_cache_tokens``.
        """
        length, most = longest_cache_seqlen, self.caps.max_cache_tokens
        if not is_int(length, 0, most):
            raise ContractError("longest_cache_seqlen", f"an int from 0 to max_cache_tokens = {most}", repr(length))
        return launch_splits(longest_cache_seqlen, self.num_splits, self.single_split_chunks)

    def supports(self, name: str) -> bool:
        """Whether this plan honours a feature; names it doesn't know are False, so callers can probe.

        Names: arguments of :func:`densemla.bind` (``"query_cache_seqlens"``, ``"cu_seqlens_q"``,
        ``"q_scale"``, ``"kv_scale"``, ``"active_splits"``), split options (``"partial_dtype"``,
        ``"single_split_chunks"``), and ``"graph_capture"``.
        """
        if not isinstance(name, str):
            raise ContractError("name", "the name of a feature", repr(name))
        if name == "kv_scale":
            return self.caps.kv_format.scaled
        if name == "q_scale":
            return self.caps.q_dtype is torch.float8_e4m3fn
        return name in self._backend.features


def plan(caps: Caps) -> Plan:
    """Choose a backend and the splits for ``caps``. Pure: allocates nothing, launches nothing.

    Raises:
        ContractError: the backend asked for can't run here or can't honour a field; the message says why.
    """
    if not isinstance(caps, Caps):
        raise ContractError("caps", "a densemla.Caps", type(caps).__name__)
    backend = resolve(caps)
    limit = caps.max_splits if caps.max_splits is not None else backend.most_splits
    if caps.num_splits is not None:
        if caps.num_splits > backend.most_splits:
            raise ContractError(
                "num_splits", f"at most {backend.most_splits} (backend {backend.name})", caps.num_splits
            )
        num_splits = caps.num_splits
    else:
        rows, lanes = backend.occupancy(caps)
        num_splits = default_num_splits(caps.max_chunks, rows, lanes, min(limit, backend.most_splits))
    per_split = ceil_div(caps.max_chunks, num_splits)
    threshold = caps.single_split_chunks
    assert threshold is not None
    return Plan(
        caps=caps,
        backend=backend.name,
        num_splits=num_splits,
        chunks_per_split=per_split,
        single_split_chunks=per_split if threshold == -1 else threshold,
        _backend=backend,
    )
