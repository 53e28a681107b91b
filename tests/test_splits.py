"""The split rule as properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from densemla.splits import (
    chunks_per_split,
    default_num_splits,
    launch_splits,
    live_chunks,
    live_splits,
    split_range,
)

lengths = st.integers(0, 1 << 21)
splits = st.integers(1, 300)
thresholds = st.integers(0, 5000)


@given(lengths)
def test_a_chunk_is_64_tokens(length: int) -> None:
    chunks = live_chunks(length)
    assert (chunks - 1) * 64 < length <= chunks * 64 or length == chunks == 0


@given(st.integers(0, 20000), splits, thresholds)
def test_the_ranges_partition_the_chunks_in_order(chunks: int, launched: int, threshold: int) -> None:
    ranges = [split_range(s, chunks, launched, threshold) for s in range(launched)]
    assert [c for begin, end in ranges for c in range(begin, end)] == list(range(chunks))
    live = [end > begin for begin, end in ranges]
    assert sum(live) == live_splits(chunks, launched, threshold)
    assert live == sorted(live, reverse=True), "empty splits come last"


@given(st.integers(1, 20000), splits, thresholds)
def test_sizes_follow_the_rule(chunks: int, launched: int, threshold: int) -> None:
    per = chunks_per_split(chunks, launched, threshold)
    if chunks <= threshold:
        assert split_range(0, chunks, launched, threshold) == (0, chunks)
    else:
        assert per == -(-chunks // launched)


@given(st.lists(lengths, min_size=1, max_size=8), splits, thresholds)
def test_eager_and_graph_launches_cut_every_request_alike(batch: list[int], num_splits: int, threshold: int) -> None:
    active = launch_splits(max(batch), num_splits, threshold)
    assert 1 <= active <= num_splits
    for length in batch:
        chunks = live_chunks(length)
        eager = [split_range(s, chunks, active, threshold) for s in range(live_splits(chunks, active, threshold))]
        graph = [
            split_range(s, chunks, num_splits, threshold) for s in range(live_splits(chunks, num_splits, threshold))
        ]
        assert eager == graph


@given(st.lists(lengths, min_size=1, max_size=8), splits, thresholds)
def test_an_eager_launch_is_no_larger_than_it_must_be(batch: list[int], num_splits: int, threshold: int) -> None:
    longest = live_chunks(max(batch))
    active = launch_splits(max(batch), num_splits, threshold)
    assert active == (1 if longest <= threshold else max(1, min(num_splits, longest)))


@given(st.integers(1, 16384), st.integers(1, 512), st.integers(1, 264), st.integers(1, 264))
def test_the_default_split_count_is_valid_and_leaves_no_split_empty_at_capacity(
    max_chunks: int, rows: int, lanes: int, limit: int
) -> None:
    count = default_num_splits(max_chunks, rows, lanes, limit)
    assert 1 <= count <= min(limit, max_chunks)
    assert live_splits(max_chunks, count, 0) == count


def test_the_default_split_count_fills_the_workers() -> None:
    assert default_num_splits(2048, 1, 132, 1 << 16) == 128, "one long request: every worker, 16 chunks each"
    assert default_num_splits(64, 128, 132, 1 << 16) == 1, "a full batch: no split at all"
    assert default_num_splits(128, 64, 132, 1 << 16) == 2
    assert default_num_splits(2048, 1, 132, 8) == 8, "max_splits"
