"""What a row of the latent cache can look like, and how it becomes float32.

A row is the latent (``kv_lora_rank`` values, which are also the attention values) followed by the rope
part (``qk_rope_head_dim`` values).

Three families:

* plain: bf16, float16 or float32 rows;
* ``torch.float8_e4m3fn`` rows with one scale for the whole cache: value = stored * ``kv_scale``;
* ``fp8_ds_mla``: packed 656-byte records (uint8) as DeepSeek's sparse attention lays them out in vLLM
  and FlashMLA: 512 e4m3 latent values, 4 float32 scales for 128 latent values each, 64 bf16 rope values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .errors import ContractError

FP8_MAX = 448.0
"""Largest finite e4m3fn value."""

PACKED_GROUP = 128
"""Latent values that share one scale in an ``fp8_ds_mla`` record."""

PACKED = "fp8_ds_mla"

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Storage of one cache row.

    Attributes:
        dtype: element type of the cache tensor (``torch.uint8`` for packed records).
        row_width: elements of the cache tensor's last dimension.
        kv_lora_rank: latent values in a row.
        qk_rope_head_dim: rope values in a row.
        scaled: the cache takes a per-tensor ``kv_scale``.
        packed: rows are ``fp8_ds_mla`` records, which carry their own scales.
    """

    dtype: torch.dtype
    row_width: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    scaled: bool
    packed: bool

    @property
    def head_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def row_bytes(self) -> int:
        return self.row_width * self.dtype.itemsize

    def widen(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write stored ``rows`` [..., row_width] as numbers into ``out`` [..., head_dim], float32 or float64.

        A per-tensor ``kv_scale`` is *not* applied: it commutes with both products, so the caller folds it
        into the scores and the output.
        """
        if not self.packed:
            out.copy_(rows)
            return
        latent, scales, rope = packed_fields(rows, self.kv_lora_rank, self.qk_rope_head_dim)
        grouped = out[..., : self.kv_lora_rank].unflatten(-1, (-1, PACKED_GROUP))
        grouped.copy_(latent.unflatten(-1, (-1, PACKED_GROUP)))
        grouped.mul_(scales.unsqueeze(-1))
        out[..., self.kv_lora_rank :].copy_(rope)


def packed_fields(
    records: torch.Tensor, kv_lora_rank: int, qk_rope_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the three fields of uint8 ``records`` [..., row_bytes]: e4m3 latent, float32 scales, bf16 rope."""
    scale_bytes = kv_lora_rank // PACKED_GROUP * 4
    latent = records[..., :kv_lora_rank].view(torch.float8_e4m3fn)
    scales = records[..., kv_lora_rank : kv_lora_rank + scale_bytes].view(torch.float32)
    rope_start = kv_lora_rank + scale_bytes
    rope = records[..., rope_start : rope_start + 2 * qk_rope_head_dim].view(torch.bfloat16)
    return latent, scales, rope


def kv_format(kv_dtype: torch.dtype | str, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> KVFormat:
    """The format that ``kv_dtype`` names; ``torch.uint8`` and ``"fp8_ds_mla"`` both mean packed records.

    Raises:
        ContractError: no such format, or packed records asked for with other widths than 512 + 64.
    """
    if isinstance(kv_dtype, (str, torch.dtype)):
        found = _find(kv_dtype, kv_lora_rank, qk_rope_head_dim)
        if found is not None:
            return found
    raise ContractError(
        "kv_dtype",
        "torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn or 'fp8_ds_mla' (torch.uint8)",
        repr(kv_dtype),
    )


@lru_cache(maxsize=64)
def _find(kv_dtype: torch.dtype | str, kv_lora_rank: int, qk_rope_head_dim: int) -> KVFormat | None:
    head_dim = kv_lora_rank + qk_rope_head_dim
    if kv_dtype in (PACKED, torch.uint8):
        if (kv_lora_rank, qk_rope_head_dim) != (512, 64):
            raise ContractError(
                "kv_dtype",
                "fp8_ds_mla only with kv_lora_rank 512 and qk_rope_head_dim 64",
                f"{kv_lora_rank} and {qk_rope_head_dim}",
            )
        row_bytes = kv_lora_rank + kv_lora_rank // PACKED_GROUP * 4 + 2 * qk_rope_head_dim
        return KVFormat(torch.uint8, row_bytes, kv_lora_rank, qk_rope_head_dim, scaled=False, packed=True)
    if kv_dtype is torch.float8_e4m3fn:
        return KVFormat(torch.float8_e4m3fn, head_dim, kv_lora_rank, qk_rope_head_dim, scaled=True, packed=False)
    if isinstance(kv_dtype, torch.dtype) and kv_dtype in _PLAIN_DTYPES:
        return KVFormat(kv_dtype, head_dim, kv_lora_rank, qk_rope_head_dim, scaled=False, packed=False)
    return None
