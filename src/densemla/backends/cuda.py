"""What the CUDA backends share on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..splits import ceil_div

if TYPE_CHECKING:
    from ..caps import Caps

_MOST_TOKENS = 1 << 30


def rows_per_request(caps: Caps) -> int:
    """Query rows of a request when queries are spread evenly."""
    return caps.num_q_heads * ceil_div(caps.max_total_q, caps.max_batch)


def device_refusal(caps: Caps) -> str | None:
    """Why no CUDA kernel can run ``caps`` here; None when there is a device."""
    if caps.device.type != "cuda":
        return f"it needs a CUDA device, not {caps.device}"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch finds no CUDA device here: see `densemla doctor`"
    return None


def token_refusal(caps: Caps) -> str | None:
    """Why kernels that count tokens in 32 bits can't run ``caps``; None when they can."""
    if caps.max_cache_tokens > _MOST_TOKENS:
        return f"it counts tokens in 32 bits: at most {_MOST_TOKENS} per request"
    return None
