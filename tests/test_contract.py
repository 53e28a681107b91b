"""Every caller mistake is refused before anything is written, and the message names the argument."""

from __future__ import annotations

import math
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import densemla
from densemla import Caps, ContractError
from steps import FP8, PACKED, Step, make_step


@pytest.fixture
def step() -> Step:
    return make_step([200, 64], heads=4, queries=2)


@pytest.fixture
def plan(step: Step) -> densemla.Plan:
    return densemla.plan(step.caps(max_cache_tokens=512, num_splits=4))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def nested(*shape: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.zeros(shape, dtype=torch.bfloat16)] * 4)


BAD_CAPS = [
    ("num_q_heads", 0),
    ("num_q_heads", 1.5),
    ("num_q_heads", True),
    ("num_q_heads", 2000),
    ("kv_lora_rank", 0),
    ("qk_rope_head_dim", -1),
    ("page_size", 0),
    ("max_total_q", 0),
    ("max_batch", -3),
    ("max_cache_tokens", 0),
    ("max_cache_tokens", 1 << 31),
    ("max_splits", 0),
    ("num_splits", 0),
    ("q_dtype", torch.float64),
    ("q_dtype", "bf16"),
    ("output_dtype", torch.float8_e4m3fn),
    ("output_dtype", "fp32"),
    ("kv_dtype", torch.int8),
    ("kv_dtype", "nvfp4"),
    ("kv_dtype", ["bf16"]),
    ("kv_dtype", torch.float8_e5m2),
    ("device", "warp"),
    ("device", 3),
    ("backend", None),
]


@pytest.mark.parametrize(("field", "value"), BAD_CAPS)
def test_bad_caps(field: str, value: Any) -> None:
    with pytest.raises(ContractError, match=field) as caught:
        Caps(**{"num_q_heads": 4, field: value})
    assert caught.value.argument == field


def test_packed_records_have_fixed_widths() -> None:
    with pytest.raises(ContractError, match="kv_dtype"):
        Caps(num_q_heads=4, kv_dtype="fp8_ds_mla", kv_lora_rank=256)


def test_equal_formats_make_equal_caps() -> None:
    assert Caps(num_q_heads=4, kv_dtype="fp8_ds_mla") == Caps(num_q_heads=4, kv_dtype=torch.uint8)
    assert len({Caps(num_q_heads=4, device=name) for name in ("cpu", "cpu:0", torch.device("cpu"))}) == 1


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ContractError, match=r"backend.*one of auto, .*'warp'"):
        densemla.plan(Caps(num_q_heads=4, backend="warp"))
    with pytest.raises(ContractError, match="num_splits"):
        Caps(num_q_heads=4, num_splits=9, max_splits=8)
    with pytest.raises(ContractError, match="num_splits"):
        densemla.plan(Caps(num_q_heads=4, num_splits=5, backend="reference"))
    with pytest.raises(ContractError, match="caps"):
        densemla.plan({"num_q_heads": 4})  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"backend.*meta"):
        densemla.plan(Caps(num_q_heads=4, device="meta"))


