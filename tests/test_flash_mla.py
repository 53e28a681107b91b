"""The FlashMLA-compatible interface against float64, in FlashMLA's documented shapes and conventions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

import pytest
import torch

import densemla
from densemla import kv_cache
from densemla.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata

D, DV = 576, 512
RECORD = 656


@pytest.fixture(
    autouse=True,
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every tensor of a test is made there."""
    with torch.device(request.param):
        yield request.param


def generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def precise() -> torch.dtype:
    """The most precise type that a backend multiplies where the test's tensors are made."""
    return torch.float32 if torch.get_default_device().type == "cpu" else torch.float16


MAIN_ARGUMENTS = [
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "head_dim_v",
    "tile_scheduler_metadata",
    "num_splits",
    "softmax_scale",
    "causal",
    "is_fp8_kvcache",
    "indices",
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "topk_length",
    "extra_topk_length",
]


def attention(q: torch.Tensor, rows: torch.Tensor, scale: float = D**-0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of q [heads, d] over rows [tokens, d]: output [heads, DV] and natural-log LSE [heads]."""
    if rows.shape[0] == 0:
        return q.new_zeros(q.shape[0], DV, dtype=torch.float64), torch.full((q.shape[0],), math.inf).double()
    scores = scale * (q.double() @ rows.double().T)
    return scores.softmax(-1) @ rows[:, :DV].double(), scores.logsumexp(-1)


class Case:
    """A batch of requests whose pages lie scattered in a cache that is NaN wherever no request owns the row."""

    def __init__(self, lengths: list[int], s_q: int, h_q: int, dtype: torch.dtype, block: int = 64, seed: int = 0):
        gen = generator(seed)
        self.lengths, self.s_q, self.h_q, self.block = lengths, s_q, h_q, block
        b = len(lengths)
        width = max(1, -(-max(lengths) // block))
        num_blocks = b * width + 3
        self.q = torch.randn(b, s_q, h_q, D, generator=gen).mul_(3).to(dtype)
        self.block_table = torch.randperm(num_blocks, generator=gen)[: b * width].view(b, width).int()
        rows = torch.randn(num_blocks, block, D, generator=gen)
        # One latent direction dominates here and there: logits are heavy-tailed, not near uniform.
        rows[::3, ::7] *= 4
        self.rows = rows.to(dtype)
        self.cache_seqlens = torch.tensor(lengths, dtype=torch.int32)
        owned = torch.zeros(num_blocks, block, dtype=torch.bool)
        for i, n in enumerate(lengths):
            for t in range(n):
                owned[self.block_table[i, t // block], t % block] = True
        self.rows[~owned] = math.nan

    def slots(self, i: int) -> torch.Tensor:
        tokens = torch.arange(self.lengths[i])
        return self.block_table[i].long()[tokens // self.block] * self.block + tokens % self.block

    def plain(self) -> torch.Tensor:
        return self.rows.unsqueeze(2).clone()

    def records(self, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache as 656-byte records, and the rows that they stand for."""
        flat = self.rows.reshape(-1, D).nan_to_num(0)
        packed = kv_cache.empty(self.rows.shape[0], self.block, "fp8_ds_mla", device=flat.device)
        kv_cache.append(flat[:, :DV], flat[:, DV:], packed, torch.arange(flat.shape[0]))
        stood = torch.empty(flat.shape[0], D)
        latent = packed[..., :DV].reshape(-1, DV).view(torch.float8_e4m3fn).float()
        scales = packed[..., DV : DV + 16].reshape(-1, 16).contiguous().view(torch.float32)
        stood[:, :DV] = latent * scales.repeat_interleave(128, 1)
        stood[:, DV:] = packed[..., DV + 16 :].reshape(-1, 128).contiguous().view(torch.bfloat16)
        return packed.unsqueeze(2).view(dtype), stood

    def indices(self, topk: int, seed: int = 1) -> torch.Tensor:
        """Random own slots per query, -1 strewn between; the first query of the last request gets none."""
        gen = generator(seed)
        chosen = torch.full((len(self.lengths), self.s_q, topk), -1, dtype=torch.int32)
        for i, n in enumerate(self.lengths):
            for t in range(self.s_q):
                count = min(n, topk)
                picked = self.slots(i)[torch.randperm(n, generator=gen)[:count]].int()
                picked[torch.rand(count, generator=gen) < 0.3] = -1
                chosen[i, t, torch.randperm(topk, generator=gen)[:count]] = picked
        chosen[-1, 0] = -1
        return chosen


def check(
    out: torch.Tensor, lse: torch.Tensor, case: Case, rows_of: object, scale: float = D**-0.5, tol: float = 2e-5
) -> None:
    """Compare with float64 over ``rows_of(i, t)``; shapes and the +inf convention included."""
    b, s_q, h = len(case.lengths), case.s_q, case.h_q
    assert out.shape == (b, s_q, h, DV)
    assert out.dtype is case.q.dtype
    assert lse.shape == (b, h, s_q)
    assert lse.dtype is torch.float32
    tol = max(tol, {torch.bfloat16: 1e-2, torch.float16: 5e-3}.get(case.q.dtype, 0))
    # A GPU multiplies in 16 bits, an fp8 record's values too: its scores are no better.
    lse_tol = 1e-4 if precise() is torch.float32 else 2e-2
    for i in range(b):
        for t in range(s_q):
            want, want_lse = attention(case.q[i, t], rows_of(i, t), scale)
            assert not out[i, t].isnan().any()
            error = (out[i, t].double() - want).norm() / max(want.norm().item(), 1e-9)
            assert error < tol, (i, t, error)
            torch.testing.assert_close(lse[i, :, t].double(), want_lse, rtol=1e-5, atol=lse_tol)
            if math.isinf(want_lse[0]):
                assert (out[i, t] == 0).all()


@pytest.mark.parametrize("form", ["old", "older", "new"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("s_q", "h_q", "dtype"), [(1, 16, torch.bfloat16), (2, 7, None)])
def test_dense(form: str, causal: bool, s_q: int, h_q: int, dtype: torch.dtype | None) -> None:
    case = Case([1, 0, 63, 64, 700, 4200], s_q, h_q, dtype or precise())
    if form == "new":
        metadata, num_splits = get_mla_metadata()
        assert isinstance(metadata, FlashMLASchedMeta)
        assert num_splits is None
    else:
        if form == "old":
            metadata, num_splits = get_mla_metadata(case.cache_seqlens, s_q * h_q, 1, h_q, False, None)
        else:
            metadata, num_splits = get_mla_metadata(case.cache_seqlens, num_heads_per_head_k=s_q * h_q, num_heads_k=1)
        assert metadata.dtype is num_splits.dtype is torch.int32
        assert metadata.shape[1] == 8
        assert num_splits.shape == (len(case.lengths) + 1,)
    for _ in range(2):  # one metadata serves every layer
        out, lse = flash_mla_with_kvcache(
            case.q, case.plain(), case.block_table, case.cache_seqlens, DV, metadata, num_splits, causal=causal
        )
    flat = case.rows.reshape(-1, D)

    def rows_of(i: int, t: int) -> torch.Tensor:
        n = case.lengths[i]
        return flat[case.slots(i)[: max(n - s_q + 1 + t, 0) if causal else n]]

    check(out, lse, case, rows_of, tol=1e-2)  # partials are bf16 by default


def test_float32_partials_reach_it_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE", "fp32")
    case = Case([9000], 1, 4, precise())
    out, lse = flash_mla_with_kvcache(
        case.q, case.plain(), case.block_table, case.cache_seqlens, DV, *get_mla_metadata(), softmax_scale=0.05
    )
    flat = case.rows.reshape(-1, D)
    check(out, lse, case, lambda i, _: flat[case.slots(i)], scale=0.05)


def test_two_key_heads() -> None:
    case = Case([5, 300], 2, 8, precise())
    second = torch.randn(case.rows.shape, generator=generator(5)).to(case.rows.dtype)
    cache = torch.stack((case.rows, second), 2)
    out, lse = flash_mla_with_kvcache(
        case.q, cache, case.block_table, case.cache_seqlens, DV, *get_mla_metadata(), causal=True
    )
    for head, rows in enumerate((case.rows, second)):
        part = slice(head * 4, head * 4 + 4)
        half = Case([5, 300], 2, 4, precise())
        half.q = case.q[:, :, part]
        flat = rows.reshape(-1, D)
        check(
            out[:, :, part],
            lse[:, part],
            half,
            lambda i, t, flat=flat: flat[case.slots(i)[: case.lengths[i] - 1 + t]],
        )


@pytest.mark.parametrize("fp8", [None, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("s_q", [1, 3])
def test_indexed(fp8: torch.dtype | None, s_q: int) -> None:
    case = Case([1, 40, 700, 90], s_q, 8, torch.bfloat16)
    indices = case.indices(128)
    if fp8 is None:
        cache, flat = case.plain(), case.rows.reshape(-1, D)
    else:
        cache, flat = case.records(fp8)
    out, lse = flash_mla_with_kvcache(
        case.q, cache, None, None, DV, *get_mla_metadata(), is_fp8_kvcache=fp8 is not None, indices=indices
    )
    check(out, lse, case, lambda i, t: flat[indices[i, t][indices[i, t] >= 0].long()])
    assert math.isinf(lse[-1, 0, 0])


def test_dense_records() -> None:
    case = Case([65, 700], 2, 8, torch.bfloat16)
    cache, flat = case.records(torch.int8)
    out, lse = flash_mla_with_kvcache(
        case.q, cache, case.block_table, case.cache_seqlens, DV, *get_mla_metadata(), is_fp8_kvcache=True, causal=True
    )
    check(out, lse, case, lambda i, t: flat[case.slots(i)[: case.lengths[i] - 1 + t]])


@pytest.mark.parametrize("gap", [0, 64 * D, 32])
def test_indexed_over_a_view_of_one_layer(gap: int) -> None:
    """Blocks of one layer lie apart: by whole tokens, or by an odd number of elements."""
    case = Case([40, 700], 1, 4, precise())
    blocks, step = case.rows.shape[0], 64 * D + gap
    held = torch.full((blocks * step,), math.nan, dtype=case.rows.dtype)
    cache = held.as_strided((blocks, 64, 1, D), (step, D, D, 1))
    cache.copy_(case.plain())
    indices = case.indices(64)
    out, lse = flash_mla_with_kvcache(case.q, cache, None, None, DV, *get_mla_metadata(), indices=indices)
    flat = case.rows.reshape(-1, D)
    check(out, lse, case, lambda i, t: flat[indices[i, t][indices[i, t] >= 0].long()])


def test_indices_may_have_any_strides() -> None:
    case = Case([40, 700], 3, 4, precise())
    indices = case.indices(64)

    def run(chosen: torch.Tensor) -> torch.Tensor:
        return flash_mla_with_kvcache(case.q, case.plain(), None, None, DV, *get_mla_metadata(), indices=chosen)[0]

    for dim in (0, 1):
        assert torch.equal(run(indices.transpose(dim, 2).contiguous().transpose(dim, 2)), run(indices))
    assert torch.equal(run(indices[:1].expand_as(indices)), run(indices[:1].repeat(2, 1, 1)))


def test_topk_length_sink_and_extra_cache() -> None:
    case = Case([40, 700, 200], 2, 4, precise())
    other = Case([64, 64, 64], 2, 4, precise(), block=16, seed=9)
    indices, extra = case.indices(64), other.indices(32)
    limit, extra_limit = torch.tensor([3, 64, 0]).int(), torch.tensor([32, 0, 9]).int()
    sink = torch.tensor([-math.inf, 0.0, 3.0, math.inf])
    out, lse = flash_mla_with_kvcache(
        case.q,
        case.plain(),
        None,
        None,
        DV,
        *get_mla_metadata(),
        indices=indices,
        attn_sink=sink,
        extra_k_cache=other.plain(),
        extra_indices_in_kvcache=extra,
        topk_length=limit,
        extra_topk_length=extra_limit,
    )
    unsunk, lse_again = flash_mla_with_kvcache(
        case.q,
        case.plain(),
        None,
        None,
        DV,
        *get_mla_metadata(),
        indices=indices,
        extra_k_cache=other.plain(),
        extra_indices_in_kvcache=extra,
        topk_length=limit,
        extra_topk_length=extra_limit,
    )
    own, others = case.rows.reshape(-1, D), other.rows.reshape(-1, D)

    def rows_of(i: int, t: int) -> torch.Tensor:
        mine, theirs = indices[i, t, : limit[i]], extra[i, t, : extra_limit[i]]
        return torch.cat((own[mine[mine >= 0].long()], others[theirs[theirs >= 0].long()]))

    check(unsunk, lse_again, case, rows_of)
    assert torch.equal(lse, lse_again)
    weight = lse.double().exp()
    share = torch.where(lse == math.inf, 0.0, weight / (weight + sink.double().exp().view(4, 1)))
    sunk = unsunk * share.transpose(1, 2).unsqueeze(-1)
    rtol, atol = (1.3e-6, 1e-5) if out.dtype is torch.float32 else (2e-3, 1e-3)
    torch.testing.assert_close(out, sunk.to(out.dtype), rtol=rtol, atol=atol)
    assert (out[:, :, 3] == 0).all()


def test_sink_and_extra_cache_round_no_more_than_a_plain_call() -> None:
    gen = generator(5)
    q, chosen = torch.randn(4, 1, 16, D, generator=gen).bfloat16(), torch.randint(0, 640, (2, 4, 1, 96), generator=gen)
    caches = torch.randn(2, 10, 64, 1, D, generator=gen).bfloat16()
    sink = torch.randn(16, generator=gen) + 4

    def error(attn_sink: torch.Tensor | None, extra: bool) -> float:
        more = {"extra_k_cache": caches[1], "extra_indices_in_kvcache": chosen[1].int()} if extra else {}
        arguments = {"indices": chosen[0].int(), "attn_sink": attn_sink, **more}
        out, _ = flash_mla_with_kvcache(q, caches[0], None, None, DV, *get_mla_metadata(), **arguments)
        squares = []
        for i in range(4):
            rows = torch.cat([caches[k].view(-1, D)[chosen[k, i, 0]] for k in range(1 + extra)])
            expected, lse = attention(q[i, 0], rows, D**-0.5)
            if attn_sink is not None:
                expected = expected * torch.sigmoid(lse - attn_sink.double()).unsqueeze(-1)
            squares.append(((out[i, 0].double() - expected).norm(dim=-1) / expected.norm(dim=-1)) ** 2)
        return float(torch.cat(squares).mean().sqrt())

    plain = error(None, extra=False)
    for attn_sink, extra in ((sink, False), (None, True), (sink, True)):
        assert error(attn_sink, extra) < 1.15 * plain


def test_a_requests_bits_do_not_depend_on_its_batch() -> None:
    case = Case([4200, 3, 900], 1, 8, torch.bfloat16)
    cache = case.plain()
    out, lse = flash_mla_with_kvcache(
        case.q, cache, case.block_table, case.cache_seqlens, DV, *get_mla_metadata(), causal=True
    )
    alone, lse_alone = flash_mla_with_kvcache(
        case.q[:1], cache, case.block_table[:1], case.cache_seqlens[:1], DV, *get_mla_metadata(), causal=True
    )
    assert torch.equal(out[:1], alone)
    assert torch.equal(lse[:1], lse_alone)


@pytest.mark.parametrize(("batch", "s_q"), [(0, 1), (0, 2), (2, 0)])
@pytest.mark.parametrize("heads_k", [1, 2])
def test_an_empty_step_gives_empty_results(batch: int, s_q: int, heads_k: int) -> None:
    q = torch.randn(batch, s_q, 4, D, dtype=precise())
    cache = torch.randn(3, 64, heads_k, D, dtype=precise())
    table, lengths = torch.zeros(batch, 2, dtype=torch.int32), torch.full((batch,), 5, dtype=torch.int32)
    ways: list[dict[str, object]] = [{"causal": False}, {"causal": True}]
    if heads_k == 1:
        chosen = torch.zeros(batch, s_q, 8, dtype=torch.int32)
        sunk = {"indices": chosen, "attn_sink": torch.zeros(4)}
        ways += [sunk, {**sunk, "extra_k_cache": cache, "extra_indices_in_kvcache": chosen}]
    for more in ways:
        out, lse = flash_mla_with_kvcache(q, cache, table, lengths, DV, *get_mla_metadata(), **more)
        assert (out.shape, out.dtype) == ((batch, s_q, 4, DV), q.dtype)
        assert (lse.shape, lse.dtype) == ((batch, 4, s_q), torch.float32)


def test_arguments_are_flashmlas() -> None:
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == MAIN_ARGUMENTS


def test_refusals(device: str) -> None:
    case = Case([5, 70], 2, 4, precise())
    cache, indices = case.plain(), case.indices(8)

    def call(named: str, **changes: object) -> None:
        arguments = {
            "q": case.q,
            "k_cache": cache,
            "block_table": case.block_table,
            "cache_seqlens": case.cache_seqlens,
            "head_dim_v": DV,
            "tile_scheduler_metadata": FlashMLASchedMeta(),
        }
        with pytest.raises(densemla.ContractError) as caught:
            flash_mla_with_kvcache(**{**arguments, **changes})
        assert caught.value.argument == named, caught.value

    for nothing in (None, [1], case.q.cpu().numpy()):
        call("k_cache", k_cache=nothing)
    call("q", q=case.q[0])
    call("q", q=case.q.to(torch.float8_e4m3fn))
    call("q", q=case.q[:, :, :0])
    call("k_cache", k_cache=cache[:, :, :0])
    call("k_cache", k_cache=cache[:, :0])
    call("k_cache", k_cache=cache.double())
    call("k_cache", k_cache=cache.repeat_interleave(2, -1)[..., ::2])
    call("block_table", block_table=case.block_table.tolist())
    call("block_table", block_table=case.block_table[:1])
    call("causal", causal="x")
    call("is_fp8_kvcache", is_fp8_kvcache=1)
    call("softmax_scale", softmax_scale=math.nan)
    call("softmax_scale", softmax_scale=-1.0, indices=indices)
    if device == "cpu":
        call("block_table", block_table=torch.full_like(case.block_table, 99))
        call("cache_seqlens", cache_seqlens=torch.full_like(case.cache_seqlens, 1000))
    call("cache_seqlens", cache_seqlens=case.cache_seqlens.long())
    call("cache_seqlens", cache_seqlens=None)
    call("block_table", block_table=None)
    call("head_dim_v", head_dim_v=577)
    call("k_cache", k_cache=cache[..., :500])
    call("k_cache", is_fp8_kvcache=True)
    call("k_cache", k_cache=torch.zeros(4, 64, 1, RECORD, dtype=torch.uint8))
    call("tile_scheduler_metadata", tile_scheduler_metadata=None)
    call("num_splits", num_splits=torch.zeros(3, dtype=torch.int32))
    rows, num_splits = get_mla_metadata(case.cache_seqlens, 8, 1)
    for odd in (rows.double(), rows.to_sparse(), rows.to("meta"), rows[0], rows[:, :4]):
        call("tile_scheduler_metadata", tile_scheduler_metadata=odd, num_splits=num_splits)
    call("num_splits", tile_scheduler_metadata=rows)
    call("num_splits", tile_scheduler_metadata=rows, num_splits=num_splits[1:])
    call("attn_sink", attn_sink=torch.zeros(4))
    call("causal", indices=indices, causal=True)
    call("indices", indices=indices.long())
    call("indices", indices=indices[:, :1])
    if device == "cpu":
        call("indices", indices=torch.full_like(indices, cache.shape[0] * 64))
        call("indices", indices=torch.full_like(indices, -2))
        for length in (-1, 9):
            lengths = torch.full_like(case.cache_seqlens, length)
            call("topk_length", indices=indices, topk_length=lengths)
            extra = {"extra_k_cache": cache, "extra_indices_in_kvcache": indices, "extra_topk_length": lengths}
            call("extra_topk_length", indices=indices, **extra)
    call("indices", indices=[1])
    call("indices", indices=torch.tensor(1, dtype=torch.int32))
    call("k_cache", k_cache=cache.double(), indices=indices)
    call("extra_indices_in_kvcache", indices=indices, extra_k_cache=cache)
    call("extra_indices_in_kvcache", indices=indices, extra_indices_in_kvcache=indices)
    call("extra_topk_length", indices=indices, extra_topk_length=case.cache_seqlens)
    call("topk_length", indices=indices, topk_length=case.cache_seqlens[:1])
    extra = {"indices": indices, "extra_k_cache": cache, "extra_indices_in_kvcache": indices}
    call("extra_topk_length", **extra, extra_topk_length=case.cache_seqlens.long())
    for odd in (cache.double(), torch.cat((cache, cache), 2), cache[:, :0], 3):
        call("extra_k_cache", **{**extra, "extra_k_cache": odd})
    call("extra_indices_in_kvcache", **{**extra, "extra_indices_in_kvcache": indices.long()})

    used, _ = get_mla_metadata()
    # Refused calls, early and late, leave no mark on it.
    call("block_table", tile_scheduler_metadata=used, block_table=None)
    call("cache_seqlens", tile_scheduler_metadata=used, q=case.q[:1], block_table=case.block_table[:1])
    flash_mla_with_kvcache(case.q, cache, case.block_table, case.cache_seqlens, DV, used)
    call("tile_scheduler_metadata", tile_scheduler_metadata=used, causal=True)
    with pytest.raises(densemla.ContractError, match="cache_seqlens"):
        get_mla_metadata(torch.zeros(3))
