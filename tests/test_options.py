"""Split options: arguments, environment, and which of them wins."""

from __future__ import annotations

import pickle

import pytest
import torch

import densemla
from densemla import Caps, ContractError, SplitOptions

DTYPE = "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"
CHUNKS = "VLLM_K3_DENSE_MLA_SINGLE_SPLIT_CHUNKS"


def test_defaults() -> None:
    assert SplitOptions.from_env({}) == SplitOptions(torch.bfloat16, -1)


@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_partial_dtype_from_the_environment(text: str, dtype: torch.dtype) -> None:
    assert SplitOptions.from_env({DTYPE: text}).partial_dtype is dtype


@pytest.mark.parametrize("text", ["-1", "0", "44", "1000000"])
def test_threshold_from_the_environment(text: str) -> None:
    assert SplitOptions.from_env({CHUNKS: text}).single_split_chunks == int(text)


@pytest.mark.parametrize("text", ["", "BF16", "float32", "fp16", " fp32", "bfloat16", "1"])
def test_a_wrong_dtype_names_the_variable_and_the_choices(text: str) -> None:
    with pytest.raises(ContractError, match=rf"{DTYPE}.*'bf16' or 'fp32'"):
        SplitOptions.from_env({DTYPE: text})


@pytest.mark.parametrize("text", ["", "-2", "4.0", "many", "0x10", " 3", "1_000", "--1", "+1", "٣", "9" * 5000])
def test_a_wrong_threshold_names_the_variable_and_the_choices(text: str) -> None:
    with pytest.raises(ContractError, match=rf"{CHUNKS}.*-1.*0.*N > 0"):
        SplitOptions.from_env({CHUNKS: text})


def test_explicit_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DTYPE, "fp32")
    monkeypatch.setenv(CHUNKS, "7")
    plan = densemla.plan(Caps(num_q_heads=4))
    assert (plan.partial_dtype, plan.single_split_chunks) == (torch.float32, 7)
    plan = densemla.plan(Caps(num_q_heads=4, partial_dtype=torch.bfloat16, single_split_chunks=0))
    assert (plan.partial_dtype, plan.single_split_chunks) == (torch.bfloat16, 0)
    monkeypatch.setenv(DTYPE, "nonsense")
    densemla.plan(Caps(num_q_heads=4, partial_dtype=torch.bfloat16, single_split_chunks=0))
    with pytest.raises(ContractError, match=DTYPE):
        Caps(num_q_heads=4)


@pytest.mark.parametrize("value", [torch.float16, "fp16", 32])
def test_a_wrong_partial_dtype_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match="partial_dtype"):
        Caps(num_q_heads=4, partial_dtype=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-2, 1.5, True, "8"])
def test_a_wrong_threshold_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match="single_split_chunks"):
        Caps(num_q_heads=4, single_split_chunks=value)  # type: ignore[arg-type]


def test_a_contract_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ContractError("q", "a tensor", None)))
    pickle.dumps(ContractError("q", "a tensor", lambda: None))
    assert (error.argument, error.expected, error.got) == ("q", "a tensor", "None")
    assert str(error) == "q: expected a tensor, got None"


def test_the_plan_resolves_the_threshold() -> None:
    plan = densemla.plan(Caps(num_q_heads=96, max_cache_tokens=131072, max_splits=16, single_split_chunks=-1))
    assert plan.num_splits == 16
    assert plan.chunks_per_split == plan.single_split_chunks == 128
    plan = densemla.plan(Caps(num_q_heads=96, num_splits=5, single_split_chunks=3))
    assert (plan.num_splits, plan.single_split_chunks) == (5, 3)