BAD_BINDINGS: list[tuple[str, dict[str, Any]]] = [
    ("q", {"q": None}),
    ("q", {"q": torch.zeros(4, 4, 576)}),
    ("q", {"q": torch.zeros(4, 5, 576, dtype=torch.bfloat16)}),
    ("q", {"q": torch.zeros(4, 4, 512, dtype=torch.bfloat16)}),
    ("q", {"q": torch.zeros(5, 4, 576, dtype=torch.bfloat16)}),
    ("q", {"q": torch.zeros(4, 576, 4, dtype=torch.bfloat16).transpose(1, 2)}),
    ("q", {"q": torch.zeros(4, 4, 576, dtype=torch.bfloat16, device="meta")}),
    ("q", {"q": torch._neg_view(torch.zeros(4, 4, 576, dtype=torch.bfloat16))}),
    ("q", {"q": nested(4, 576)}),
    *(("kv_cache", {"kv_cache": value}) for value in (None, [1], "kv", torch.zeros(9, 64, 576).to_sparse())),
    *(("page_table", {"page_table": value}) for value in (None, [[0]], 3)),
    ("kv_cache", {"kv_cache": torch.zeros(9, 64, 576)}),
    ("kv_cache", {"kv_cache": torch.zeros(9, 32, 576, dtype=torch.bfloat16)}),
    ("kv_cache", {"kv_cache": torch.zeros(9, 64, 1, 576, dtype=torch.bfloat16)}),
    ("kv_cache", {"kv_cache": torch.zeros(9, 64, 656, dtype=torch.uint8)}),
    ("output", {"output": torch.zeros(4, 4, 576, dtype=torch.bfloat16)}),
    ("output", {"output": torch.zeros(4, 4, 512)}),
    ("output", {"output": torch.zeros(1, 4, 512, dtype=torch.bfloat16).expand(4, 4, 512)}),
    ("lse", {"lse": torch.zeros(4, 4, dtype=torch.bfloat16)}),
    ("lse", {"lse": torch.zeros(4, 5)}),
    ("lse", {"lse": torch.zeros(4, 1).expand(4, 4)}),
    ("page_table", {"page_table": torch.zeros(2, 4, dtype=torch.int64)}),
    ("page_table", {"page_table": torch.zeros(3, 4, dtype=torch.int32)}),
    ("page_table", {"page_table": torch.zeros(8, dtype=torch.int32)}),
    ("page_table", {"page_table": torch.full((2, 4), -1, dtype=torch.int32)}),
    ("page_table", {"page_table": torch.full((2, 4), 99, dtype=torch.int32)}),
    ("cache_seqlens", {"cache_seqlens": torch.tensor([200, 64])}),
    ("cache_seqlens", {"cache_seqlens": int32(200, 64, 3)}),
    ("cache_seqlens", {"cache_seqlens": int32(200, -1)}),
    ("cache_seqlens", {"cache_seqlens": int32(513, 64)}),
    ("cache_seqlens", {"cache_seqlens": int32(257, 64)}),
    ("cu_seqlens_q", {"cu_seqlens_q": None}),
    ("cu_seqlens_q", {"cu_seqlens_q": int32(0, 2)}),
    ("cu_seqlens_q", {"cu_seqlens_q": int32(1, 2, 4)}),
    ("cu_seqlens_q", {"cu_seqlens_q": int32(0, 3, 2)}),
    ("cu_seqlens_q", {"cu_seqlens_q": int32(0, 2, 5)}),
    ("query_cache_seqlens", {"query_cache_seqlens": int32(1, 2, 3)}),
    ("query_cache_seqlens", {"query_cache_seqlens": int32(1, 2, 3, -1)}),
    ("query_cache_seqlens", {"query_cache_seqlens": int32(1, 2, 3, 65)}),
    ("q_scale", {"q_scale": 1.0}),
    ("kv_scale", {"kv_scale": 1.0}),
    ("sm_scale", {"sm_scale": 0.0}),
    ("sm_scale", {"sm_scale": math.nan}),
    ("sm_scale", {"sm_scale": math.inf}),
    ("sm_scale", {"sm_scale": "1"}),
    ("active_splits", {"active_splits": 0}),
    ("active_splits", {"active_splits": 5}),
    ("active_splits", {"active_splits": 2.0}),
    ("scratch", {"scratch": {}}),
    ("scratch", {"scratch": None}),
    ("scratch", {"scratch": {1: None, "a": None}}),
]


@pytest.mark.parametrize(("argument", "change"), BAD_BINDINGS)
def test_bad_bindings(step: Step, plan: densemla.Plan, argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ContractError) as caught:
        step.bind(plan, **change)
    assert caught.value.argument == argument
    assert argument in str(caught.value)
    assert "expected" in str(caught.value)
    assert "got" in str(caught.value)


