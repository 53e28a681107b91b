"""Captured steps: a real layer's output reproduced, files that say what is wrong, and checks that notice."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import densemla
from densemla import ContractError, SplitOptions, captured
from densemla.captured import CapturedStep, Result
from densemla.inputs import random_step

LAYER = Path(__file__).parent / "data" / "deepseek_v3_layer.safetensors"
OPTIONS = [SplitOptions(dtype, chunks) for dtype in (torch.bfloat16, torch.float32) for chunks in (-1, 0)]
FORMATS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.uint8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
]


def make_step(
    q_dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype = torch.bfloat16, logits: str = "heavy"
) -> CapturedStep:
    caps = densemla.Caps(num_q_heads=6, max_total_q=6, max_batch=4, q_dtype=q_dtype, kv_dtype=kv_dtype)
    drawn = random_step(caps, [300, 0, 1, 130], queries=[2, 1, 2, 1], logits=logits, seed=3)
    scale = torch.tensor([0.5])
    return CapturedStep(
        q=drawn.q,
        kv_cache=drawn.kv_cache,
        page_table=drawn.page_table,
        cache_seqlens=drawn.cache_seqlens,
        cu_seqlens_q=drawn.cu_seqlens_q,
        kv_scale=scale if kv_dtype is torch.float8_e4m3fn else None,
        q_scale=scale if q_dtype is torch.float8_e4m3fn else None,
        sm_scale=192**-0.5,
    )


def decoded(step: CapturedStep, options: SplitOptions) -> Result:
    output, lse = step.decode(options)
    name = "bf16" if options.partial_dtype is torch.bfloat16 else "fp32"
    return Result(output=output, lse=lse, metadata={"partial_dtype": name})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_deepseek_v3_layer_is_reproduced(options: SplitOptions) -> None:
    step, layer = captured.load_step(LAYER), load_file(LAYER)
    output, _ = step.decode(options)
    heads = torch.einsum("thr,hvr->thv", output, layer["layer.w_uv"])
    behind = heads.flatten(1) @ layer["layer.w_o"].T
    split_in_bf16 = options.partial_dtype is torch.bfloat16 and options.single_split_chunks == 0
    for own, name in ((heads, "layer.heads"), (behind, "layer.output")):
        errors = (own - layer[name]).flatten(1).norm(dim=1) / layer[name].flatten(1).norm(dim=1)
        assert errors[:2].max() < 1e-5
        # The third request has two chunks: the only one in which the options differ.
        assert errors[2:].max() < (1e-2 if split_in_bf16 else 1e-5)
        assert not split_in_bf16 or errors[2:].min() > 1e-4


def test_the_layers_own_scale_and_queries_matter() -> None:
    """The comparison above would notice a scale without YaRN's factor and a query that sees too much."""
    step, layer = captured.load_step(LAYER), load_file(LAYER)
    everything = torch.repeat_interleave(step.cache_seqlens, step.cu_seqlens_q.diff())
    for wrong in (replace(step, sm_scale=192**-0.5), replace(step, query_cache_seqlens=everything)):
        output, _ = wrong.decode(SplitOptions(torch.float32, -1))
        heads = torch.einsum("thr,hvr->thv", output, layer["layer.w_uv"])
        assert (heads - layer["layer.heads"]).norm() / layer["layer.heads"].norm() > 1e-4


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), FORMATS)
def test_a_step_survives_its_file(tmp_path: Path, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    step = make_step(q_dtype, kv_dtype)
    step = replace(step, query_cache_seqlens=torch.tensor([7, 300, 0, 0, 1, 64], dtype=torch.int32))
    captured.save_step(tmp_path / "step", step, provenance={"note": torch.ones(1)}, metadata={"source": "here"})
    again = captured.load_step(tmp_path / "step")
    assert (again.sm_scale, again.kv_lora_rank) == (step.sm_scale, step.kv_lora_rank)
    assert again.tensors().keys() == step.tensors().keys()
    for name, tensor in step.tensors().items():
        other = getattr(again, name)
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))
    for one, two in zip(step.decode(OPTIONS[0]), again.decode(OPTIONS[0]), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("missing", ["q", "kv_cache", "page_table", "cache_seqlens", "sm_scale"])
def test_what_a_step_lacks_is_named(tmp_path: Path, missing: str) -> None:
    tensors = make_step().tensors()
    tensors.pop(missing, None)
    save_file(tensors, tmp_path / "step", {} if missing == "sm_scale" else {"sm_scale": "0.07"})
    with pytest.raises(ContractError, match=rf"step: {missing}: expected "):
        captured.load_step(tmp_path / "step")


def test_a_misspelt_tensor_is_refused(tmp_path: Path) -> None:
    tensors = make_step().tensors()
    tensors["cu_seqlen_q"] = tensors.pop("cu_seqlens_q")
    save_file(tensors, tmp_path / "step", {"sm_scale": "0.07"})
    with pytest.raises(ContractError, match=r"cu_seqlen_q: expected only .*cu_seqlens_q"):
        captured.load_step(tmp_path / "step")


@pytest.mark.parametrize("metadata", [{"sm_scale": "wide"}, {"sm_scale": "0.07", "kv_lora_rank": "5.5"}])
def test_metadata_that_is_no_number_is_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    save_file(make_step().tensors(), tmp_path / "step", metadata)
    with pytest.raises(ContractError, match="metadata"):
        captured.load_step(tmp_path / "step")


@pytest.mark.parametrize("sm_scale", ["nan", "0", "-1", "inf"])
def test_a_scale_that_is_no_scale_is_refused_before_decoding(tmp_path: Path, sm_scale: str) -> None:
    save_file(make_step().tensors(), tmp_path / "step", {"sm_scale": sm_scale})
    with pytest.raises(ContractError, match="sm_scale"):
        captured.load_step(tmp_path / "step").decode(OPTIONS[0])


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        captured.load_step(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ContractError, match="a safetensors file"):
        captured.load_step(tmp_path / "text")
    whole = LAYER.read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ContractError, match="a safetensors file"):
        captured.load_step(tmp_path / "cut")


