"""Acceptance: greedy, and block rejection sampling against the target's own distribution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from densemla import ContractError
from densemla.dspark import verify
from densemla.dspark.verify import block_rejection_sample, greedy

VOCAB, DEPTH, DRAWS = 3, 2, 60_000
ANCHOR = VOCAB


def languages(seed):
    """A target and a draft in which the last token alone decides: [VOCAB + 1, VOCAB], the anchor last."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.softmax(2 * torch.randn(VOCAB + 1, VOCAB, dtype=torch.float64, generator=generator), -1) for _ in range(2)
    ]


def draw(weights, generator):
    return torch.multinomial(weights, 1, generator=generator).squeeze(1)


def chi_square(seed, certain, lengths=None, dtype=torch.float64):
    """Of DRAWS verified continuations of DEPTH + 1 tokens against what the target alone would say.

    27 cells. 60 is beyond the 0.0002 quantile of 26 degrees of freedom.
    """
    target, draft = languages(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    last = torch.full((DRAWS,), ANCHOR)
    tokens, drawn_from = [], []
    for _ in range(DEPTH):
        drawn_from.append(draft[last])
        last = draft[last].argmax(1) if certain else draw(draft[last], generator)
        tokens.append(last)
    proposal = torch.stack(tokens, 1)
    probs = torch.stack([target[torch.full((DRAWS,), ANCHOR)], *(target[token] for token in tokens)], 1)
    if lengths is not None:
        proposal = torch.where(torch.arange(DEPTH) < lengths.unsqueeze(1), proposal, -1)
    draft_probs = None if certain else torch.stack(drawn_from, 1).to(dtype)
    result = block_rejection_sample(proposal, probs.to(dtype), draft_probs, generator=generator)
    out = result.tokens.clone()
    for i in range(1, DEPTH + 1):
        open_rows = out[:, i] < 0
        out[open_rows, i] = draw(target[out[open_rows, i - 1]], generator)
    counted = torch.bincount(out[:, 0] * 9 + out[:, 1] * 3 + out[:, 2], minlength=27).double()
    cells = itertools.product(range(VOCAB), repeat=3)
    expected = DRAWS * torch.stack([target[ANCHOR, a] * target[a, b] * target[b, c] for a, b, c in cells])
    return float(((counted - expected) ** 2 / expected).sum()), float(result.accepted.double().mean())


@pytest.mark.parametrize("certain", [False, True], ids=["sampled draft", "greedy draft"])
@pytest.mark.parametrize("seed", range(4))
def test_the_targets_distribution_is_kept_exactly(seed, certain):
    statistic, accepted = chi_square(seed, certain)
    assert statistic < 60
    assert 0.05 < accepted < DEPTH


@pytest.mark.parametrize("certain", [False, True], ids=["sampled draft", "greedy draft"])
def test_also_for_ragged_proposals_and_float32(certain):
    lengths = torch.arange(DRAWS) % (DEPTH + 1)
    statistic, _ = chi_square(7, certain, lengths, torch.float32)
    assert statistic < 60


@pytest.mark.parametrize(
    "broken",
    [
        lambda survival, target, draft: survival.unsqueeze(1) * target,
        lambda survival, target, draft: (target - draft).clamp_min(0.0) + 1e-300,
    ],
    ids=["no residual", "residual without survival"],
)
def test_the_statistic_sees_a_broken_rule(broken, monkeypatch):
    monkeypatch.setattr(verify, "_residual", broken)
    assert max(chi_square(seed, False)[0] for seed in range(3)) > 200


def test_block_verification_accepts_more_than_one_at_a_time():
    target, draft = languages(1)
    one_at_a_time = both = 0.0
    for a, b in itertools.product(range(VOCAB), repeat=2):
        chance = draft[ANCHOR, a] * draft[a, b]
        first = min(1.0, float(target[ANCHOR, a] / draft[ANCHOR, a]))
        one_at_a_time += chance * first
        both += chance * first * min(1.0, float(target[a, b] / draft[a, b]))
    assert chi_square(1, False)[1] > float(one_at_a_time + both) - 0.005


def test_a_draft_equal_to_the_target_is_always_accepted():
    probs = torch.softmax(torch.randn(64, 5, 11), -1)
    tokens = torch.multinomial(probs[:, :4].flatten(0, 1), 1).view(64, 4)
    assert block_rejection_sample(tokens, probs, probs[:, :4]).accepted.eq(4).all()


def test_zero_and_three_tokens_in_one_batch():
    nan = math.nan
    ends = [[0.0, 1.0, 0.0, 0.0], [nan] * 4, [nan] * 4, [nan] * 4]
    sure = [[0, 0, 1.0, 0], [0, 0, 0, 1.0], [1.0, 0, 0, 0], [0, 1.0, 0, 0]]
    proposal = torch.tensor([[-1, 3, 3], [2, 3, 0], [-1, -1, -1]])
    result = block_rejection_sample(proposal, torch.tensor([ends, sure, ends]))
    assert result.tokens.tolist() == [[1, -1, -1, -1], [2, 3, 0, 1], [1, -1, -1, -1]]
    assert result.accepted.tolist() == [0, 3, 0]
    choices = torch.tensor([[1, 9, 9, 9], [2, 3, 0, 1], [1, 9, 9, 9]])
    same = greedy(proposal, choices)
    assert same.tokens.tolist() == result.tokens.tolist()
    assert same.accepted.tolist() == [0, 3, 0]


def test_what_stands_behind_the_end_of_a_proposal_is_never_accepted():
    sure = torch.zeros(1, 4, 4)
    sure[..., 0] = 1.0
    for drawn in (None, torch.full((1, 3, 4), 0.25)):
        result = block_rejection_sample(torch.tensor([[-1, 0, 0]]), sure, drawn)
        assert (result.tokens.tolist(), result.accepted.tolist()) == ([[0, -1, -1, -1]], [0])
        result = block_rejection_sample(torch.tensor([[0, -1, 0]]), sure, drawn)
        assert (result.tokens.tolist(), result.accepted.tolist()) == ([[0, 0, -1, -1]], [1])


def test_no_requests_and_no_depth():
    empty = torch.empty(0, 3, dtype=torch.int64)
    assert block_rejection_sample(empty, torch.empty(0, 4, 5)).tokens.shape == (0, 4)
    assert greedy(empty, torch.empty(0, 4, dtype=torch.int64)).tokens.shape == (0, 4)
    none = torch.empty(2, 0, dtype=torch.int64)
    assert greedy(none, torch.tensor([[4], [5]])).tokens.tolist() == [[4], [5]]
    certain = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    assert block_rejection_sample(none, certain).tokens.tolist() == [[1], [0]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_greedy_is_the_longest_agreeing_prefix(data):
    depth = data.draw(st.integers(0, 5))
    batch = data.draw(st.integers(1, 4))
    ids = st.lists(st.integers(-1, 2), min_size=depth, max_size=depth)
    drafts = data.draw(st.lists(ids, min_size=batch, max_size=batch))
    choices = data.draw(
        st.lists(st.lists(st.integers(0, 2), min_size=depth + 1, max_size=depth + 1), min_size=batch, max_size=batch)
    )
    result = greedy(torch.tensor(drafts, dtype=torch.int64).view(batch, depth), torch.tensor(choices))
    for draft, choice, tokens, accepted in zip(
        drafts, choices, result.tokens.tolist(), result.accepted.tolist(), strict=True
    ):
        expected = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, choice, strict=False)))
        assert accepted == len(expected)
        assert tokens == choice[: accepted + 1] + [-1] * (depth - accepted)