@pytest.mark.parametrize(("argument", "change"), BAD_BINDINGS)
def test_a_replaced_binding_is_checked_too(
    step: Step, plan: densemla.Plan, argument: str, change: dict[str, Any]
) -> None:
    binding = step.bind(plan)
    with pytest.raises(ContractError) as caught:
        replace(binding, **change)
    assert caught.value.argument == argument


def test_a_binding_may_be_replaced_for_another_layer(step: Step, plan: densemla.Plan) -> None:
    binding = step.bind(plan)
    layer = replace(binding, kv_cache=step.kv_cache.clone(), output=torch.empty_like(binding.output), active_splits=1)
    densemla.run(layer)
    assert torch.equal(layer.output, step.decode(num_splits=1)[0])
    with pytest.raises(ContractError, match="plan"):
        replace(binding, plan=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("caps", {"caps": None}),
        ("caps", {"caps": Caps(num_q_heads=4, device="meta")}),
        ("backend", {"backend": "reference"}),
        ("num_splits", {"num_splits": 0}),
        ("num_splits", {"num_splits": "4"}),
        ("num_splits", {"num_splits": 1 << 20}),
        ("chunks_per_split", {"num_splits": 8}),
        ("chunks_per_split", {"chunks_per_split": 3}),
        ("single_split_chunks", {"single_split_chunks": -1}),
        ("single_split_chunks", {"single_split_chunks": None}),
    ],
)
def test_a_replaced_plan_is_checked_too(plan: densemla.Plan, argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ContractError) as caught:
        replace(plan, **change)
    assert caught.value.argument == argument
    assert replace(plan, num_splits=8, chunks_per_split=1).num_splits == 8


def test_tensors_that_share_memory(step: Step, plan: densemla.Plan) -> None:
    output = torch.zeros(4, 4, 512, dtype=torch.bfloat16)
    scratch, floats = plan.empty_scratch(), output.view(-1).view(torch.float32)
    for change in (
        {"output": output, "lse": output.view(-1)[:32].view(torch.float32).view(4, 4)},
        {"output": step.kv_cache.view(-1)[: output.numel()].view(4, 4, 512)},
        {"output": scratch["partial_output"].view(-1)[: output.numel()].view(4, 4, 512), "scratch": scratch},
        {
            "output": output,
            "scratch": {**scratch, "partial_lse": floats[:64].view(4, 4, 4)},
        },
    ):
        with pytest.raises(ContractError, match="memory of its own"):
            step.bind(plan, **change)
    # Views that interleave without touching are fine.
    room = torch.zeros(4, 4, 576 + 512, dtype=torch.bfloat16)
    room[..., :576] = step.q
    binding = step.bind(plan, q=room[..., :576], output=room[..., 576:])
    densemla.run(binding)
    assert torch.equal(binding.output, step.decode(num_splits=4, single_split_chunks=2)[0])


def test_packed_records_that_begin_off_a_word() -> None:
    step = make_step([70], heads=4, kv_dtype=PACKED)
    room = torch.zeros(step.kv_cache.numel() + 8, dtype=torch.uint8)
    plan = densemla.plan(step.caps())
    for begin in range(1, 5):
        moved = room[begin : begin + step.kv_cache.numel()].view(step.kv_cache.shape)
        moved.copy_(step.kv_cache)
        if begin == 4:
            densemla.run(step.bind(plan, kv_cache=moved))
            return
        with pytest.raises(ContractError, match=r"kv_cache.*4-byte"):
            step.bind(plan, kv_cache=moved)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_went_bad_after_binding_writes_nothing(scale: float) -> None:
    step = make_step([70], heads=4, kv_dtype=FP8, kv_scale=0.5)
    value = torch.tensor([0.5])
    binding = step.bind(densemla.plan(step.caps()), kv_scale=value)
    value.fill_(scale)
    with pytest.raises(ContractError, match="kv_scale"):
        densemla.run(binding)
    assert bool(binding.output.isnan().all())