@pytest.mark.parametrize("name", ["kv_lora_ranks", "partial_dtype"])
def test_misspelt_metadata_is_refused(tmp_path: Path, name: str) -> None:
    save_file(make_step().tensors(), tmp_path / "step", {"sm_scale": "0.07", "format": "pt", name: "256"})
    with pytest.raises(ContractError, match=rf"step: metadata {name}: expected only sm_scale, kv_lora_rank.*'256'"):
        captured.load_step(tmp_path / "step")


def test_metadata_that_others_write_is_fine(tmp_path: Path) -> None:
    words = {"sm_scale": "0.07", "format": "pt", "layer.source": "somewhere"}
    save_file(make_step().tensors(), tmp_path / "step", words)
    assert captured.load_step(tmp_path / "step").sm_scale == 0.07


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ContractError, match=r"pipe: expected a file to write, got a device, a pipe or a socket"):
        captured.save_step(pipe, make_step())
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(part: Path, data: bytes) -> int:
        part.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/step'$"):
        captured.save_step(tmp_path / "step", make_step())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError, match=r"taken'$"):
        captured.save_step(tmp_path / "taken", make_step())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_result_of_another_step_is_refused(tmp_path: Path) -> None:
    for name, logits in (("one", "heavy"), ("two", "uniform")):
        captured.save_step(tmp_path / name, make_step(logits=logits))
    result = decoded(captured.load_step(tmp_path / "one"), OPTIONS[0])
    words = {**result.metadata, "input_sha256": captured.sha256(tmp_path / "one")}
    captured.save_result(tmp_path / "out", replace(result, metadata=words))
    assert captured.load_result(tmp_path / "out", tmp_path / "one").metadata == words
    with pytest.raises(ContractError, match="input_sha256"):
        captured.load_result(tmp_path / "out", tmp_path / "two")


@pytest.mark.parametrize("logits", ["uniform", "heavy"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), FORMATS)
def test_honest_results_pass(q_dtype: torch.dtype, kv_dtype: torch.dtype, options: SplitOptions, logits: str) -> None:
    step = make_step(q_dtype, kv_dtype, logits)
    checks = captured.check(step, decoded(step, options))
    assert [check.heads_off for check in checks] == [0] * 6


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
def test_an_exact_zero_is_right_and_anything_else_there_is_not(q_dtype: torch.dtype) -> None:
    step = make_step(q_dtype, q_dtype)
    step.kv_cache.zero_()
    result = decoded(step, OPTIONS[0])
    assert not result.output.any()
    checks = captured.check(step, result)
    assert [(check.heads_off, check.error) for check in checks] == [(0, 0)] * 6
    result.output[1, 4, 7] = 1e-20
    assert [check.heads_off for check in captured.check(step, result)] == [0, 1, 0, 0, 0, 0]


