"""DSpark: block drafting on its own device, and a verifier that trusts nothing it is sent.

The model, the checkpoint loader and the verifier need torch alone. What talks over a socket needs the
``dspark`` extra (``pip install '.[dspark]'`` in a checkout) and is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import KIMI_K3_DSPARK, DSparkConfig, RopeConfig
from .model import DSparkDraft
from .verify import Verified, block_rejection_sample, greedy

if TYPE_CHECKING:
    from .protocol import Geometry
    from .remote import DraftRefusedError, DraftRequest, DraftUnreachableError, RemoteDraft

_NEED_EXTRA = {
    "DraftRefusedError": "remote",
    "DraftRequest": "remote",
    "DraftUnreachableError": "remote",
    "Geometry": "protocol",
    "RemoteDraft": "remote",
}

__all__ = [
    "KIMI_K3_DSPARK",
    "DSparkConfig",
    "DSparkDraft",
    "DraftRefusedError",
    "DraftRequest",
    "DraftUnreachableError",
    "Geometry",
    "RemoteDraft",
    "RopeConfig",
    "Verified",
    "block_rejection_sample",
    "greedy",
]


def __getattr__(name: str) -> Any:
    if name in _NEED_EXTRA:
        return getattr(importlib.import_module(f".{_NEED_EXTRA[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
