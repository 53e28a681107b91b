# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""What the CPU and the GPU backend share: the step's metadata, its builder and the decode hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport

from .options import ServingOptions
from .steps import CacheGroup, StepDecoder

# Below "vllm", so that vLLM's own handlers and levels apply.
logger = init_logger("vllm.densemla")


@dataclass
class DenseMLADecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step.

    Attributes:
        query_start_loc: int32 [requests + 1], running sum of queries: densemla's ``cu_seqlens_q``.
        max_seq_len: host-side upper bound of ``seq_lens``.
        decoder: of the cache group, for all its layers.
    """

    query_start_loc: torch.Tensor
    max_seq_len: int
    decoder: StepDecoder


class DenseMLAMetadata(MLACommonMetadata[DenseMLADecodeMetadata]):
    pass


class DenseMLAMetadataBuilder(MLACommonMetadataBuilder[DenseMLAMetadata]):
    """vLLM's builder, with verification steps (several queries per request) sent to the decode."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, DenseMLAMetadata)
        scheduler = vllm_config.scheduler_config
        quantized = is_quantized_kv_cache(vllm_config.cache_config.cache_dtype)
        group = CacheGroup(
            device=torch.device(device),
            num_q_heads=self.num_heads * self.dcp_world_size,
            kv_lora_rank=self.mla_dims.kv_lora_rank,
            qk_rope_head_dim=self.mla_dims.qk_rope_head_dim,
            page_size=kv_cache_spec.block_size,
            q_dtype=self.model_config.dtype,
            kv_dtype=torch.float8_e4m3fn if quantized else kv_cache_spec.dtype,
            max_cache_tokens=self.model_config.max_model_len,
            max_rows=min(scheduler.max_num_seqs * self.reorder_batch_threshold, scheduler.max_num_batched_tokens),
            batch_invariant=device.type == "cpu" or envs.VLLM_BATCH_INVARIANT,
        )
        self.decoder = StepDecoder(group, ServingOptions.resolve(vllm_config.additional_config))
        logger.info_once("densemla decodes: %s", self.decoder.describe())

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> DenseMLADecodeMetadata:
        return DenseMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_seq_len=max_seq_len,
            decoder=self.decoder,
        )


class DenseMLADecode:
    """Mixin for an ``MLACommonImpl``: its decode is densemla's."""

    can_return_lse_for_decode: bool = True
    scale: float

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: DenseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode absorbed queries; vLLM's hook.

        Args:
            q: [tokens, heads, 576], or its latent and rope parts.
            kv_c_and_k_pe_cache: [num_blocks, block_size, 576].
            attn_metadata: of a step that :class:`DenseMLAMetadataBuilder` built.
            layer: the attention layer, for its cache scale.

        Returns:
            output [tokens, heads, 512] and LSE float32 [tokens, heads], natural log.
        """
        decode = attn_metadata.decode
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        # vLLM lets only blocks of one length through here when they are not causal (drafts).
        visible = (
            None if attn_metadata.causal else decode.seq_lens.repeat_interleave(q.shape[0] // decode.seq_lens.shape[0])
        )
        return decode.decoder.decode(  # type: ignore[no-any-return]
            q,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            decode.query_start_loc,
            sm_scale=self.scale,
            longest=decode.max_seq_len,
            query_cache_seqlens=visible,
            kv_scale=layer._k_scale,
        )
