"""vLLM with densemla in one process answers as transformers does, and a wrong decode would show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import LAYERS, Reference, engine, greedy, recorded_decodes, tokens
from vllm import LLM

from densemla.vllm.steps import StepDecoder


@pytest.fixture(scope="module")
def llm(reference: Reference) -> Iterator[LLM]:
    with engine(reference) as served:
        yield served


def test_greedy_tokens_are_transformers(llm: LLM, reference: Reference) -> None:
    with recorded_decodes() as calls:
        assert tokens(greedy(llm, reference.prompts)) == reference.answers
    assert max(len(call.lengths) for call in calls) == len(reference.prompts), "they were not batched together"
    # The first token of an answer is the prefill's, except after a prompt of one token.
    decoded = sum(
        len(answer) - (len(prompt) > 1) for prompt, answer in zip(reference.prompts, reference.answers, strict=True)
    )
    assert sum(map(len, (call.queries for call in calls))) == LAYERS * decoded


def test_a_wrong_decode_would_be_noticed(llm: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = StepDecoder.decode

    def halved(self: StepDecoder, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = genuine(self, *args, **kwargs)
        return output / 2, lse

    monkeypatch.setattr(StepDecoder, "decode", halved)
    answers = tokens(greedy(llm, reference.prompts))
    assert all(got != want for got, want in zip(answers, reference.answers, strict=True))


def test_a_request_is_answered_alone_as_in_a_batch(llm: LLM, reference: Reference) -> None:
    for prompt, answer in zip(reference.prompts[::4], reference.answers[::4], strict=True):
        assert tokens(greedy(llm, [prompt])) == [answer]
