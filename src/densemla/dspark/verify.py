"""Which drafted tokens stand, and which token follows them.

A proposal is a row of token ids; -1 ends it (what comes after is ignored), and a row that starts with -1
proposes nothing: one token then comes from the target, as in plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checks import check_dims, check_values
from ..errors import ContractError


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of a step.

    Attributes:
        tokens: int64 [batch, depth + 1]: the accepted tokens, one token of the target's, then -1.
        accepted: int64 [batch]: accepted tokens, 0 to depth; the step yields one token more.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor


def proposal_lengths(draft_tokens: torch.Tensor) -> torch.Tensor:
    """Tokens before the first -1: int64 [batch, depth] to int64 [batch]."""
    return (draft_tokens >= 0).long().cumprod(1).sum(1)


def greedy(draft_tokens: torch.Tensor, target_tokens: torch.Tensor) -> Verified:
    """Accept as long as the draft says what the target's argmax says.

    Args:
        draft_tokens: int64 [batch, depth]; depth may be 0.
        target_tokens: int64 [batch, depth + 1]: the target's argmax after the anchor and after each
            drafted token; entries behind the end of a proposal may hold anything.

    Raises:
        ContractError: dtypes or shapes do not fit.
    """
    _check_tokens("draft_tokens", draft_tokens, None)
    shape = (draft_tokens.shape[0], draft_tokens.shape[1] + 1)
    _check_tokens("target_tokens", target_tokens, shape, draft_tokens.device)
    agrees = (draft_tokens == target_tokens[:, :-1]) & (draft_tokens >= 0)
    accepted = agrees.long().cumprod(1).sum(1)
    return Verified(_assemble(draft_tokens, accepted, target_tokens.gather(1, accepted.unsqueeze(1))), accepted)


def block_rejection_sample(
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Verified:
    """Accept a prefix of each proposal so that what comes out is distributed as the target's own samples.

    Block verification (Sun et al., arXiv:2403.10444): the ratios of target to draft are multiplied along
    the block, clipped at 1, and the longest prefix that survives its own coin is kept. It accepts at least
    as many tokens as judging them one at a time. Arithmetic is float64.

    Args:
        draft_tokens: int64 [batch, depth], drawn from ``draft_probs``; -1 ends a proposal.
        target_probs: float [batch, depth + 1, vocab_size]: the target's distribution after the anchor
            and after each drafted token; rows behind the end of a proposal may hold anything.
        draft_probs: float [batch, depth, vocab_size], what each token was drawn from; None when the draft
            chose without chance (a greedy draft, as the remote one).
        generator: source of the coins and the samples.

    Raises:
        ContractError: dtypes, shapes or devices do not fit, or (host memory only) a token is outside
            ``[-1, vocab_size)``, or a distribution that counts has a negative element, NaN or no finite sum
            above 0, or ``draft_probs`` is 0 for a token that was drawn from it.
    """
    _check_tokens("draft_tokens", draft_tokens, None)
    batch, depth = draft_tokens.shape
    _check_probs("target_probs", target_probs, (batch, depth + 1), None, draft_tokens.device)
    vocab = target_probs.shape[2]
    check_values("draft_tokens", draft_tokens, -1, vocab - 1, f"ids in [-1, vocab_size = {vocab})")
    lengths = proposal_lengths(draft_tokens)
    if draft_probs is not None:
        _check_probs("draft_probs", draft_probs, (batch, depth), vocab, draft_tokens.device)
        draft_probs = _normalised("draft_probs", draft_probs, lengths)
        _check_drawn(draft_tokens, draft_probs, lengths)
    target_probs = _normalised("target_probs", target_probs, lengths + 1)
    coins = torch.rand(batch, depth, dtype=torch.float64, generator=generator, device=draft_tokens.device)
    survival = torch.ones(batch, dtype=torch.float64, device=draft_tokens.device)
    accepted = torch.zeros_like(lengths)
    residual = _residual(survival, target_probs[:, 0], _drawn_from(draft_tokens, draft_probs, 0, lengths, vocab))
    for i in range(depth):
        live = lengths > i
        token = draft_tokens[:, i].clamp_min(0).unsqueeze(1)
        target = target_probs[:, i].gather(1, token).squeeze(1)
        draft = 1.0 if draft_probs is None else draft_probs[:, i].gather(1, token).squeeze(1)
        survival = torch.where(live, (survival * target / draft).clamp_max(1.0), survival)
        after = _residual(
            survival, target_probs[:, i + 1], _drawn_from(draft_tokens, draft_probs, i + 1, lengths, vocab)
        )
        mass = after.sum(1)
        # After a proposal's last token nothing was drawn, so mass is survival, and so is the chance. Where draft
        # and target agree entirely (0 / 0) the prefix is certain to survive.
        chance = torch.where((mass == 0) & (survival == 1), 1.0, mass / (mass + 1 - survival))
        keep = live & (coins[:, i] < chance)
        accepted = torch.where(keep, i + 1, accepted)
        residual = torch.where(keep.unsqueeze(1), after, residual)
    return Verified(_assemble(draft_tokens, accepted, _sample(residual, generator)), accepted)


def _drawn_from(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None, place: int, lengths: torch.Tensor, vocab: int
) -> torch.Tensor:
    """What the token at ``place`` was drawn from, float64 [batch, vocab]; 0 where a proposal has ended."""
    shape = (draft_tokens.shape[0], vocab)
    if place >= draft_tokens.shape[1]:
        return torch.zeros(shape, dtype=torch.float64, device=draft_tokens.device)
    live = (lengths > place).unsqueeze(1)
    if draft_probs is not None:
        return torch.where(live, draft_probs[:, place], 0.0)
    certain = torch.zeros(shape, dtype=torch.float64, device=draft_tokens.device)
    return certain.scatter_(1, draft_tokens[:, place].clamp_min(0).unsqueeze(1), live.double())


def _residual(survival: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Unnormalised distribution of the next token when the proposal is cut here."""
    return (survival.unsqueeze(1) * target - draft).clamp_min(0.0)


