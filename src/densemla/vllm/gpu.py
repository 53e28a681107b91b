# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""The GPU backend, ``--attention-backend DENSEMLA``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl
from vllm.v1.attention.backend import AttentionType, MultipleOf

from ..caps import Caps
from ..errors import ContractError
from ..planning import plan
from .decode import DenseMLADecode, DenseMLAMetadata, DenseMLAMetadataBuilder
from .registration import BACKEND_NAME

_KV_DTYPES: dict[str | None, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


class DenseMLABackend(MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_builder_cls() -> type[DenseMLAMetadataBuilder]:
        return DenseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[DenseMLAImpl]:
        return DenseMLAImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [512, 576]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0

    @classmethod
    def supports_compute_capability(cls, capability: object) -> bool:
        # The plan in supports_combination looks at the device itself.
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *args: object,
        **kwargs: object,
    ) -> str | None:
        """Why no densemla backend can run this here; None when one can."""
        try:
            plan(
                Caps(
                    device=torch.device("cuda"),
                    num_q_heads=1,
                    qk_rope_head_dim=head_size - 512,
                    page_size=block_size or 64,
                    q_dtype=dtype,
                    kv_dtype=_KV_DTYPES.get(kv_cache_dtype, dtype),
                )
            )
        except ContractError as error:
            return str(error)
        return None


class DenseMLAImpl(DenseMLADecode, MLACommonImpl[DenseMLAMetadata]):
    """vLLM's own MLA implementation with densemla's decode."""

    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        *args: object,
        **kwargs: object,
    ) -> None:
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
        ):
            if value:
                raise NotImplementedError(f"{BACKEND_NAME} has no {name}: choose another --attention-backend")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{BACKEND_NAME} decodes only: choose another --attention-backend")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            *args,
            **kwargs,
        )
        # An fp8 cache is widened as it is read; queries stay as the model computes them.
        self.supports_quant_query_input = False
