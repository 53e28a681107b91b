"""The study: its numbers are the decode's own, and it shows what the options promise."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, GlmMoeDsaConfig

import densemla
from densemla import ContractError, splits
from densemla.backends.reference import decode_float64
from densemla.inputs import LOGITS, random_step
from densemla.presets import PRESETS, preset
from densemla.study import ONE_SPLIT, Study, StudyConfig, decode_in_blocks, relative_errors, study

TOKENS = (320, 512, 576, 2000)
CAPACITY = 16384


@pytest.fixture(scope="module")
def kimi_k3() -> Study:
    return study(StudyConfig(preset=preset("kimi-k3"), tokens=TOKENS, capacity=CAPACITY, repeat=1))


def test_presets() -> None:
    assert {name: shape.num_q_heads for name, shape in PRESETS.items()} == {
        "kimi-k3": 96,
        "kimi-k3-tp8": 12,
        "deepseek-v3": 128,
        "kimi-k2": 64,
        "glm-5": 64,
    }
    assert {(s.kv_lora_rank, s.qk_rope_head_dim, s.page_size) for s in PRESETS.values()} == {(512, 64, 64)}
    assert {name: s.sm_scale**-2 for name, s in PRESETS.items()} == pytest.approx(
        dict.fromkeys(PRESETS, 192) | {"glm-5": 256}
    )
    with pytest.raises(ContractError, match=r"preset.*kimi-k3-tp8.*kimi-k4"):
        preset("kimi-k4")
    with pytest.raises(ContractError, match="preset"):
        preset([])  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "config"), [("deepseek-v3", DeepseekV3Config()), ("glm-5", GlmMoeDsaConfig())])
def test_presets_are_the_published_shapes(name: str, config: DeepseekV3Config | GlmMoeDsaConfig) -> None:
    """The defaults in transformers are these models' sizes."""
    shape = preset(name)
    assert shape.num_q_heads == config.num_attention_heads
    assert shape.kv_lora_rank == config.kv_lora_rank
    assert shape.qk_rope_head_dim == config.qk_rope_head_dim
    assert shape.sm_scale == (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5


def test_fp32_partials_are_below_bf16_partials_wherever_split(kimi_k3: Study) -> None:
    pairs = 0
    by_key = {(row.logits, row.tokens, row.threshold, row.partial_dtype): row for row in kimi_k3.rows}
    for row in kimi_k3.split_rows("bf16"):
        exact = by_key[row.logits, row.tokens, row.threshold, "fp32"]
        assert exact.error < 0.99 * row.error
        assert exact.max_error <= row.max_error
        assert abs(exact.added) < 0.01
        assert row.added > 0.02
        assert row.differing > 0.02
        pairs += 1
    # Both kinds of logits; every length under threshold 0, two of them under -1.
    assert pairs == 2 * (4 + 2)


def test_rows_left_in_one_split_equal_the_one_split_run(kimi_k3: Study) -> None:
    unsplit = kimi_k3.unsplit_rows()
    assert [row.tokens for row in unsplit] == [320, 320, 512, 512] * 2
    for row in unsplit:
        assert row.threshold == -1
        assert row.differing == 0
        assert row.added == 0
    assert all(row.differing > 0 for name in ("bf16", "fp32") for row in kimi_k3.split_rows(name))


def test_rows_say_how_the_request_was_cut(kimi_k3: Study) -> None:
    assert (kimi_k3.num_splits, kimi_k3.default_threshold) == (32, 8)
    assert len(kimi_k3.rows) == 2 * len(TOKENS) * 5
    for row in kimi_k3.rows:
        assert row.live_chunks == splits.live_chunks(row.tokens)
        threshold = {ONE_SPLIT: 256, -1: 8}.get(row.threshold, row.threshold)
        launched = splits.launch_splits(row.tokens, 32, int(threshold))
        assert row.splits == splits.live_splits(row.live_chunks, launched, int(threshold))
    always = {row.tokens: row.splits for row in kimi_k3.rows if row.threshold == 0}
    assert always == {320: 5, 512: 8, 576: 9, 2000: 32}


def test_errors_and_rates_are_of_the_right_size(kimi_k3: Study) -> None:
    for row in kimi_k3.rows:
        # One rounding to bf16 errs by 2^-8 at most per element, and by about half of that.
        assert 0.5e-3 < row.error < 4e-3
        assert row.error <= row.max_error
        assert row.time_us > 0
        assert row.gb_per_s * row.time_us * 1e3 == pytest.approx(row.tokens * 576 * 2)


def test_one_seed_gives_one_study_and_another_gives_another(kimi_k3: Study) -> None:
    def errors(seed: int) -> list[float]:
        config = StudyConfig(
            preset=preset("kimi-k3"), tokens=TOKENS[:1], capacity=CAPACITY, logits=["heavy"], repeat=1, seed=seed
        )
        return [row.error for row in study(config).rows]

    first = [row.error for row in kimi_k3.rows if (row.tokens, row.logits) == (TOKENS[0], "heavy")]
    assert errors(0) == first
    assert not set(errors(1)) & set(first)


def test_float32_queries_show_the_partials_alone() -> None:
    config = StudyConfig(
        preset=preset("kimi-k3-tp8"), tokens=[2000], thresholds=[0], q_dtype=torch.float32, logits=["heavy"], repeat=1
    )
    one, bf16, fp32 = study(config).rows
    assert (one.threshold, bf16.partial_dtype, fp32.partial_dtype) == (ONE_SPLIT, "bf16", "fp32")
    assert one.error < 5e-6
    assert fp32.error < 5e-6
    assert 2e-4 < bf16.error < 4e-3


def test_progress_is_told_as_often_as_announced() -> None:
    config = StudyConfig(preset=preset("kimi-k3-tp8"), tokens=[1, 64], repeat=1)
    told: list[str] = []
    study(config, told.append)
    assert len(told) == config.steps


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla"])
@pytest.mark.parametrize("tokens", [1, 8192, 8193, 16500])
def test_the_blocked_oracle_is_the_oracle(tokens: int, kv_dtype: torch.dtype | str) -> None:
    caps = densemla.Caps(num_q_heads=3, kv_dtype=kv_dtype, page_size=48, backend="reference")
    plan = densemla.plan(caps)
    step = random_step(caps, [tokens], seed=tokens)
    binding = densemla.bind(
        plan,
        scratch=plan.empty_scratch(),
        q=step.q,
        kv_cache=step.kv_cache,
        page_table=step.page_table,
        cache_seqlens=step.cache_seqlens,
        output=torch.empty(1, 3, 512, dtype=caps.output_dtype),
        lse=torch.empty(1, 3),
        sm_scale=192**-0.5,
    )
    exact, _ = decode_float64(binding)
    torch.testing.assert_close(decode_in_blocks(binding), exact, rtol=1e-12, atol=1e-10)


def test_the_error_is_relative_to_each_head_and_sees_one_element() -> None:
    exact = torch.randn(1, 2, 512, dtype=torch.float64) * torch.tensor([1.0, 1e-3]).view(1, 2, 1)
    output = exact * torch.tensor([1.001, 0.99]).view(1, 2, 1)
    torch.testing.assert_close(relative_errors(output, exact), torch.tensor([[1e-3, 1e-2]], dtype=torch.float64))
    output = exact.clone()
    output[0, 1, 5] = torch.nan
    assert relative_errors(output, exact).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokens", {"tokens": []}),
        ("tokens", {"tokens": [0]}),
        ("tokens", {"tokens": [200000]}),
        ("thresholds", {"thresholds": []}),
        ("logits", {"logits": []}),
        ("repeat", {"repeat": 0}),
    ],
)
def test_a_study_of_nothing_is_refused(field: str, change: dict[str, object]) -> None:
    with pytest.raises(ContractError, match=f"^{field}: "):
        StudyConfig(preset=preset("kimi-k3"), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"logits": ["light"]}, {"thresholds": [-2]}, {"backend": "abacus"}])