def _normalised(name: str, probs: torch.Tensor, counting: torch.Tensor) -> torch.Tensor:
    """Rows that sum to 1 in float64: a float32 softmax is off by 1e-7, enough for an empty residual.

    Of each proposal the first ``counting`` rows must be distributions; those behind may hold anything.
    """
    wide = probs.double()
    total = wide.sum(-1, keepdim=True)
    if probs.device.type == "cpu":
        good = (wide >= 0).all(-1) & (total > 0).squeeze(-1) & total.isfinite().squeeze(-1)
        bad = ~good & (torch.arange(probs.shape[1]) < counting.unsqueeze(1))
        if bool(bad.any()):
            raise ContractError(
                name, "no element negative, and a finite sum above 0", f"another in row {bad.nonzero()[0].tolist()}"
            )
    return wide / total


def _check_drawn(draft_tokens: torch.Tensor, draft_probs: torch.Tensor, lengths: torch.Tensor) -> None:
    if draft_probs.device.type != "cpu":
        return
    of_drawn = draft_probs.gather(2, draft_tokens.clamp_min(0).unsqueeze(2)).squeeze(2)
    never = (of_drawn == 0) & (torch.arange(draft_tokens.shape[1]) < lengths.unsqueeze(1))
    if bool(never.any()):
        raise ContractError(
            "draft_probs", "above 0 for each drawn token", f"0 for that at {never.nonzero()[0].tolist()}"
        )


def _sample(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One index per row, int64 [batch, 1], in proportion to ``weights``."""
    return torch.multinomial(weights, 1, generator=generator) if weights.shape[0] else weights.new_zeros(0, 1).long()


def _assemble(draft_tokens: torch.Tensor, accepted: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    batch, depth = draft_tokens.shape
    place = torch.arange(depth + 1, device=draft_tokens.device)
    padded = torch.cat((draft_tokens, draft_tokens.new_full((batch, 1), -1)), 1)
    kept = torch.where(place < accepted.unsqueeze(1), padded, -1)
    return kept.scatter(1, accepted.unsqueeze(1), last)


def _check_tokens(
    name: str, tokens: torch.Tensor, shape: tuple[int, int] | None, device: torch.device | None = None
) -> None:
    check_dims(name, tokens, 2)
    if tokens.dtype is not torch.int64:
        raise ContractError(name, "int64 [batch, width]", f"{tokens.dtype} {list(tokens.shape)}")
    if shape is not None and tuple(tokens.shape) != shape:
        raise ContractError(name, f"shape {list(shape)}", list(tokens.shape))
    _check_device(name, tokens, device)


def _check_probs(
    name: str, probs: torch.Tensor, leading: tuple[int, int], vocab: int | None, device: torch.device
) -> None:
    check_dims(name, probs, 3)
    if not probs.is_floating_point() or probs.shape[2] == 0:
        raise ContractError(name, "float [batch, width, vocab_size > 0]", f"{probs.dtype} {list(probs.shape)}")
    if tuple(probs.shape[:2]) != leading or (vocab is not None and probs.shape[2] != vocab):
        raise ContractError(name, f"shape {[*leading, vocab or 'vocab_size']}", list(probs.shape))
    _check_device(name, probs, device)


def _check_device(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    if device not in (None, tensor.device):
        raise ContractError(name, f"device {device}, as draft_tokens", tensor.device)
