"""The two split options and the environment variables that set their defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .checks import is_int
from .errors import ContractError

PARTIAL_DTYPE_ENV = "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"
SINGLE_SPLIT_CHUNKS_ENV = "VLLM_K3_DENSE_MLA_SINGLE_SPLIT_CHUNKS"

PARTIAL_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Names of the partial types, as the environment and the command line spell them."""


def check_partial_dtype(value: object, argument: str = "partial_dtype") -> torch.dtype:
    """``value`` as one of the two partial types, or a :class:`ContractError`."""
    if isinstance(value, str) and value in PARTIAL_DTYPES:
        return PARTIAL_DTYPES[value]
    if isinstance(value, torch.dtype) and value in PARTIAL_DTYPES.values():
        return value
    raise ContractError(argument, "torch.bfloat16 ('bf16') or torch.float32 ('fp32')", repr(value))


def check_single_split_chunks(value: object, argument: str = "single_split_chunks") -> int:
    """``value`` as a threshold in chunks (-1, 0 or more), or a :class:`ContractError`."""
    if not is_int(value, -1):
        raise ContractError(
            argument, "an int: -1 (the plan's chunks_per_split), 0 (balance every request) or N > 0", repr(value)
        )
    return value


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How long requests are split and how their partial results are kept.

    Attributes:
        partial_dtype: ``torch.bfloat16`` or ``torch.float32``: the type in which each split's normalised
            output waits for the merge. Its LSE is always float32.
        single_split_chunks: a request of at most this many 64-token chunks is scanned by one split and
            rounded once. -1 stands for the plan's own chunks per split, 0 splits every request.
    """

    partial_dtype: torch.dtype = torch.bfloat16
    single_split_chunks: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial_dtype", check_partial_dtype(self.partial_dtype))
        check_single_split_chunks(self.single_split_chunks)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SplitOptions:
        """Read ``VLLM_K3_DENSE_MLA_PARTIAL_DTYPE`` and ``VLLM_K3_DENSE_MLA_SINGLE_SPLIT_CHUNKS``.

        Raises:
            ContractError: a variable is set to something it does not accept; the message names it.
        """
        env = os.environ if environ is None else environ
        options = cls()
        dtype = options.partial_dtype
        if (text := env.get(PARTIAL_DTYPE_ENV)) is not None:
            if text not in PARTIAL_DTYPES:
                raise ContractError(PARTIAL_DTYPE_ENV, "'bf16' or 'fp32'", repr(text))
            dtype = PARTIAL_DTYPES[text]
        chunks = options.single_split_chunks
        if (text := env.get(SINGLE_SPLIT_CHUNKS_ENV)) is not None:
            accepted = "a decimal integer: -1 (the plan's chunks_per_split), 0 (balance every request) or N > 0"
            digits = text.removeprefix("-")
            # 18 digits are more than any request has chunks; Python refuses to read thousands of them.
            if not (digits.isascii() and digits.isdigit() and len(digits) <= 18) or int(text) < -1:
                raise ContractError(SINGLE_SPLIT_CHUNKS_ENV, accepted, repr(text))
            chunks = int(text)
        return cls(dtype, chunks)
