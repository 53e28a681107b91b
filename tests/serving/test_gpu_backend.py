"""What can be said about the GPU backend without a GPU: its wiring into vLLM, and its decode over stand-ins."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import densemla.vllm
from densemla.vllm.cpu import DenseMLACPUBackend, DenseMLACPUImpl
from densemla.vllm.decode import DenseMLADecode, DenseMLADecodeMetadata, DenseMLAMetadata, DenseMLAMetadataBuilder
from densemla.vllm.gpu import DenseMLABackend, DenseMLAImpl
from densemla.vllm.options import ServingOptions
from densemla.vllm.steps import CacheGroup, StepDecoder

sys.path.append(str(Path(__file__).parents[1]))

from steps import make_step


@pytest.fixture(autouse=True)
def _registered() -> None:
    densemla.vllm.register()
    densemla.vllm.register()  # vLLM may load plugins more than once


def test_its_name_is_an_attention_backend() -> None:
    assert AttentionBackendEnum["DENSEMLA"].get_class() is DenseMLABackend
    assert AttentionBackendEnum.CPU_MLA.get_class() is DenseMLACPUBackend
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    chosen = parser.parse_args(["--attention-backend", "DENSEMLA"]).attention_backend
    assert chosen in ("DENSEMLA", AttentionBackendEnum["DENSEMLA"])
    assert DenseMLABackend.get_name() == densemla.vllm.BACKEND_NAME == "DENSEMLA"


@pytest.mark.parametrize(("backend", "impl"), [(DenseMLABackend, DenseMLAImpl), (DenseMLACPUBackend, DenseMLACPUImpl)])
def test_classes_fit_vllms(backend: type, impl: type) -> None:
    assert issubclass(backend, MLACommonBackend)
    assert backend.get_impl_cls() is impl
    assert backend.get_builder_cls() is DenseMLAMetadataBuilder
    assert issubclass(impl, MLACommonImpl)
    assert not inspect.isabstract(impl)
    # The decode is ours, the prefill and the cache writer vLLM's.
    assert impl.forward_mqa is DenseMLADecode.forward_mqa
    assert impl.forward_mha is not DenseMLADecode.__dict__.get("forward_mha")
    assert list(inspect.signature(impl.forward_mqa).parameters) == list(
        inspect.signature(MLACommonImpl.forward_mqa).parameters
    )


def test_the_builder_sends_verification_steps_to_the_decode() -> None:
    assert DenseMLAMetadataBuilder.query_len_support is QueryLenSupport.VARLEN
    assert DenseMLAMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert list(inspect.signature(DenseMLAMetadataBuilder._build_decode).parameters) == list(
        inspect.signature(MLACommonMetadataBuilder._build_decode).parameters
    )


def test_the_gpu_impl_takes_what_vllm_gives() -> None:
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (DenseMLAImpl, MLACommonImpl))
    named = [name for name in ours if name not in ("args", "kwargs")]
    assert named == list(theirs)[: len(named)]
    with pytest.raises(NotImplementedError, match="sliding_window"):
        DenseMLAImpl(4, 576, 1.0, 1, None, 128, "auto", None, "decoder", None)
    with pytest.raises(NotImplementedError, match="decodes only"):
        DenseMLAImpl(4, 576, 1.0, 1, None, None, "auto", None, "encoder", None)


def reasons(**changes: Any) -> list[str]:
    return DenseMLABackend.validate_configuration(
        **{
            "head_size": 576,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": 64,
            "use_mla": True,
            "has_sink": False,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": DeviceCapability(9, 0),
            "attn_type": "decoder",
            "use_dcp": True,
            "use_non_causal": False,
            "use_batch_invariant": True,
            **changes,
        }
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_when_chosen() -> None:
    (why,) = reasons()
    assert "cuda" in why


def test_it_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    monkeypatch.setattr("densemla.vllm.gpu.plan", planned.append)
    assert reasons() == []
    assert reasons(kv_cache_dtype="fp8") == []
    assert [caps.kv_dtype for caps in planned] == [torch.bfloat16, torch.float8_e4m3fn]
    assert all(caps.device.type == "cuda" for caps in planned)
    assert reasons(head_size=192)
    assert reasons(block_size=24)
    assert reasons(use_sparse=True)
    assert reasons(has_sink=True)
    assert reasons(kv_cache_dtype="fp8_ds_mla")


def metadata(step: Any, *, causal: bool) -> DenseMLAMetadata:
    """A step as the builder hands it to the decode, over a CPU decoder."""
    group = CacheGroup(
        device=torch.device("cpu"),
        num_q_heads=step.q.shape[1],
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        q_dtype=step.q.dtype,
        kv_dtype=step.kv_cache.dtype,
        max_cache_tokens=1024,
        max_rows=16,
        batch_invariant=False,
    )
    options = ServingOptions.resolve({"densemla": {"partial_dtype": "fp32"}}, {})
    builder = SimpleNamespace(decoder=StepDecoder(group, options))
    decode = DenseMLAMetadataBuilder._build_decode(
        builder, step.page_table, step.cache_seqlens, 1024, None, step.cu_seqlens_q, len(step.q), 4, None
    )
    assert isinstance(decode, DenseMLADecodeMetadata)
    return DenseMLAMetadata(
        num_reqs=len(step.cache_seqlens),
        max_query_len=4,
        max_seq_len=1024,
        num_actual_tokens=len(step.q),
        query_start_loc=step.cu_seqlens_q,
        slot_mapping=torch.empty(0),
        num_decodes=len(step.cache_seqlens),
        num_decode_tokens=len(step.q),
        num_prefills=0,
        causal=causal,
        decode=decode,
    )


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_decode_hook_over_stand_ins(whole: bool, causal: bool) -> None:
    """vLLM's two forms of the query, causal verification and non-causal draft blocks."""
    step = make_step([5, 700, 0], queries=[3, 3, 3], q_dtype=torch.float32, kv_dtype=torch.float32)
    impl = SimpleNamespace(scale=step.sm_scale)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5))
    q = step.q if whole else (step.q[..., :512], step.q[..., 512:])
    output, lse = DenseMLADecode.forward_mqa(impl, q, step.kv_cache, metadata(step, causal=causal), layer)
    if not causal:
        step.query_cache_seqlens = step.cache_seqlens.repeat_interleave(3)
    want, want_lse = step.oracle()
    assert (output - want).norm() < 1e-5 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)
