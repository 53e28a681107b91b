# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""The backend that takes the place of ``CPU_MLA``."""

from __future__ import annotations

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from .decode import DenseMLADecode, DenseMLAMetadataBuilder, logger


class DenseMLACPUBackend(CPUMLABackend):
    @staticmethod
    def get_builder_cls() -> type[DenseMLAMetadataBuilder]:
        return DenseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[DenseMLACPUImpl]:
        return DenseMLACPUImpl


class DenseMLACPUImpl(DenseMLADecode, CPUMLAImpl):
    """vLLM's CPU implementation of MLA with densemla's decode."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.num_heads > 1 and get_current_vllm_config().compilation_config.is_custom_op_enabled("rotary_embedding"):
            logger.warning_once(
                "vLLM's CPU rotary op is wrong for the queries of MLA models with more than one head, with and "
                'without densemla. Turn it off: --compilation-config \'{"custom_ops": ["-rotary_embedding"]}\''
            )
