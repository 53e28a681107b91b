"""Speculative greedy decoding with a remote draft: a small, complete serving loop.

The demo and the fault tests run this loop. It keeps every request's context rows, so that a request whose
draft was lost can start anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .remote import DraftRequest
from .verify import greedy


class Proposer(Protocol):
    """What the loop needs of :class:`densemla.dspark.RemoteDraft`."""

    def propose(self, requests: Sequence[DraftRequest]) -> torch.Tensor: ...

    def request_for(self, request: int, rows: torch.Tensor, sent: int, anchor: int) -> DraftRequest: ...

    def finish(self, requests: Sequence[int]) -> None: ...


class Target(Protocol):
    """A target that serves several requests from its own cache."""

    def step(
        self, requests: Sequence[int], tokens: Sequence[list[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run each request's new tokens; per request: logits [n, vocab_size], context rows bf16 [n, width]."""

    def truncate(self, request: int, length: int) -> None:
        """Forget a request's tokens from ``length`` on: rejected drafts."""

    def finish(self, request: int) -> None: ...


@dataclass(slots=True)
class _Running:
    number: int
    tokens: list[int]
    prompt: int
    rows: torch.Tensor
    """Context rows of all tokens but the newest."""
    sent: int = 0


@dataclass(slots=True)
class Generation:
    """What a run produced.

    Attributes:
        tokens: per prompt, the generated ids.
        target_steps: how often the target ran after the prompts.
        request_steps: the same, counted per request.
        accepted: drafted tokens that stood.
    """

    tokens: list[list[int]] = field(default_factory=list)
    target_steps: int = 0
    request_steps: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a request gains per target step: 1 without a draft that helps."""
        return 1 + self.accepted / max(self.request_steps, 1)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    draft: Proposer | None = None,
    progress: Callable[[int], None] = lambda _: None,
    first: int = 0,
) -> Generation:
    """Greedy decoding of all prompts in one batch, with or without a draft; the tokens are the same.

    Args:
        target: runs the steps.
        prompts: token ids, at least one each.
        new_tokens: tokens to generate per prompt.
        draft: None decodes plainly.
        progress: called with the tokens that each step added.
        first: number of the first prompt's request; a draft must never see one number twice.
    """
    result = Generation(tokens=[[] for _ in prompts])
    running = []
    numbers = range(first, first + len(prompts))
    logits, rows = target.step(numbers, [list(prompt) for prompt in prompts])
    for number, prompt, last, row in zip(numbers, prompts, logits, rows, strict=True):
        running.append(_Running(number, [*prompt, int(last[-1].argmax())], len(prompt), row))
    progress(len(running))
    while running := [request for request in running if len(request.tokens) - request.prompt < new_tokens]:
        proposals = _propose(draft, running)
        drafted = [[token for token in row if token >= 0] for row in proposals.tolist()]
        logits, rows = target.step(
            [request.number for request in running],
            [[request.tokens[-1], *tokens] for request, tokens in zip(running, drafted, strict=True)],
        )
        result.target_steps += 1
        result.request_steps += len(running)
        choices = torch.full((len(running), proposals.shape[1] + 1), -1, dtype=torch.int64)
        for i, chosen in enumerate(logits):
            choices[i, : chosen.shape[0]] = chosen.argmax(-1)
        verified = greedy(proposals, choices)
        added = 0
        for i, request in enumerate(running):
            accepted = int(verified.accepted[i])
            request.rows = torch.cat((request.rows, rows[i][: accepted + 1]))
            target.truncate(request.number, len(request.tokens) + accepted)
            request.tokens.extend(verified.tokens[i, : accepted + 1].tolist())
            result.accepted += accepted
            added += accepted + 1
            if len(request.tokens) - request.prompt >= new_tokens:
                result.tokens[request.number - first] = request.tokens[request.prompt :][:new_tokens]
                target.finish(request.number)
                if draft is not None:
                    draft.finish([request.number])
        progress(added)
    return result


def _propose(draft: Proposer | None, running: list[_Running]) -> torch.Tensor:
    if draft is None:
        return torch.empty(len(running), 0, dtype=torch.int64)
    requests = []
    for request in running:
        asked = draft.request_for(request.number, request.rows, request.sent, request.tokens[-1])
        request.sent = asked.start + asked.rows.shape[0]
        requests.append(asked)
    return draft.propose(requests)
