"""What every rank runs in test_query_shard.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from dcp_cases import refused

from densemla.vision import activation_bytes, even_shares, query_sharded_attention


def packed(seed: int, tokens: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, head_dim, generator=generator) for _ in range(3))
    # Cubed, so that a softmax has heavy hitters and a wrong key shows.
    return [q.pow(3), k, v]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Image by image with the whole score matrix, float64."""
    outputs = []
    for first, last in itertools.pairwise(bounds):
        queries, keys, values = (t[first:last].double().transpose(0, 1) for t in (q, k, v))
        scores = queries @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


def share_lists(tokens: int, world: int) -> list[list[int]]:
    """Even, all on one rank, and very uneven shares."""
    first = tokens // 5
    return [
        even_shares(tokens, world),
        [0] * (world - 1) + [tokens],
        [tokens] + [0] * (world - 1),
        [first] + [0] * (world - 2) + [tokens - first],
    ]


def shares_of_any_size() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    bounds = [0, 9, 9, 50, 51, 90, 90]
    for seed, (head_dim, dtype, error) in enumerate(((72, torch.float32, 1e-5), (8, torch.bfloat16, 2e-2))):
        q, k, v = (t.to(dtype) for t in packed(seed, bounds[-1], 3, head_dim))
        right = dense(q, k, v, bounds)
        for sizes in share_lists(bounds[-1], world):
            start = sum(sizes[:rank])
            mine = q[start : start + sizes[rank]]
            for cu, known in ((torch.tensor(bounds, dtype=torch.int32), None), (bounds, sizes)):
                found = query_sharded_attention(mine, k, v, cu, sizes=known)
                torch.testing.assert_close(found.double(), right, atol=error, rtol=error)
                assert found.dtype is dtype


def no_tokens_at_all() -> None:
    nothing = torch.zeros(0, 2, 8)
    for cu in ([0], [0, 0]):
        assert query_sharded_attention(nothing, nothing, nothing, cu).shape == (0, 2, 8)


def bad_input_is_refused_on_every_rank() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    odd = rank == 1
    q, k, v = packed(0, 20, 2, 8)
    sizes = even_shares(20, world)
    start = sum(sizes[:rank])
    mine = q[start : start + sizes[rank]]
    bounds = [0, 12, 20]
    own = "group" if not odd else None
    refused(lambda: query_sharded_attention(mine[:1], k, v, bounds), "sizes")
    refused(lambda: query_sharded_attention(mine, k, v, [0, 11, 20] if odd else bounds), "cu_seqlens")
    refused(lambda: query_sharded_attention(mine, k, v, [0, 12] if odd else bounds), own or "cu_seqlens")
    refused(lambda: query_sharded_attention(mine, k, v, [0, 21, 20] if odd else bounds), own or "cu_seqlens")
    refused(lambda: query_sharded_attention(mine, k, v[:9] if odd else v, bounds), own or "v")
    refused(lambda: query_sharded_attention(mine.double() if odd else mine, k, v, bounds), own or "q")
    refused(lambda: query_sharded_attention(mine, k, v, bounds, sm_scale=0.5 if odd else None), "sm_scale")
    refused(lambda: query_sharded_attention(mine, k, v, bounds, sm_scale=0.0 if odd else None), own or "sm_scale")
    for wrong in (None, 20, [0, 20.0], [False, 20], torch.tensor([[0, 20]]), torch.tensor([0, 20]).to_sparse()):
        cu = wrong if odd else bounds
        refused(lambda cu=cu: query_sharded_attention(mine, k, v, cu), own or "cu_seqlens")
    for scale in (10**400, 1e300, "1"):
        refused(
            lambda scale=scale: query_sharded_attention(mine, k, v, bounds, sm_scale=scale if odd else 1.0),
            own or "sm_scale",
        )
    refused(lambda: query_sharded_attention(mine.to_sparse() if odd else mine, k, v, bounds), own or "q")
    refused(lambda: query_sharded_attention(mine, None if odd else k, v, bounds), own or "k")
    refused(lambda: query_sharded_attention(mine[..., :0], k[..., :0], v[..., :0], bounds), "k")
    for wrong in ([20] * world, 20, [None] * world, [float(size) for size in sizes], sizes[:1]):
        refused(lambda wrong=wrong: query_sharded_attention(mine, k, v, bounds, sizes=wrong), "sizes")
    refused(lambda: query_sharded_attention(mine, None, v, bounds, sizes=sizes), "k")
    # No tiled kernel takes fp8. The ranks without a query must hear of it as well.
    q8, k8, v8 = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    refused(lambda: query_sharded_attention(q8 if odd else q8[:0], k8, v8, bounds), "q")
    right = dense(q, k, v, bounds).float()
    torch.testing.assert_close(query_sharded_attention(mine, k, v, bounds), right, atol=1e-5, rtol=1e-5)


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak_stays_under_the_formula() -> tuple[int, int, int]:
    """(measured peak, the formula's bound, what the scores alone would take) on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, heads, head_dim = 3000, 4, 72
    q, k, v = packed(1, tokens, heads, head_dim)
    sizes = even_shares(tokens, world)
    start = sum(sizes[:rank])
    mine = q[start : start + sizes[rank]]
    small = [t[: 8 * world] for t in (q, k, v)]
    query_sharded_attention(small[0][:8], small[1], small[2], [0, 8 * world])
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    query_sharded_attention(mine, k, v, [0, tokens], sizes=sizes)
    bound = activation_bytes(
        tokens, sizes[rank], heads=heads, head_dim=head_dim, itemsize=4, largest_image=tokens, cpu_threads=1
    )
    return _high_water() - before, bound, sizes[rank] * tokens * heads * 4


def attention_of_a_layer(folder: Path) -> None:
    """Attend with the q, k and v of ``layer.pt`` in uneven shares; every rank saves the whole output."""
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = torch.load(folder / "layer.pt")
    q = saved["q"]
    sizes = share_lists(q.shape[0], world)[3]
    start = sum(sizes[:rank])
    mine = q[start : start + sizes[rank]]
    found = query_sharded_attention(mine, saved["k"], saved["v"], saved["cu_seqlens"])
    torch.save(found, folder / f"output{rank}.pt")