@pytest.mark.parametrize("length", [-1, 513, 1.5, True, None, "1"])
def test_launch_splits_wants_a_length(plan: densemla.Plan, length: Any) -> None:
    with pytest.raises(ContractError, match="longest_cache_seqlen"):
        plan.launch_splits(length)


def test_plans_and_specs_can_be_sent_to_a_worker(plan: densemla.Plan) -> None:
    again, specs = pickle.loads(pickle.dumps((plan, plan.scratch_specs())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert specs == plan.scratch_specs()


def test_scratch_of_another_plan(step: Step, plan: densemla.Plan) -> None:
    other = densemla.plan(replace(plan.caps, partial_dtype=torch.float32))
    with pytest.raises(ContractError, match=r"partial_output.*bfloat16"):
        step.bind(plan, scratch=other.empty_scratch())


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-60, 10**400])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales_must_be_positive_and_finite(scale: float, as_tensor: bool) -> None:
    step = make_step([70], heads=4, q_dtype=FP8, kv_dtype=FP8, kv_scale=0.5, q_scale=0.5)
    plan = densemla.plan(step.caps())
    value = torch.tensor([float(min(scale, 1e39))]) if as_tensor else scale
    for name in ("q_scale", "kv_scale"):
        with pytest.raises(ContractError, match=name):
            step.bind(plan, **{name: value})
        with pytest.raises(ContractError, match=name):
            step.bind(plan, **{name: torch.tensor([1.0, 2.0])})
        with pytest.raises(ContractError, match=name):
            step.bind(plan, **{name: torch.ones(1).to_sparse()})


def test_a_scale_tensor_is_read_at_every_run() -> None:
    step = make_step([70], heads=4, kv_dtype=FP8, kv_scale=0.5)
    plan = densemla.plan(step.caps())
    scale = torch.tensor([0.5])
    binding = step.bind(plan, kv_scale=scale)
    densemla.run(binding)
    first = binding.output.clone()
    scale.fill_(0.25)
    densemla.run(binding)
    assert not torch.equal(binding.output, first)
    assert torch.equal(binding.output, replace(step, kv_scale=0.25).decode(partial_dtype=torch.bfloat16)[0])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lengths_that_went_bad_after_binding_write_nothing(step: Step, backend: str) -> None:
    plan = densemla.plan(step.caps(backend=backend, max_cache_tokens=512))
    lengths, table = step.cache_seqlens.clone(), step.page_table.clone()
    binding = step.bind(plan, cache_seqlens=lengths, page_table=table)
    for spoil in (lambda: lengths.fill_(513), lambda: lengths.fill_(-1), lambda: table.fill_(-1)):
        lengths.copy_(step.cache_seqlens)
        table.copy_(step.page_table)
        spoil()
        with pytest.raises(ContractError, match=r"cache_seqlens|page_table"):
            densemla.run(binding)
        assert bool(binding.output.isnan().all())
        assert bool(binding.lse.isnan().all())


def test_run_and_compile_want_a_binding() -> None:
    for call in (densemla.run, densemla.compile):
        with pytest.raises(ContractError, match="binding"):
            call(None)  # type: ignore[arg-type]


def test_what_caps_came_to_stays_when_they_are_replaced() -> None:
    caps = densemla.Caps(num_q_heads=16, q_dtype=torch.float16)
    assert replace(caps, q_dtype=torch.bfloat16).output_dtype is torch.float16
    assert replace(caps, q_dtype=torch.bfloat16, output_dtype=None).output_dtype is torch.bfloat16  # type: ignore[arg-type]


