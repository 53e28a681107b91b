"""Decode context parallelism and the gathers it needs, over ``torch.distributed`` (gloo and NCCL)."""

from .collectives import PeerError, end_soon_after_a_timeout
from .dcp import DcpBinding, DcpDecoder
from .gather import all_gatherv
from .lse_merge import LseMerge

__all__ = ["DcpBinding", "DcpDecoder", "LseMerge", "PeerError", "all_gatherv", "end_soon_after_a_timeout"]
