"""Query-sharded attention on 2 and 3 real processes, with a Kimi-K2.5 encoder layer as the oracle."""

from __future__ import annotations

import functools

import gloo_workers
import pytest
import torch
import vision_cases
from hypothesis import given, settings
from hypothesis import strategies as st

import densemla
from densemla.vision import activation_bytes, attend_share, even_shares

CASES = (
    vision_cases.shares_of_any_size,
    vision_cases.no_tokens_at_all,
    vision_cases.bad_input_is_refused_on_every_rank,
    vision_cases.peak_stays_under_the_formula,
)
PAGE_SLACK = 8 << 20
"""What the measurement itself and the transport's buffers may add to a process, in bytes."""


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """A Kimi-K2.5 vision encoder layer of real widths, its float64 answer, and its q, k and v on disk."""
    modeling = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")
    configuration = pytest.importorskip("transformers.models.kimi_k25.configuration_kimi_k25")
    torch.manual_seed(0)
    config = configuration.Kimi_K25VisionConfig(num_hidden_layers=1, attn_implementation="eager")
    module = modeling.Kimi_K25VisionEncoderLayer(config).eval()
    # Two images and a video of two frames, whose tokens attend to each other.
    grid = torch.tensor([[1, 6, 8], [1, 10, 14], [2, 4, 4]])
    tokens = int(grid.prod(1).sum())
    hidden = torch.randn(tokens, config.hidden_size) * 3
    positions = modeling.get_vision_position_ids(grid, spatial_merge_size=1)
    rotary = modeling.Kimi_K25VisionRotaryEmbedding(config)(hidden, positions)
    cu_seqlens, _ = modeling.get_vision_attention_seqlens(grid, config, merge_temporal=True)
    folder = tmp_path_factory.mktemp("layer")
    with torch.no_grad():
        module.double()
        answer = module(hidden.double(), cu_seqlens=cu_seqlens, position_embeddings=rotary)
        module.float()
        normed = module.norm1(hidden)
        attention = module.attn
        shape = (tokens, attention.num_heads, attention.head_dim)
        q, k, v = (proj(normed).view(shape) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = modeling.apply_rotary_pos_emb_vision(q, k, *rotary)
    torch.save({"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens.to(torch.int32)}, folder / "layer.pt")
    assert cu_seqlens.tolist() == [0, 48, 188, 220]
    return module, hidden, answer, folder


@functools.cache
def results(world: int, folder=None):
    cases = CASES if folder is None else (functools.partial(vision_cases.attention_of_a_layer, folder),)
    return gloo_workers.run(world, cases)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_every_rank(case, world):
    for rank, outcomes in enumerate(results(world)):
        passed, found = outcomes[CASES.index(case)]
        assert passed, f"rank {rank}:\n{found}"
        if case is vision_cases.peak_stays_under_the_formula:
            peak, bound, scores = found
            assert peak < bound + PAGE_SLACK < scores, (peak, bound, scores)


def test_a_kimi_k25_encoder_layer(layer):
    module, hidden, answer, folder = layer
    world = 3
    for rank, outcomes in enumerate(results(world, folder)):
        passed, found = outcomes[0]
        assert passed, f"rank {rank}:\n{found}"
        attended = torch.load(folder / f"output{rank}.pt")
        with torch.no_grad():
            states = hidden + module.attn.proj(attended.flatten(1))
            states = states + module.mlp(module.norm2(states))
        torch.testing.assert_close(states.double(), answer, atol=2e-5, rtol=1e-5)
    # The attention must matter, or any would do.
    with torch.no_grad():
        without = hidden + module.mlp(module.norm2(hidden))
    assert (without - answer).abs().max() > 1e-2


@pytest.mark.parametrize(("tokens", "world", "argument"), [(5, 0, "world"), (-5, 2, "tokens"), (5.5, 2, "tokens")])
def test_shares_of_nonsense_are_refused(tokens, world, argument):
    with pytest.raises(densemla.ContractError) as caught:
        even_shares(tokens, world)
    assert caught.value.argument == argument


@given(st.integers(0, 200), st.integers(1, 9))
def test_even_shares(tokens, world):
    shares = even_shares(tokens, world)
    assert (len(shares), sum(shares)) == (world, tokens)
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("tokens", "world", "name"), [(-1, 2, "tokens"), (2.0, 2, "tokens"), (2, 0, "world")])
def test_shares_of_nothing(tokens, world, name):
    with pytest.raises(densemla.ContractError, match=name):
        even_shares(tokens, world)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.data())
@settings(deadline=None, max_examples=60)
def test_any_run_of_queries(images, data):
    bounds = [sum(images[:i]) for i in range(len(images) + 1)]
    start = data.draw(st.integers(0, bounds[-1]))
    count = data.draw(st.integers(0, bounds[-1] - start))
    q, k, v = vision_cases.packed(7, bounds[-1], 2, 8)
    found = attend_share(q[start : start + count], k, v, bounds, start=start)
    right = vision_cases.dense(q, k, v, bounds)[start : start + count]
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [-1, 5, 1.0])
def test_a_start_outside_the_tokens(start):
    q, k, v = vision_cases.packed(7, 6, 2, 8)
    with pytest.raises(densemla.ContractError, match="start"):
        attend_share(q[:2], k, v, [0, 6], start=start)


def test_gradients_are_refused():
    q, k, v = vision_cases.packed(7, 6, 2, 8)
    with pytest.raises(densemla.ContractError, match="no_grad"):
        attend_share(q.requires_grad_(), k, v, [0, 6], start=0)


def test_the_formula_has_no_quadratic_term():
    def size(tokens):
        return activation_bytes(tokens, tokens // 4, heads=16, head_dim=72, itemsize=2, largest_image=tokens)

    assert size(80_000) == 10 * size(8_000)