def test_a_plan_says_what_it_supports(plan: densemla.Plan) -> None:
    for name in ("query_cache_seqlens", "cu_seqlens_q", "active_splits", "partial_dtype", "single_split_chunks"):
        assert plan.supports(name), name
    for name in ("q_scale", "kv_scale", "sparse_topk", ""):
        assert not plan.supports(name), name
    assert densemla.plan(replace(plan.caps, kv_dtype=FP8)).supports("kv_scale")
    assert densemla.plan(replace(plan.caps, q_dtype=FP8)).supports("q_scale")
    assert not densemla.plan(replace(plan.caps, backend="reference", num_splits=None)).supports("partial_dtype")


def test_scratch_specs_describe_the_scratch(plan: densemla.Plan) -> None:
    specs = plan.scratch_specs()
    assert specs["partial_output"] == densemla.ScratchSpec((4, 4, 4, 512), torch.bfloat16)
    assert specs["partial_lse"] == densemla.ScratchSpec((4, 4, 4), torch.float32)
    scratch = plan.empty_scratch()
    assert {name: (tuple(t.shape), t.dtype) for name, t in scratch.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    assert sum(spec.nbytes for spec in specs.values()) == sum(t.nbytes for t in scratch.values())


def test_decode_refuses_what_is_not_a_step(step: Step) -> None:
    with pytest.raises(ContractError, match="q: expected a dense tensor"):
        densemla.decode(None, step.kv_cache, step.page_table, step.cache_seqlens, sm_scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="kv_cache: expected 3 dimensions"):
        densemla.decode(step.q, step.kv_cache[0], step.page_table, step.cache_seqlens, sm_scale=1.0)
    with pytest.raises(ContractError, match="page_table: expected 2 dimensions"):
        densemla.decode(step.q, step.kv_cache, step.page_table[0], step.cache_seqlens, sm_scale=1.0)
    tensors = (step.q, step.kv_cache, step.page_table, step.cache_seqlens)
    for argument, value in (
        *(("kv_lora_rank", value) for value in (577, 0, None, "512", [])),
        *(("max_splits", value) for value in (0, "a", 1.5)),
        *(("num_splits", value) for value in (0, "a")),
        *(("backend", value) for value in ([], None, "warp")),
        *(("sm_scale", value) for value in (10**400, 1e300, 1e-60)),
        ("partial_dtype", torch.float16),
        ("single_split_chunks", "all"),
    ):
        with pytest.raises(ContractError) as caught:
            densemla.decode(*tensors, **{"sm_scale": 1.0, "cu_seqlens_q": step.cu_seqlens_q, argument: value})  # type: ignore[arg-type]
        assert caught.value.argument == argument
    for argument, place, tensor in (
        ("kv_cache", 1, step.kv_cache[:, :0]),
        ("q", 0, step.q.double()),
        ("q", 0, step.q[:, :0]),
        ("q", 0, nested(4, 576)),
        ("kv_cache", 1, nested(64, 576)),
        ("page_table", 2, nested(4, 576)),
        ("q", 0, step.q[:1].expand((1 << 24) + 1, 4, 576)),
        ("page_table", 2, step.page_table[:1].expand((1 << 24) + 1, -1)),
        ("kv_cache", 1, step.kv_cache.double()),
        ("cache_seqlens", 3, None),
    ):
        changed = [*tensors[:place], tensor, *tensors[place + 1 :]]
        with pytest.raises(ContractError) as caught:
            densemla.decode(*changed, sm_scale=1.0, cu_seqlens_q=step.cu_seqlens_q)
        assert caught.value.argument == argument


def test_a_table_far_wider_than_its_requests_is_no_mistake(step: Step) -> None:
    wide = torch.zeros(2, 1 << 25, dtype=torch.int32)
    wide[:, : step.page_table.shape[1]] = step.page_table
    assert torch.equal(replace(step, page_table=wide).decode()[0], step.decode()[0])


def test_inputs_are_left_alone(step: Step) -> None:
    before = {name: value.clone() for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
    step.decode()
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), getattr(step, name).view(torch.uint8)), name
