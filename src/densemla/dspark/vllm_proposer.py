"""A proposer for vLLM's V1 runner that asks a remote, token-only DSpark draft.

``speculative_config={"method": "custom_class", "model": "densemla.dspark.vllm_proposer.RemoteDSparkProposer",
"num_speculative_tokens": 3}``

vLLM hands a custom class the sampled ids and the token table, and no hidden states. A draft whose context
rows are target states, as Kimi-K3's, can't be driven through this interface; one without captured layers
(``target_layer_ids: []``), whose context is the tokens themselves, can. No row says which request it
belongs to either, so a request is recognised by its tokens.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ContractError
from .checkpoint import identity, load_config
from .protocol import geometry_of
from .remote import DraftUnreachableError, RemoteDraft

log = logging.getLogger(__name__)

ENDPOINT_ENV = "DENSEMLA_DSPARK_ENDPOINT"
DRAFT_ENV = "DENSEMLA_DSPARK_DRAFT"
TIMEOUT_ENV = "DENSEMLA_DSPARK_TIMEOUT_MS"


@dataclass(slots=True)
class _Tracked:
    """What a row of the batch was when the draft last heard of it."""

    number: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]


class RemoteDSparkProposer:
    """vLLM's ``custom_class`` interface over a :class:`RemoteDraft`.

    ``DENSEMLA_DSPARK_ENDPOINT`` is the server's address, ``DENSEMLA_DSPARK_DRAFT`` the draft's folder (its
    sizes and identity are what the server must answer with), ``DENSEMLA_DSPARK_TIMEOUT_MS`` the bound of a
    call, 50 by default.

    Args:
        vllm_config: read are ``speculative_config.num_speculative_tokens``, ``model_config.max_model_len``
            and ``model_config.get_vocab_size()``.

    Raises:
        ContractError: a variable is missing or malformed, or the draft needs what vLLM does not pass.
    """

    def __init__(self, vllm_config: Any, environ: Mapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        for name in (ENDPOINT_ENV, DRAFT_ENV):
            if not env.get(name):
                raise ContractError(name, "to be set in the environment of vLLM's workers", "nothing")
        folder = Path(env[DRAFT_ENV])
        timeout = env.get(TIMEOUT_ENV, "50")
        if not timeout.isdecimal() or timeout == "0":
            raise ContractError(TIMEOUT_ENV, "whole milliseconds above 0", repr(timeout))
        config = load_config(folder)
        if config.target_layer_ids:
            raise ContractError(
                DRAFT_ENV,
                "a token-only draft (target_layer_ids empty): vLLM's custom_class interface passes no hidden states",
                f"one that needs the target's layers {list(config.target_layer_ids)}",
            )
        vocab = vllm_config.model_config.get_vocab_size()
        if vocab != config.vocab_size:
            raise ContractError(DRAFT_ENV, f"a draft for the target's vocabulary of {vocab}", config.vocab_size)
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.depth = min(vllm_config.speculative_config.num_speculative_tokens, config.block_size)
        self.remote = RemoteDraft(env[ENDPOINT_ENV], geometry_of(config, identity(folder)), timeout=int(timeout) / 1000)
        self._rows: dict[int, _Tracked] = {}
        self._numbers = itertools.count()

    def load_model(self, target_model: Any) -> None:
        """Connect; nothing of the target is used.

        Raises:
            DraftRefusedError: the server does not serve this draft. One that does not answer yet is no
                error: the target then runs without proposals until it does.
        """
        try:
            self.remote.connect()
        except DraftUnreachableError as error:
            log.warning("%s; going on without proposals", error)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every row that has just sampled; an empty list for the others.

        Args:
            sampled_token_ids: per row of the batch; empty while a prompt is still coming in.
            num_tokens_no_spec: [rows], tokens of each row, the sampled ones included.
            token_ids_cpu: [rows, max_model_len], the tokens themselves.
            slot_mappings: not used.
        """
        asking, requests = [], []
        for row, sampled in enumerate(sampled_token_ids):
            count = int(num_tokens_no_spec[row])
            if not sampled or count + 1 > self.max_model_len:
                continue
            tokens = np.ascontiguousarray(token_ids_cpu[row, :count], dtype=np.int32)
            tracked = self._tracked(row, tokens)
            context = torch.from_numpy(tokens[:-1].copy())
            request = self.remote.request_for(tracked.number, context, len(tracked.tokens), int(tokens[-1]))
            tracked.tokens = tokens[: request.start + request.rows.shape[0]]
            asking.append(row)
            requests.append(request)
        self._forget_rows_from(len(sampled_token_ids))
        proposals: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, ids in zip(asking, self.remote.propose(requests).tolist(), strict=True):
            room = self.max_model_len - int(num_tokens_no_spec[row])
            proposals[row] = [token for token in ids[: min(self.depth, room)] if token >= 0]
        return proposals

    def _tracked(self, row: int, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> _Tracked:
        """The request in a row: the one known there if its tokens go on from what the draft has, or a new one."""
        known = self._rows.get(row)
        if known is not None:
            if len(known.tokens) < len(tokens) and np.array_equal(known.tokens, tokens[: len(known.tokens)]):
                return known
            self.remote.finish([known.number])
        fresh = self._rows[row] = _Tracked(next(self._numbers), tokens[:0])
        return fresh

    def _forget_rows_from(self, rows: int) -> None:
        for row in [row for row in self._rows if row >= rows]:
            self.remote.finish([self._rows.pop(row).number])