def test_a_token_that_cannot_have_been_drawn_is_refused():
    tokens, even = torch.tensor([[1, 2, -1]]), torch.full((1, 4, 4), 0.25)
    for place, token in enumerate((1, 2, 3)):
        probs = even[:, :3].clone()
        probs[0, place, token] = 0.0
        if place == 2:  # nothing was drawn there
            block_rejection_sample(tokens, even, probs)
            continue
        with pytest.raises(ContractError, match="draft_probs: expected above 0 for each drawn token"):
            block_rejection_sample(tokens, even, probs)


@pytest.mark.parametrize("bad", [-2, 4, 2**31])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(ContractError, match="draft_tokens"):
        block_rejection_sample(torch.tensor([[1, bad]]), torch.full((1, 3, 4), 0.25))


@pytest.mark.parametrize(
    ("tokens", "probs", "draft_probs", "name"),
    [
        (torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 3, 4), None, "draft_tokens"),
        (torch.zeros(2, dtype=torch.int64), torch.ones(1, 3, 4), None, "draft_tokens"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, 4), None, "target_probs"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 3, 4).long(), None, "target_probs"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 3, 4), torch.ones(1, 2, 5), "draft_probs"),
        (None, torch.ones(1, 3, 4), None, "draft_tokens"),
        (torch.zeros(1, 2, dtype=torch.int64).to_sparse(), torch.ones(1, 3, 4), None, "draft_tokens"),
        (torch.full((1, 2), -1), torch.ones(1, 3, 0), None, "target_probs"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 3, 4, device="meta"), None, "target_probs"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 3, 4), torch.ones(1, 2, 4, device="meta"), "draft_probs"),
    ],
)
def test_misfits_are_named(tokens, probs, draft_probs, name):
    with pytest.raises(ContractError) as caught:
        block_rejection_sample(tokens, probs, draft_probs)
    assert caught.value.argument == name
    if probs.dim() == 3 and name == "draft_tokens":
        with pytest.raises(ContractError, match=name):
            greedy(tokens, torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -0.5, 0.0])
def test_rows_that_are_no_distributions_are_refused_where_they_count(spoilt):
    tokens, even = torch.tensor([[1, 2, -1]]), torch.full((1, 4, 4), 0.25)
    for row in range(4):
        bad = even.clone()
        if spoilt == 0.0:
            bad[0, row] = 0.0
        else:
            bad[0, row, 3] = spoilt
        for name, probs, counting in (("target_probs", (bad, None), 3), ("draft_probs", (even, bad[:, :3]), 2)):
            if row >= counting:
                block_rejection_sample(tokens, *probs)
                continue
            with pytest.raises(ContractError) as caught:
                block_rejection_sample(tokens, *probs)
            assert caught.value.argument == name
