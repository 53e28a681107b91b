"""The backends: each is only the arithmetic of a decode, over inputs that are already checked."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import ContractError

if TYPE_CHECKING:
    from ..binding import Binding
    from ..caps import Caps


SPLIT_FEATURES = frozenset(
    {"query_cache_seqlens", "cu_seqlens_q", "active_splits", "partial_dtype", "single_split_chunks"}
)
"""Features of a backend that follows the split options."""


class Backend(Protocol):
    """What a backend offers. Stateless: everything that varies is in the plan and the binding."""

    name: str
    features: frozenset[str]
    """What :meth:`densemla.Plan.supports` answers True for."""
    most_splits: int
    """Largest ``num_splits`` it can launch."""

    def refusal(self, caps: Caps) -> str | None:
        """Why it can't run ``caps`` here, in words for the user; None when it can."""

    def occupancy(self, caps: Caps) -> tuple[int, int]:
        """``(rows, lanes)`` for :func:`densemla.splits.default_num_splits`."""

    def workspace(self, caps: Caps, num_splits: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Scratch beyond the partials, by name: shape and dtype."""

    def compile(self, binding: Binding) -> None:
        """Make everything ready that the first ``run`` would otherwise have to build."""

    def run(self, binding: Binding) -> None:
        """Decode; allocates nothing and writes only output, lse and scratch."""


_MODULES = {
    "hopper": "densemla.backends.hopper",
    "triton": "densemla.backends.triton",
    "cpu": "densemla.backends.cpu",
    "reference": "densemla.backends.reference",
}
"""Backend name to the module that holds its ``BACKEND``; in the order in which ``auto`` asks them."""

_ONLY_BY_NAME = ("reference",)
"""Never chosen by ``auto``."""


def backend_names() -> tuple[str, ...]:
    """Names that ``Caps(backend=...)`` accepts, besides ``"auto"``."""
    return tuple(_MODULES)


def load(name: str) -> Backend:
    """The backend called ``name``."""
    if name not in _MODULES:
        raise ContractError("backend", "one of " + ", ".join(("auto", *_MODULES)), repr(name))
    backend: Backend = importlib.import_module(_MODULES[name]).BACKEND
    return backend


def resolve(caps: Caps) -> Backend:
    """The backend for ``caps``: the one it names, or for ``"auto"`` the first that can run it."""
    if caps.backend != "auto":
        backend = load(caps.backend)
        if (why := backend.refusal(caps)) is not None:
            raise ContractError("backend", f"caps that {caps.backend!r} can run here", why)
        return backend
    reasons = []
    for name in _MODULES:
        if name in _ONLY_BY_NAME:
            continue
        backend = load(name)
        if (why := backend.refusal(caps)) is None:
            return backend
        reasons.append(f"{name}: {why}")
    raise ContractError("backend", "caps that some backend can run here", "; ".join(reasons))