def test_an_option_that_nobody_knows_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ContractError, match=r"logits|single_split_chunks|backend"):
        study(StudyConfig(preset=preset("kimi-k3"), tokens=[64], **change))  # type: ignore[arg-type]


def test_a_backend_without_split_options_is_not_studied() -> None:
    with pytest.raises(ContractError, match=r"^(backend|partial_dtype): "):
        study(StudyConfig(preset=preset("kimi-k3"), tokens=[64], backend="reference"))


def largest_weights(logits: str) -> torch.Tensor:
    """The largest softmax weight of each head over 4096 rows."""
    caps = densemla.Caps(num_q_heads=96, q_dtype=torch.float32, kv_dtype=torch.float32)
    step = random_step(caps, [4096], logits=logits)
    rows = step.kv_cache[step.page_table[0].long()].flatten(0, 1)
    return torch.softmax(192**-0.5 * step.q[0] @ rows.T, dim=-1).amax(-1)


def test_logits_are_what_they_are_called() -> None:
    assert set(LOGITS) == {"uniform", "heavy"}
    assert largest_weights("uniform").max() < 0.01
    heavy = largest_weights("heavy")
    assert heavy.max() > 0.5
    assert heavy.min() < 0.05


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        *(("lengths", {"lengths": value}) for value in ([-1], [1.5], ["a"], None, 5)),
        *(("queries", {"queries": value}) for value in ([-1], [1, 2], ["a"], 5)),
        *(("logits", {"logits": value}) for value in ("flat", [])),
    ],
)
def test_steps_that_cannot_be_drawn(argument: str, change: dict[str, object]) -> None:
    with pytest.raises(ContractError) as caught:
        random_step(densemla.Caps(num_q_heads=2), **{"lengths": [3], **change})  # type: ignore[arg-type]
    assert caught.value.argument == argument


def test_drawn_steps_are_poisoned_where_nobody_may_read() -> None:
    for kv_dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, "fp8_ds_mla"):
        caps = densemla.Caps(num_q_heads=2, kv_dtype=kv_dtype, page_size=16)
        step = random_step(caps, [5, 0, 40], queries=[1, 2, 3])
        assert step.page_table.tolist()[0][1:] == [-1, -1]
        assert step.page_table.tolist()[1] == [-1, -1, -1]
        assert sorted(i for row in step.page_table.tolist() for i in row if i >= 0) == [0, 1, 2, 3]
        assert step.cu_seqlens_q.tolist() == [0, 1, 3, 6]
        assert step.q.shape == (6, 2, 576)
        fmt = caps.kv_format
        rows = torch.empty(4, 16, 576)
        fmt.widen(step.kv_cache, rows)
        for request, length in ((0, 5), (2, 40)):
            held = rows[step.page_table[request][step.page_table[request] >= 0].long()].flatten(0, 1)
            assert held[:length].isfinite().all()
            assert held[length:].isnan().all()
