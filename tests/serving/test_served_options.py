"""Each precision option reaches the decode, is logged, and what can't work is refused at start-up."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engines import Reference, engine, greedy, recorded_decodes, tokens

import densemla
from densemla.vllm.steps import StepDecoder

PARTIAL, SINGLE = "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE", "VLLM_K3_DENSE_MLA_SINGLE_SPLIT_CHUNKS"


@dataclass(frozen=True)
class Case:
    environment: dict[str, str]
    written: dict[str, object]
    partial_dtype: torch.dtype
    single_split_chunks: int
    num_splits: int = 8


CASES = {
    "fp32 from the environment": Case({PARTIAL: "fp32"}, {}, torch.float32, 1),
    "bf16, written, over the environment": Case(
        {PARTIAL: "fp32", SINGLE: "0"}, {"partial_dtype": "bf16"}, torch.bfloat16, 0
    ),
    "fp32 and every request balanced": Case({}, {"partial_dtype": "fp32", "single_split_chunks": 0}, torch.float32, 0),
    "one split up to 4 chunks of 3": Case({SINGLE: "4"}, {"num_splits": 3}, torch.bfloat16, 4, 3),
}


@dataclass(frozen=True)
class Served:
    case: Case
    completions: list[Any]
    decoders: set[StepDecoder]
    log: list[str]


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def served(reference: Reference) -> dict[str, Served]:
    """One engine after another, each under its own options."""
    found = {}
    for name, case in CASES.items():
        handler, logger = _Keep(), logging.getLogger("vllm.densemla")
        logger.addHandler(handler)
        with (
            recorded_decodes() as calls,
            engine(reference, environment=case.environment, additional_config={"densemla": case.written}) as llm,
        ):
            completions = greedy(llm, reference.prompts, logprobs=1)
        logger.removeHandler(handler)
        found[name] = Served(case, completions, {call.decoder for call in calls}, handler.lines)
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_precision_option(served: dict[str, Served], name: str, reference: Reference) -> None:
    this = served[name]
    assert tokens(this.completions) == reference.answers
    (decoder,) = this.decoders
    for rows in (1, 16):
        plan = decoder.plan(rows)
        assert plan.partial_dtype is this.case.partial_dtype
        assert plan.single_split_chunks == this.case.single_split_chunks
        assert plan.num_splits == this.case.num_splits
    assert this.log == [f"densemla decodes: {decoder.describe()}"]


def test_the_partials_make_the_difference_that_they_should(served: dict[str, Served], reference: Reference) -> None:
    """Requests of more than one chunk differ in bits between partial dtypes, the others do not."""
    low = served["bf16, written, over the environment"].completions
    high = served["fp32 and every request balanced"].completions
    for prompt, rough, fine in zip(reference.prompts, low, high, strict=True):
        one_chunk = len(prompt) + len(rough.token_ids) - 1 <= 64
        assert (rough.cumulative_logprob == fine.cumulative_logprob) == one_chunk, len(prompt)
        assert rough.cumulative_logprob == pytest.approx(fine.cumulative_logprob, abs=0.05)


@pytest.mark.parametrize(
    ("environment", "written", "message"),
    [
        ({}, {"backend": "reference"}, "lacks partial_dtype, single_split_chunks"),
        ({}, {"partial_dtypes": "fp32"}, "partial_dtypes"),
        ({PARTIAL: "fp16"}, {}, PARTIAL),
    ],
)
def test_what_cannot_work_is_refused_at_start_up(
    reference: Reference, environment: dict[str, str], written: dict[str, object], message: str
) -> None:
    with (
        pytest.raises(densemla.ContractError, match=message),
        engine(reference, environment=environment, additional_config={"densemla": written}),
    ):
        pass