def test_nan_where_float64_has_it_is_right_and_elsewhere_is_not() -> None:
    step = make_step()
    step.q[1, 2] = torch.nan
    result = decoded(step, OPTIONS[0])
    assert result.output[1, 2].isnan().all()
    assert [check.heads_off for check in captured.check(step, result)] == [0] * 6
    result.output[1, 2, 5] = 1
    result.output[5, 0, 5] = torch.nan
    result.lse[4, 1] = torch.nan
    assert [check.heads_off for check in captured.check(step, result)] == [0, 1, 0, 0, 1, 1]
    result.output[1, 2], result.lse[1, 2] = torch.nan, 3
    assert captured.check(step, result)[1].heads_off == 1


def test_a_result_whose_partial_type_nobody_knows_names_its_file(tmp_path: Path) -> None:
    captured.save_step(tmp_path / "step", make_step())
    result = replace(decoded(make_step(), OPTIONS[0]), metadata={"partial_dtype": "fp12"})
    captured.save_result(tmp_path / "out", result)
    with pytest.raises(ContractError, match=r"out: partial_dtype: expected .*fp12"):
        captured.load_result(tmp_path / "out", tmp_path / "step")


def spoil_one_head(result: Result) -> None:
    result.output[1, 4] *= 1.02


def spoil_with_nan(result: Result) -> None:
    result.output[1, 4, 7] = torch.nan


def spoil_lse_base(result: Result) -> None:
    result.lse[1, 4] /= torch.log(torch.tensor(2.0))


def spoil_lse_with_nan(result: Result) -> None:
    result.lse[1, 4] = torch.nan


@pytest.mark.parametrize("spoil", [spoil_one_head, spoil_with_nan, spoil_lse_base, spoil_lse_with_nan])
def test_a_wrong_head_is_found_where_it_is(spoil: object) -> None:
    step = make_step()
    result = decoded(step, OPTIONS[0])
    spoil(result)  # type: ignore[operator]
    checks = captured.check(step, result)
    assert [check.heads_off for check in checks] == [0, 1, 0, 0, 0, 0]
    if spoil in (spoil_one_head, spoil_with_nan):
        assert checks[1].worst_head == 4


def test_rows_that_see_nothing_must_be_exactly_empty() -> None:
    step = make_step()
    # Query 2 is the request of length 0, query 3 the first of two on one token.
    for spoil in (("output", 2), ("lse", 3)):
        result = decoded(step, OPTIONS[0])
        getattr(result, spoil[0])[spoil[1], 0] = 1e-30
        checks = captured.check(step, result)
        assert [check.query for check in checks if check.heads_off] == [spoil[1]]


def test_the_tolerance_follows_the_coarsest_type() -> None:
    step = make_step(torch.float32, torch.float32)
    split_in_bf16 = decoded(step, SplitOptions(torch.bfloat16, 0))
    assert split_in_bf16.tolerance == captured.TOLERANCES[torch.bfloat16]
    claims_fp32 = replace(split_in_bf16, metadata={"partial_dtype": "fp32"})
    assert [check.heads_off > 0 for check in captured.check(step, claims_fp32)] == [
        True, True, False, False, False, True
    ]  # fmt: skip


def test_a_result_of_another_shape_or_type_is_refused() -> None:
    step = make_step()
    good = decoded(step, OPTIONS[0])
    for name, bad in (
        ("output", replace(good, output=good.output[:, :3])),
        ("output", replace(good, output=good.output.double())),
        ("lse", replace(good, lse=good.lse[:3])),
        ("lse", replace(good, lse=good.lse.double())),
    ):
        with pytest.raises(ContractError, match=f"^{name}: "):
            captured.check(step, bad)


@pytest.mark.parametrize("name", ["q", "kv_cache", "page_table"])
def test_a_step_of_flat_tensors_is_refused_by_their_name(name: str) -> None:
    step = make_step()
    flat = replace(step, **{name: getattr(step, name).flatten()})
    result = decoded(step, OPTIONS[0])
    for judge in (flat.decode_float64, lambda: captured.check(flat, result)):
        with pytest.raises(ContractError) as caught:
            judge()
        assert caught.value.argument == name


def test_the_callers_default_dtype_and_device_do_not_matter() -> None:
    step = make_step()
    expected = step.decode_float64()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = step.decode_float64()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
