"""What a draft server does with a checked call: the requests of all sessions over one pool."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from .kv_pool import KVPool
from .model import BlockStep, DSparkDraft, PagedDraft
from .protocol import NEEDS_RESET, OK, Geometry, Item, geometry_of

Key = tuple[int, int]
"""Session and the verifier's number of a request."""


class Engine(Protocol):
    """The part of a server that drafts."""

    geometry: Geometry
    max_batch: int
    max_rows: int
    """Most context rows of one request in one call."""

    def draft(
        self, session: int, items: Sequence[Item], frames: Sequence[memoryview]
    ) -> tuple[torch.Tensor, list[int]]:
        """Carry out a call whose numbers and frames fit: ids int64 [items, depth] and a status per item."""

    def forget(self, session: int, requests: Sequence[int] | None = None) -> None:
        """Drop requests of a session; None drops all of them."""

    def stats(self) -> dict[str, float]:
        """Gauges for ``/metrics``."""


class DraftEngine:
    """A :class:`DSparkDraft` behind the protocol.

    Args:
        model: on its device, in its dtype.
        checkpoint: identity for the hello.
        kv_bytes: budget of the paged cache. A request that loses its pages to a newer one gets -1 and
            ``NEEDS_RESET`` at its next call.
        depth: ids per reply, at most the block size; None is the block size.
        max_batch: most requests in a call.
        max_rows: most context rows of one request in one call.
        page_size: tokens in a page.
    """

    def __init__(
        self,
        model: DSparkDraft,
        *,
        checkpoint: str,
        kv_bytes: int,
        depth: int | None = None,
        max_batch: int = 64,
        max_rows: int = 4096,
        page_size: int = 64,
    ) -> None:
        config, weight = model.config, model.context_proj.weight
        self.pool = KVPool(
            kv_bytes,
            num_layers=config.num_hidden_layers,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            page_size=page_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.paged = PagedDraft(model, self.pool, max_batch)
        self.max_batch = max_batch
        self.max_positions = min(config.max_position_embeddings, self.pool.capacity)
        self.max_rows = max_rows
        self.geometry = geometry_of(config, checkpoint, depth)

    def draft(
        self, session: int, items: Sequence[Item], frames: Sequence[memoryview]
    ) -> tuple[torch.Tensor, list[int]]:
        waiting = iter(frames)
        rows = [self._rows(next(waiting) if item.rows else b"") for item in items]
        keys = [(session, item.request) for item in items]
        status = [OK if self._admit(key, item, keys) else NEEDS_RESET for key, item in zip(keys, items, strict=True)]
        # Admitting a later request can cost an earlier one its pages only if keep was too large to fit.
        live = [i for i, key in enumerate(keys) if status[i] == OK]
        steps = []
        for i in live:
            entry = self.pool.get(keys[i])
            assert entry is not None
            steps.append(BlockStep(entry, rows[i], items[i].anchor))
        ids = torch.full((len(items), self.geometry.depth), -1, dtype=torch.int64)
        if steps:
            ids[live] = self.paged.step(steps, self.geometry.depth)
        return ids, status

    def _admit(self, key: Key, item: Item, batch: list[Key]) -> bool:
        """Make room for a request's rows and its block; False when it has to start anew."""
        end = item.start + item.rows + self.geometry.block_size
        entry = self.pool.reset(key) if item.reset else self.pool.get(key)
        if entry is None or entry.tokens != item.start or end > self.max_positions:
            self.pool.release(key)
            return False
        return self.pool.reserve(key, end, keep=batch)

    def _rows(self, frame: memoryview | bytes) -> torch.Tensor:
        width = self.geometry.context_width
        dtype = torch.bfloat16 if width else torch.int32
        shape = (-1, width) if width else (-1,)
        if not len(frame):
            return torch.empty(0, *shape[1:], dtype=dtype)
        with warnings.catch_warnings():
            # The frame may be read-only; nothing writes to these rows.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            rows = torch.frombuffer(frame, dtype=dtype).view(shape)
        # A token id becomes an index into the embedding.
        return rows if width else rows.clamp(0, self.geometry.vocab_size - 1)

    def forget(self, session: int, requests: Sequence[int] | None = None) -> None:
        if requests is None:
            self.pool.release_all(key for key in self.pool if isinstance(key, tuple) and key[0] == session)
        else:
            self.pool.release_all((session, request) for request in requests)

    def stats(self) -> dict[str, float]:
        return {
            "requests": len(self.pool),
            "kv_bytes_used": self.pool.bytes_used,
            "kv_bytes_total": self.pool.num_pages * self.pool.page_bytes,
            "evictions": self.pool.evictions,
        }
