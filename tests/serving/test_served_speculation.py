"""Speculative decoding leaves greedy answers as they are, and its drafts are verified by densemla's decode."""

from __future__ import annotations

import pytest
from engines import LAYERS, NEW_TOKENS, Reference, engine, greedy, recorded_decodes, tokens
from proposers import HalfRight


def test_verification_runs_through_our_decode(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [prompt + answer for prompt, answer in zip(reference.prompts, reference.answers, strict=True)]
    monkeypatch.setattr(HalfRight, "known", known)
    monkeypatch.setattr(HalfRight, "proposed", [])
    speculative = {"method": "custom_class", "model": "proposers.HalfRight", "num_speculative_tokens": 3}
    with recorded_decodes() as calls, engine(reference, speculative_config=speculative) as llm:
        assert tokens(greedy(llm, reference.prompts)) == reference.answers
    queries = [n for call in calls for n in call.queries]
    assert set(queries) == {1, 2, 3, 4}
    # Requests of one step differ in how many drafts they bring.
    assert any(len(set(call.queries)) > 1 for call in calls)
    # Right drafts saved steps; each request's answer is still complete.
    assert len(calls) // LAYERS < NEW_TOKENS - 1 + len(reference.prompts)
    assert sum(queries) // LAYERS > sum(map(len, reference.answers)) - len(reference.prompts)
