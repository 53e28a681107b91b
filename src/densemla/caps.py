"""Caps: what a plan must be able to do, stated once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .checks import check_int
from .errors import ContractError
from .kv_formats import PACKED, KVFormat, kv_format
from .options import SplitOptions, check_partial_dtype, check_single_split_chunks
from .splits import CHUNK_TOKENS, ceil_div

_Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MOST_TOKENS = (1 << 31) - 1
"""Lengths are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Capacities and formats of a family of decode steps; hashable, so plans can be cached by it.

    Attributes:
        device: where every bound tensor lives.
        num_q_heads: query heads, 1 to 1024.
        kv_lora_rank: latent width; the first ``kv_lora_rank`` columns of a row are the values.
        qk_rope_head_dim: rope width; 0 for a layer without one.
        page_size: cache rows in a page, in tokens.
        max_total_q: most query rows in one step, over all requests.
        max_batch: most requests in one step.
        max_cache_tokens: longest visible length of one request, in tokens. Any value: it need not be a
            multiple of the page or of a chunk.
        q_dtype: bf16, float16, float32, or ``float8_e4m3fn`` (then ``q_scale`` applies).
        kv_dtype: bf16, float16, float32, ``float8_e4m3fn`` (then ``kv_scale`` applies), or
            ``"fp8_ds_mla"`` / ``torch.uint8`` for packed 656-byte records.
        output_dtype: bf16, float16 or float32, the type of ``output``; None is the query's type, bf16 for
            fp8 queries. Ranks that merge their results keep them in the partial type until then.
        partial_dtype: ``torch.bfloat16`` or ``torch.float32``; None reads the environment
            (``SplitOptions.from_env``).
        single_split_chunks: -1 the plan's ``chunks_per_split``, 0 balance every request, N the largest
            request (in 64-token chunks) that one split scans; None reads the environment.
        max_splits: upper bound for the plan's ``num_splits``; None leaves it to the backend.
        num_splits: the exact number of splits. The default depends on capacities, so two plans may cut
            one request differently; a pinned number (with a pinned ``single_split_chunks``) gives a
            request the same bits under every plan.
        backend: ``"auto"`` or a name from ``densemla.backend_names()``.

    Fields given as None hold what they came to once made, so ``dataclasses.replace`` keeps that: with another
    ``q_dtype``, pass ``output_dtype=None`` too if it shall follow; likewise ``partial_dtype`` and
    ``single_split_chunks`` to read the environment again.

    Raises:
        ContractError: a field is of the wrong type or out of range.
    """

    num_q_heads: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64
    max_total_q: int = 1
    max_batch: int = 1
    max_cache_tokens: int = 131072
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | str = torch.bfloat16
    output_dtype: torch.dtype = None  # type: ignore[assignment]  # always a dtype once made
    partial_dtype: torch.dtype | None = None
    single_split_chunks: int | None = None
    max_splits: int | None = None
    num_splits: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _device(self.device))
        for name, low, high in (
            ("num_q_heads", 1, 1024),
            ("kv_lora_rank", 1, 4096),
            ("qk_rope_head_dim", 0, 4096),
            ("page_size", 1, 1 << 20),
            ("max_total_q", 1, 1 << 24),
            ("max_batch", 1, 1 << 24),
            ("max_cache_tokens", 1, MOST_TOKENS),
        ):
            check_int(name, getattr(self, name), low, high)
        for name in ("max_splits", "num_splits"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, 1 << 16)
        if not isinstance(self.q_dtype, torch.dtype) or self.q_dtype not in _Q_DTYPES:
            raise ContractError(
                "q_dtype", "torch.bfloat16, torch.float16, torch.float32 or torch.float8_e4m3fn", repr(self.q_dtype)
            )
        if self.output_dtype is None:
            default = torch.bfloat16 if self.q_dtype is torch.float8_e4m3fn else self.q_dtype
            object.__setattr__(self, "output_dtype", default)
        if not isinstance(self.output_dtype, torch.dtype) or self.output_dtype not in _OUTPUT_DTYPES:
            raise ContractError(
                "output_dtype", "torch.bfloat16, torch.float16 or torch.float32", repr(self.output_dtype)
            )
        # One spelling per format, so that equal plans are equal cache keys.
        object.__setattr__(self, "kv_dtype", PACKED if self.kv_format.packed else self.kv_format.dtype)
        if self.max_splits is not None and self.num_splits is not None and self.num_splits > self.max_splits:
            raise ContractError("num_splits", f"at most max_splits = {self.max_splits}", self.num_splits)
        if self.partial_dtype is None or self.single_split_chunks is None:
            options = SplitOptions.from_env()
            if self.partial_dtype is None:
                object.__setattr__(self, "partial_dtype", options.partial_dtype)
            if self.single_split_chunks is None:
                object.__setattr__(self, "single_split_chunks", options.single_split_chunks)
        object.__setattr__(self, "partial_dtype", check_partial_dtype(self.partial_dtype))
        check_single_split_chunks(self.single_split_chunks)
        if not isinstance(self.backend, str):
            raise ContractError("backend", "a backend name", repr(self.backend))

    @property
    def kv_format(self) -> KVFormat:
        return kv_format(self.kv_dtype, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def head_dim(self) -> int:
        """Width of a query row: ``kv_lora_rank + qk_rope_head_dim``."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def max_chunks(self) -> int:
        """64-token chunks of the longest request."""
        return ceil_div(self.max_cache_tokens, CHUNK_TOKENS)


def _device(value: object) -> torch.device:
    if not isinstance(value, (str, torch.device)):
        raise ContractError("device", "a torch.device or its name", repr(value))
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ContractError("device", "a device that torch knows", repr(value)) from error
    # Tensors are on "cpu", whatever number was asked for.
    return torch.device("cpu") if device.type == "cpu" else device
