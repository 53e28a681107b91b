"""How a request's visible tokens are cut into splits: pure integer functions.

Every backend follows these, in Python on the host and as the same arithmetic in its kernels. A *chunk*
is 64 tokens. A request with ``C`` live chunks, decoded by ``A`` launched splits, is scanned by split 0
alone when ``C <= single_split_chunks``; otherwise each split scans ``ceil(C / A)`` consecutive chunks
and the splits left over are empty.

Why an eager launch gives the bits of a graph launch: a graph launches all ``S`` splits of the plan, an
eager step ``A = min(S, L)`` with ``L`` the live chunks of the longest request. If ``L >= S`` the two
are one number. Otherwise ``C <= L = A < S``, so ``ceil(C / A) == ceil(C / S) == 1``.
"""

from __future__ import annotations

CHUNK_TOKENS = 64

# What starting and merging one more split costs, in chunks of scanning (prologue, partial write, merge
# read). Only the default split count depends on it.
_SPLIT_COST_CHUNKS = 2


def ceil_div(a: int, b: int) -> int:
    """``ceil(a / b)`` for ``a >= 0`` and ``b > 0``."""
    return -(-a // b)


def live_chunks(cache_seqlen: int) -> int:
    """Chunks that hold ``cache_seqlen`` visible tokens; 0 tokens hold none."""
    return ceil_div(cache_seqlen, CHUNK_TOKENS)


def chunks_per_split(chunks: int, launched: int, single_split_chunks: int) -> int:
    """Consecutive chunks that each split of a request scans (the last one may get fewer).

    Args:
        chunks: live chunks ``C`` of the request.
        launched: launched splits ``A``, at least 1.
        single_split_chunks: largest request that split 0 scans alone.
    """
    if chunks <= single_split_chunks:
        return chunks
    return ceil_div(chunks, launched)


def live_splits(chunks: int, launched: int, single_split_chunks: int) -> int:
    """Splits of a request that scan at least one chunk; the other launched ones are empty."""
    if chunks == 0:
        return 0
    return ceil_div(chunks, chunks_per_split(chunks, launched, single_split_chunks))


def split_range(split: int, chunks: int, launched: int, single_split_chunks: int) -> tuple[int, int]:
    """Chunks ``[begin, end)`` that split number ``split`` scans; ``begin == end`` when it is empty."""
    per = chunks_per_split(chunks, launched, single_split_chunks)
    begin = min(split * per, chunks)
    return begin, min(begin + per, chunks)


def launch_splits(longest_cache_seqlen: int, num_splits: int, single_split_chunks: int) -> int:
    """Splits that an eager step has to launch so that its bits are those of a graph launch.

    Args:
        longest_cache_seqlen: the longest visible length in the batch, in tokens.
        num_splits: the plan's splits ``S``, which a graph always launches.
        single_split_chunks: largest request that split 0 scans alone.
    """
    chunks = live_chunks(longest_cache_seqlen)
    if chunks <= max(single_split_chunks, 1):
        return 1
    return min(num_splits, chunks)


def default_num_splits(max_chunks: int, rows: int, lanes: int, limit: int) -> int:
    """The split count that finishes ``rows`` requests of ``max_chunks`` chunks soonest on ``lanes`` workers.

    A step takes ``waves * (chunks per split + fixed cost)``; ties go to fewer splits, which round less.

    Args:
        max_chunks: chunks of the longest request the plan admits, at least 1.
        rows: independent pieces of work before splitting (requests times query tiles).
        lanes: pieces that run at once (multiprocessors, or a nominal number on the CPU).
        limit: the largest answer allowed, at least 1.
    """

    def cost(splits: int) -> int:
        waves = ceil_div(rows * splits, lanes)
        return waves * (ceil_div(max_chunks, splits) + _SPLIT_COST_CHUNKS)

    best = min(range(1, min(max_chunks, limit, max(lanes, 1)) + 1), key=cost)
    # 33 splits of 31 chunks may cover in 32: launch no split that could only be empty.
    return ceil_div(max_chunks, ceil_div(max_chunks, best))
