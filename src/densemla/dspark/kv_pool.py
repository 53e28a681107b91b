"""Latent rows of many requests in one paged cache of fixed size; the oldest request makes room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from .. import kv_cache
from ..errors import ContractError
from ..splits import ceil_div


@dataclass(slots=True)
class Entry:
    """One request's part of the pool."""

    tokens: int = 0
    """Context tokens whose rows are stored."""
    pages: list[int] = field(default_factory=list)


class KVPool:
    """Pages of ``page_size`` tokens for every layer of a model, handed out to requests.

    Attributes:
        caches: [layers, num_pages, page_size, kv_lora_rank + qk_rope_head_dim]; ``caches[layer]`` is what
            :func:`densemla.bind` takes as ``kv_cache``. All layers share a request's page numbers.
        evictions: requests that lost their pages to another one, ever.
    """

    def __init__(
        self,
        byte_budget: int,
        *,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        self.page_bytes = num_layers * page_size * (kv_lora_rank + qk_rope_head_dim) * dtype.itemsize
        self.num_pages = byte_budget // self.page_bytes
        if self.num_pages < 1:
            raise ContractError("byte_budget", f"at least one page of {self.page_bytes} bytes", byte_budget)
        if (most := kv_cache.MOST_PAGES // num_layers) < self.num_pages:
            raise ContractError("byte_budget", f"at most {most} pages of {self.page_bytes} bytes", byte_budget)
        try:
            pages = kv_cache.empty(
                num_layers * self.num_pages,
                page_size,
                dtype,
                kv_lora_rank=kv_lora_rank,
                qk_rope_head_dim=qk_rope_head_dim,
                device=device,
            )
        except RuntimeError as error:
            # Torch's word for too little memory, with a stack of C++ below its first line.
            why = str(error).split("\n", 1)[0]
            raise ContractError("byte_budget", f"memory that {device} has", f"{byte_budget} bytes: {why}") from error
        self.caches = pages.view(num_layers, self.num_pages, *pages.shape[1:])
        self.evictions = 0
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_pages * self.page_size

    @property
    def bytes_used(self) -> int:
        return (self.num_pages - len(self._free)) * self.page_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Entry | None:
        """The request's entry, or None when it never was here or has been evicted."""
        return self._entries.get(key)

    def reset(self, key: Hashable) -> Entry:
        """Give the request a new, empty entry."""
        self.release(key)
        entry = self._entries[key] = Entry()
        return entry

    def release(self, key: Hashable) -> None:
        """Forget a request; unknown ones are fine."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._free.extend(reversed(entry.pages))

    def release_all(self, keys: Iterable[Hashable]) -> None:
        for key in list(keys):
            self.release(key)

    def __iter__(self) -> Iterator[Hashable]:
        """All requests, least recently used first."""
        return iter(list(self._entries))

    def reserve(self, key: Hashable, tokens: int, keep: Collection[Hashable] = ()) -> bool:
        """Make room for ``tokens`` tokens of a request and mark it as just used.

        The requests that were used least recently are evicted until it fits, except those in ``keep``.

        Returns:
            False when it does not fit even so; the request is then evicted itself.
        """
        entry = self._entries[key]
        self._entries.move_to_end(key)
        missing = ceil_div(tokens, self.page_size) - len(entry.pages)
        for old in self:
            if missing <= len(self._free):
                break
            if old != key and old not in keep:
                self.release(old)
                self.evictions += 1
        if missing > len(self._free):
            self.release(key)
            self.evictions += 1
            return False
        entry.pages.extend(self._free.pop() for _ in range(missing))
        return True

    def slots(self, entry: Entry, start: int, count: int) -> torch.Tensor:
        """Slots of tokens ``[start, start + count)``, int64, for :func:`densemla.kv_cache.append`."""
        tokens = torch.arange(start, start + count)
        return torch.tensor(entry.pages)[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def page_table(self, entries: Iterable[Entry]) -> torch.Tensor:
        """int32 [batch, width] on the pool's device; rows are padded with -1."""
        rows = [entry.pages for entry in entries]
        width = max((len(row) for row in rows), default=0)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int32, device=self.caches.device).reshape(len(rows), width)
