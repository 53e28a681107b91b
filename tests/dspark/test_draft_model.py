"""The draft over densemla's paged decode, against float64 and against its own dense form."""

from __future__ import annotations

import math

import dspark_tiny as tiny
import pytest
import torch

from densemla import ContractError
from densemla.dspark import KIMI_K3_DSPARK, DSparkDraft
from densemla.dspark.config import RopeConfig, draft_config
from densemla.dspark.engine import DraftEngine
from densemla.dspark.kv_pool import KVPool
from densemla.dspark.layers import Rotary, softmax_scale
from densemla.dspark.model import BlockStep
from densemla.dspark.protocol import NEEDS_RESET, OK, Item

VARIANTS = {
    "plain": {},
    "yarn": {"rope": tiny.YARN},
    "halves": {"rope": RopeConfig(interleave=False)},
    "nope": {"rope": None},
    "direct query": {"q_lora_rank": None},
    "no markov head": {"markov_rank": 0},
    "tokens only": {"target_layer_ids": ()},
}


def rms(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x, position, rope):
    """One vector, rotated pair by pair in float64."""
    if rope is None:
        return x
    width = x.shape[-1]
    out = x.clone()
    scale = 1.0
    for i in range(width // 2):
        turn = rope.theta ** (-2 * i / width)
        if rope.factor > 1:
            original = rope.original_max_position_embeddings

            def place(turns, original=original):
                return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(place(rope.beta_fast)), 0)
            high = min(math.ceil(place(rope.beta_slow)), width - 1)
            ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
            turn = turn * (1 - ramp) + turn / rope.factor * ramp
        a, b = (2 * i, 2 * i + 1) if rope.interleave else (i, i + width // 2)
        cos, sin = math.cos(position * turn) * scale, math.sin(position * turn) * scale
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def oracle(draft, rows, anchor):
    """Logits of a block before the Markov bias, with per-head keys and values (nothing absorbed), float64."""
    config = draft.config
    weights = {name: tensor.double() for name, tensor in draft.state_dict().items()}
    heads, nope, rope_width, v = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    states = rows.double() if config.context_width else weights["embed_tokens.weight"][rows.long()]
    context = rms(states @ weights["context_proj.weight"].T, weights["context_norm.weight"])
    count, size = rows.shape[0], config.block_size
    hidden = weights["embed_tokens.weight"][[anchor] + [config.mask_token_id] * (size - 1)]
    scale = (nope + rope_width) ** -0.5
    if config.rope is not None and config.rope.factor > 1:
        scale *= (0.1 * config.rope.mscale_all_dim * math.log(config.rope.factor) + 1) ** 2
    for i in range(config.num_hidden_layers):
        layer = {name[len(f"layers.{i}.") :]: w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        normed = rms(hidden, layer["input_layernorm.weight"])
        if config.q_lora_rank is None:
            q = normed @ layer["self_attn.q_proj.weight"].T
        else:
            low = rms(normed @ layer["self_attn.q_a_proj.weight"].T, layer["self_attn.q_a_layernorm.weight"])
            q = low @ layer["self_attn.q_b_proj.weight"].T
        q = q.view(size, heads, nope + rope_width)
        source = torch.cat((context, normed))
        kv = source @ layer["self_attn.kv_a_proj_with_mqa.weight"].T
        latent = rms(kv[:, : config.kv_lora_rank], layer["self_attn.kv_a_layernorm.weight"])
        key_rope = torch.stack([rotated(kv[t, config.kv_lora_rank :], t, config.rope) for t in range(count + size)])
        up = (latent @ layer["self_attn.kv_b_proj.weight"].T).view(count + size, heads, nope + v)
        seen = torch.empty(size, heads, v, dtype=torch.float64)
        for t in range(size):
            for h in range(heads):
                q_rope = rotated(q[t, h, nope:], count + t, config.rope)
                scores = (up[:, h, :nope] @ q[t, h, :nope] + key_rope @ q_rope) * scale
                seen[t, h] = torch.softmax(scores, 0) @ up[:, h, nope:]
        hidden = hidden + seen.flatten(1) @ layer["self_attn.o_proj.weight"].T
        normed = rms(hidden, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ layer["mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return rms(hidden, weights["final_norm.weight"]) @ weights["lm_head.weight"].T


def shaken(draft):
    """Norm weights other than 1, and projections large enough for a peaked softmax."""
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "proj" in name:
                parameter.mul_(2.0)
    return draft


def context_rows(config, count, generator):
    if config.context_width:
        return torch.randn(count, config.context_width, generator=generator).to(torch.bfloat16)
    return torch.randint(config.vocab_size, (count,), generator=generator, dtype=torch.int32)


def paged_logits(draft, engine, steps, monkeypatch):
    seen = []
    choose = draft.choose
    monkeypatch.setattr(draft, "choose", lambda *a: (seen.append(a[0]), choose(*a))[1])
    ids = engine.paged.step(steps, engine.geometry.depth)
    return seen[0], ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_drafting_matches_float64(variant, monkeypatch):
    draft = shaken(tiny.make_draft(**VARIANTS[variant]))
    engine = DraftEngine(draft, checkpoint="", kv_bytes=1 << 20, page_size=16)
    engine.pool.caches.fill_(math.nan)
    generator = torch.Generator().manual_seed(4)
    steps, all_rows = [], []
    for number, count in enumerate((0, 1, 15, 90)):
        rows = context_rows(draft.config, count, generator)
        entry = engine.pool.reset((0, number))
        assert engine.pool.reserve((0, number), count + draft.config.block_size)
        steps.append(BlockStep(entry, rows, anchor=number + 3))
        all_rows.append(rows)
    logits, ids = paged_logits(draft, engine, steps, monkeypatch)
    for number, rows in enumerate(all_rows):
        expected = oracle(draft, rows, number + 3)
        error = (logits[number].double() - expected).norm() / expected.norm()
        assert error < 3e-6, (variant, number, float(error))
        previous = number + 3
        for place, token in enumerate(ids[number].tolist()):
            bias = 0 if draft.markov_head is None else draft.markov_head(torch.tensor(previous)).double()
            assert token == int((expected[place] + bias).argmax())
            previous = token


@pytest.mark.parametrize("variant", ["plain", "yarn", "tokens only"])
def test_training_form_equals_serving_form(variant, monkeypatch):
    draft = shaken(tiny.make_draft(**VARIANTS[variant]))
    config = draft.config
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab_size, (2, 40), generator=generator)
    rows = torch.stack([context_rows(config, 40, generator) for _ in range(2)])
    anchors = torch.tensor([[3, 20], [11, 30]])
    dense = draft.teacher_forced_logits(rows, anchors, tokens, softmax_scale(config))
    engine = DraftEngine(draft, checkpoint="", kv_bytes=1 << 20)
    for block in range(2):
        steps = []
        for row in range(2):
            at = int(anchors[row, block])
            entry = engine.pool.reset((block, row))
            engine.pool.reserve((block, row), at + config.block_size)
            steps.append(BlockStep(entry, rows[row, :at], int(tokens[row, at])))
        logits, _ = paged_logits(draft, engine, steps, monkeypatch)
        monkeypatch.undo()
        for row in range(2):
            at = int(anchors[row, block])
            previous = tokens[row, at : at + config.block_size]
            assert torch.allclose(logits[row] + draft.markov_head(previous), dense[row, block], atol=2e-5)


def test_rows_in_parts_equal_rows_at_once_and_bf16_works():
    draft = shaken(tiny.make_draft()).to(torch.bfloat16)
    engine = DraftEngine(draft, checkpoint="", kv_bytes=1 << 20)
    assert engine.pool.caches.dtype is torch.bfloat16
    rows = context_rows(draft.config, 30, torch.Generator().manual_seed(6))
    frames = rows.view(torch.uint8).numpy()

    def send(request, start, end, anchor, reset):
        item = Item(request=request, start=start, rows=end - start, anchor=anchor, reset=reset)
        return engine.draft(1, [item], [frames[start:end].data.cast("B")] if end > start else [])

    whole, status = send(1, 0, 30, 9, True)
    assert status == [OK]
    assert send(2, 0, 12, -1, True)[0].eq(-1).all()
    # A block drafted in between leaves nothing behind that a later one could see.
    send(2, 12, 12, 4, False)
    parts, status = send(2, 12, 30, 9, False)
    assert status == [OK]
    assert torch.equal(parts, whole)


def test_the_published_sizes():
    with torch.device("meta"):
        draft = DSparkDraft(KIMI_K3_DSPARK)
    shapes = {name: tuple(tensor.shape) for name, tensor in draft.own_state_dict().items()}
    assert shapes["context_proj.weight"] == (7168, 5 * 7168)
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (163840, 256)
    assert shapes["layers.4.self_attn.kv_b_proj.weight"] == (64 * 256, 512)
    assert shapes["layers.0.mlp.down_proj.weight"] == (7168, 14336)
    assert len(shapes) == 2 + 5 * 12 + 1 + 2
    with_embedding = sum(math.prod(shape) for shape in shapes.values()) + 163840 * 7168
    assert 3.5e9 < with_embedding < 3.6e9


def test_config_round_trip_and_refusals():
    for variant in VARIANTS.values():
        config = tiny.draft_config(**variant)
        assert draft_config(config.to_json()) == config
    assert draft_config(KIMI_K3_DSPARK.to_json()) == KIMI_K3_DSPARK
    fields = KIMI_K3_DSPARK.to_json()
    for name, value in (
        ("hidden_act", "gelu"),
        ("markov_head_type", "gated"),
        ("mla_use_output_gate", True),
        ("draft_vocab_size", 32000),
        ("mask_token_id", 163840),
        ("block_size", 0),
        ("target_layer_ids", [2, -1]),
        ("rope_parameters", {"rope_type": "llama3"}),
    ):
        with pytest.raises(ContractError):
            draft_config({**fields, name: value})
    for name in ("hidden_size", "target_layer_ids", "markov_rank"):
        with pytest.raises(ContractError, match=name):
            draft_config({key: value for key, value in fields.items() if key != name})


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("hidden_size", 1 << 70, "hidden_size"),
        ("num_hidden_layers", 1 << 40, "num_hidden_layers"),
        *(("mask_token_id", value, "mask_token_id") for value in (None, "5", 5.0, True)),
        *(("rms_norm_eps", value, "rms_norm_eps") for value in (None, "1e-5", 0, -1.0, math.inf, math.nan)),
        ("target_layer_ids", [True], "target_layer_ids"),
        ("mla_use_nope", "false", "config field 'mla_use_nope'"),
        ("rope_interleave", "false", "rope interleave"),
        *(("rope_parameters", value, "config field 'rope_parameters'") for value in ("yarn", 0, [])),
        ("rope_scaling", ["yarn"], "config field 'rope_scaling'"),
        *(("rope_parameters", {"rope_theta": value}, "rope theta") for value in ("1e4", 1, math.inf)),
        ("rope_parameters", {**YARN, "factor": "4"}, "rope factor"),
        ("rope_parameters", {**YARN, "beta_fast": 0}, "rope beta_fast"),
        ("rope_parameters", {**YARN, "mscale": math.nan}, "rope mscale"),
        (
            "rope_parameters",
            {**YARN, "original_max_position_embeddings": 0},
            "rope original_max_position_embeddings",
        ),
    ],
)
def test_a_config_field_of_another_kind_is_named(name, value, argument):
    fields = KIMI_K3_DSPARK.to_json()
    if name == "rope_scaling":
        del fields["rope_parameters"]
    with pytest.raises(ContractError) as caught:
        draft_config({**fields, name: value})
    assert caught.value.argument == argument


def test_rotary_at_long_positions_keeps_lengths():
    rotary = Rotary(tiny.YARN, 8)
    x = torch.randn(5, 8)
    turned = rotary.rotate(x, *rotary(torch.tensor([0, 1, 1000, 100_000, 1_000_000])))
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(turned.norm(dim=1), x.norm(dim=1), rtol=1e-5)


def make_pool(pages):
    return KVPool(pages * 16 * 40 * 4 * 2, num_layers=2, kv_lora_rank=32, qk_rope_head_dim=8, page_size=16,
                  dtype=torch.float32)  # fmt: skip


def test_a_pool_that_memory_has_no_room_for_is_refused_by_name(monkeypatch):
    def full(*sizes, **options):
        raise RuntimeError("not enough memory\nframe #0: in C++")

    monkeypatch.setattr("densemla.kv_cache.empty", full)
    with pytest.raises(ContractError, match=r"^byte_budget: expected memory .*not enough memory$"):
        make_pool(4)


def test_the_pool_stays_in_its_budget_and_the_oldest_makes_room():
    pool = make_pool(4)
    assert pool.caches.numel() * 4 == 4 * pool.page_bytes
    for key in "abc":
        pool.reset(key)
        assert pool.reserve(key, 16)
    assert pool.reserve("a", 16)
    pool.reset("d")
    assert pool.reserve("d", 32)
    assert (pool.get("b"), pool.evictions) == (None, 1)
    assert pool.get("a") is not None
    assert pool.bytes_used == 4 * pool.page_bytes
    # The batch itself is never evicted for one of its own: the one that does not fit goes.
    assert not pool.reserve("d", 64, keep=["a", "c", "d"])
    assert pool.get("d") is None
    assert pool.get("c") is not None
    assert len({page for key in pool for page in pool.get(key).pages}) == 2
    pool.release_all(pool)
    assert pool.bytes_used == 0
    with pytest.raises(ContractError, match="byte_budget"):
        make_pool(0)


def test_an_evicted_request_gets_minus_one_and_a_status_until_it_starts_anew():
    draft = tiny.make_draft()
    row = 40 * 2 * 4
    engine = DraftEngine(draft, checkpoint="", kv_bytes=16 * row * 4, page_size=16)
    assert engine.pool.num_pages == 4
    rows = context_rows(draft.config, 40, torch.Generator().manual_seed(8))
    frame = rows.view(torch.uint8).numpy().reshape(-1).data

    def item(request, start, count, reset):
        return Item(request=request, start=start, rows=count, anchor=5, reset=reset)

    first, status = engine.draft(1, [item(0, 0, 40, True)], [frame])
    assert status == [OK]
    _, status = engine.draft(1, [item(1, 0, 40, True)], [frame])
    assert status == [OK]
    ids, status = engine.draft(1, [item(0, 40, 0, False)], [])
    assert status == [NEEDS_RESET]
    assert ids.eq(-1).all()
    again, status = engine.draft(1, [item(0, 0, 40, True)], [frame])
    assert status == [OK]
    assert torch.equal(again, first)
    for bad in (item(0, 39, 0, False), item(7, 0, 0, False)):
        ids, status = engine.draft(1, [bad], [])
        assert (status, ids.eq(-1).all()) == ([NEEDS_RESET], True)
    # One request longer than the whole pool, beside one that fits.
    ids, status = engine.draft(1, [item(3, 0, 20, True), item(4, 0, 40, True)],
                               [frame[: 20 * engine.geometry.row_bytes], frame])  # fmt: skip
    assert status.count(OK) == 1
    assert ids[status.index(NEEDS_RESET)].eq(-1).all()
    assert ids[status.index(OK)].ge(0).all()


def test_sessions_do_not_see_each_other():
    engine = DraftEngine(tiny.make_draft(), checkpoint="", kv_bytes=1 << 20)
    one = Item(request=5, start=0, rows=0, anchor=5, reset=True)
    more = Item(request=5, start=0, rows=0, anchor=5, reset=False)
    assert engine.draft(1, [one], [])[1] == [OK]
    assert engine.draft(2, [more], [])[1] == [NEEDS_RESET]
    engine.forget(2)
    assert engine.draft(1, [more], [])[1] == [OK]
    engine.forget(1, [5])
    assert engine.draft(1, [more], [])[1] == [NEEDS_RESET]


def test_poisoned_rows_stay_with_their_request():
    draft = tiny.make_draft()
    engine = DraftEngine(draft, checkpoint="", kv_bytes=1 << 20)
    rows = context_rows(draft.config, 5, torch.Generator().manual_seed(9))
    bad = torch.full_like(rows, math.nan).view(torch.uint8).numpy().reshape(-1).data
    good = rows.view(torch.uint8).numpy().reshape(-1).data
    items = [Item(request=i, start=0, rows=5, anchor=5, reset=True) for i in range(2)]
    alone, _ = engine.draft(1, items[:1], [good])
    both, _ = engine.draft(1, items, [good, bad])
    assert torch.equal(both[0], alone[0])
    assert both[1].ge(0).all()
    assert both[1].lt(draft.config.vocab_size).all()
