"""The GPU backend without a GPU: its wiring into vLLM, its decode over stand-ins, and in an engine."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Reference, engine, greedy, recorded_decodes, tokens
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import densemla.vllm
from densemla.vllm import cpu
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


def test_the_gpu_classes_serve_in_a_real_engine(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU platform, made to honour the option; only the cache writer, a CUDA operator, is replaced."""

    def chosen(cls: type, selected_backend: AttentionBackendEnum, *_: object, **__: object) -> str:
        del cls
        return selected_backend.get_path()

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(chosen))
    monkeypatch.setattr(DenseMLAImpl, "do_kv_cache_update", CPUMLAImpl.do_kv_cache_update)
    with recorded_decodes() as calls, engine(reference, attention_backend="DENSEMLA") as llm:
        assert tokens(greedy(llm, reference.prompts)) == reference.answers
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {type(layer.impl) for layer in layers} == {DenseMLAImpl}
    assert calls


@pytest.mark.parametrize(("heads", "rotary_op", "warned"), [(4, True, True), (4, False, False), (1, True, False)])
def test_the_cpu_backend_warns_of_vllms_rotary_fault(
    heads: int, rotary_op: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = SimpleNamespace(is_custom_op_enabled=lambda name: name == "rotary_embedding" and rotary_op)
    monkeypatch.setattr(cpu, "get_current_vllm_config", lambda: SimpleNamespace(compilation_config=compilation))
    monkeypatch.setattr(CPUMLAImpl, "__init__", lambda self, num_heads: setattr(self, "num_heads", num_heads))
    said: list[str] = []
    monkeypatch.setattr(cpu.logger, "warning_once", said.append)
    DenseMLACPUImpl(heads)
    assert [("-rotary_embedding" in line) for line in said] == [True] * warned
