"""Decode steps through the Triton backend in Triton's interpreter, each against float64.

Run with TRITON_INTERPRET=1; prints one JSON line per case: its name and what went wrong, or null.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
sys.path.insert(0, str(Path(__file__).parent))

from gpu_steps import Run, assert_right, same

import densemla
from densemla.backends.triton.tiles import Tiles
from steps import FP8, PACKED, Step, make_sink_step, make_step

FORMATS: dict[str, dict[str, object]] = {
    "bf16": {},
    "fp16": {"kv_dtype": torch.float16, "q_dtype": torch.float16},
    "bf16 over fp16": {"kv_dtype": torch.float16},
    "fp8": {"kv_dtype": FP8, "kv_scale": 0.03},
    "fp8 under fp16": {"kv_dtype": FP8, "kv_scale": 0.03, "q_dtype": torch.float16},
    "fp8 both": {"kv_dtype": FP8, "kv_scale": 0.03, "q_dtype": FP8, "q_scale": 0.02},
    "packed": {"kv_dtype": PACKED},
    "packed under fp16": {"kv_dtype": PACKED, "q_dtype": torch.float16},
}


def run(step: Step, tiles: Tiles | None = None, changes: dict[str, object] | None = None, **options: object) -> Run:
    from densemla.backends.triton.launch import launch  # noqa: PLC0415
    from densemla.backends.triton.tiles import INTERPRETED  # noqa: PLC0415

    options = {"max_cache_tokens": 1024, "num_splits": 3, "single_split_chunks": 2, **options}
    plan = densemla.plan(step.caps(backend="triton", **options))
    binding = step.bind(plan, **(changes or {}))
    if tiles is None:
        densemla.run(binding)
    else:
        launch(binding, tiles, INTERPRETED)
    return Run(binding)


def right(step: Step, **options: object) -> None:
    assert_right(step, run(step, **options))


def formats(name: str, partial_dtype: torch.dtype) -> Callable[[], None]:
    def check() -> None:
        step = make_step([0, 1, 65, 190], heads=3, queries=[1, 2, 2, 1], **FORMATS[name])
        right(step, kv_dtype=FORMATS[name].get("kv_dtype", torch.bfloat16), partial_dtype=partial_dtype)

    return check


def sink(name: str) -> Callable[[], None]:
    # float16 could not hold outputs as small as these.
    options = {"num_splits": 1, "output_dtype": torch.bfloat16}
    kv_dtype = FORMATS[name].get("kv_dtype", torch.bfloat16)
    return lambda: right(make_sink_step(heads=3, **FORMATS[name]), kv_dtype=kv_dtype, **options)


def page_size(size: int) -> Callable[[], None]:
    return lambda: right(make_step([5, 130], heads=2, page_size=size))


def head_count(heads: int) -> Callable[[], None]:
    return lambda: right(make_step([3, 150], heads=heads, logits=5.0, heavy_tails=True))


def right_without_rope() -> None:
    """Widths that are no powers of two, and no rope part: against a plain softmax."""
    torch.manual_seed(0)
    q, cache = torch.randn(1, 3, 48).bfloat16(), torch.randn(2, 64, 48).bfloat16()
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    lengths = torch.tensor([100], dtype=torch.int32)
    output, lse = densemla.decode(
        q, cache, table, lengths, sm_scale=0.2, kv_lora_rank=48, backend="triton", single_split_chunks=0
    )
    rows = torch.cat([cache[1], cache[0]])[:100].double()
    scores = 0.2 * q[0].double() @ rows.T
    assert float((output[0].double() - scores.softmax(-1) @ rows).abs().max()) < 2.0**-7
    assert float((lse[0].double() - scores.logsumexp(-1)).abs().max()) < 1e-5


def bounds_of_each_query() -> None:
    step = make_step([150, 2, 64], heads=6, queries=[4, 3, 1])
    step.query_cache_seqlens = torch.tensor([150, 0, 17, 149, 0, 1, 2, 64], dtype=torch.int32)
    right(step, single_split_chunks=0)


def rows_of_no_request() -> None:
    step = make_step([2, 0, 100], heads=5, queries=[4, 2, 1])
    step.q = torch.cat([step.q, torch.full((2, 5, 576), math.nan, dtype=torch.bfloat16)])
    result = run(step, single_split_chunks=0)
    step.q[7:] = 0
    assert_right(step, result)
    assert bool((result.partial_lse[:, 7:] == -math.inf).all())


def bad_row() -> None:
    """A row that only the last query sees does not reach the others of its tile."""
    step = make_step([100], heads=4, queries=3)
    clean = run(step)
    step.kv_cache[step.page_table[0, 1], 99 - 64, 7] = math.nan
    result = run(step)
    assert torch.equal(result.output[:2], clean.output[:2])
    assert bool(result.output[2].isnan().all())


def nothing_to_see() -> None:
    step = Step(
        q=torch.randn(3, 2, 576).bfloat16(),
        kv_cache=torch.empty(0, 64, 576, dtype=torch.bfloat16),
        page_table=torch.empty(3, 0, dtype=torch.int32),
        cache_seqlens=torch.zeros(3, dtype=torch.int32),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32),
    )
    result = run(step)
    assert bool((result.output == 0).all())
    assert bool((result.lse == -math.inf).all())
    assert bool((result.partial_lse == -math.inf).all())


def alone_or_in_a_batch() -> None:
    step = make_step([190, 64, 0, 30], heads=3, queries=[2, 1, 1, 3])
    options = {"max_batch": 4, "max_total_q": 7}
    whole = run(step, **options)
    for i in range(4):
        begin, end = step.cu_seqlens_q[i], step.cu_seqlens_q[i + 1]
        assert same((whole.output[begin:end], whole.lse[begin:end]), run(step.request(i), **options))


def eager_or_graph() -> None:
    step = make_step([70, 129], heads=3)
    full = run(step, num_splits=5, single_split_chunks=0)
    assert same(full, run(step, num_splits=5, single_split_chunks=0, changes={"active_splits": 3}))


def tiles(block_h: int, block_n: int, tile_loads: bool) -> Callable[[], None]:
    def check() -> None:
        step = make_step([200, 128], heads=20, queries=[2, 1])
        assert_right(step, run(step, Tiles(block_h, block_n, 8, 2, tile_loads, 0)))

    return check


def growing_logits() -> None:
    """Logits that rise from block to block, by less and by more than what moves a row's base; rows apart."""
    wide = Tiles(64, 64, 8, 2, True, 0)
    options = {"num_splits": 1, "single_split_chunks": 8}
    step = make_step([64 * 7 + 10], heads=20)
    step.kv_cache[..., 512] = 0
    for block in range(8):
        step.kv_cache[step.page_table[0, block], :, 512] = block
    # Powers of two by which the weights grow in a block, one for each head.
    growth = torch.tensor([-40.0, -3.0, 0.0, 0.5, 1.0, 3.0, 5.0, 7.5, 8.0, 9.0, 16.0, 30.0]).repeat(2)[:20]
    step.q[..., 512] = (growth * math.log(2) / step.sm_scale).bfloat16()
    assert_right(step, run(step, wide, **options))
    step.q[..., 512] = math.log(2) / step.sm_scale
    calm = run(step, wide, **options)
    step.q[:, 3, 512] *= 30
    result = run(step, wide, **options)
    others = torch.arange(20) != 3
    assert torch.equal(result.output[:, others], calm.output[:, others])
    assert torch.equal(result.lse[:, others], calm.lse[:, others])


def integers_that_lie() -> None:
    """On a device nothing can be checked, but whatever lengths and page ids say, only the tensors are written."""
    from densemla.backends.triton.launch import launch  # noqa: PLC0415
    from densemla.backends.triton.tiles import INTERPRETED  # noqa: PLC0415

    step = make_step([100, 60], heads=12, queries=2)
    plan = densemla.plan(step.caps(backend="triton", max_cache_tokens=128, num_splits=2))
    bands: list[torch.Tensor] = []

    def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor between two bands of a marker."""
        count = math.prod(shape)
        whole = torch.full((3 * count,), 7.0, dtype=dtype)
        bands.extend((whole[:count], whole[2 * count :]))
        return whole[count : 2 * count].view(shape)

    binding = step.bind(
        plan,
        output=guarded((4, 12, 512), torch.bfloat16),
        lse=guarded((4, 12), torch.float32),
        scratch={name: guarded(spec.shape, spec.dtype) for name, spec in plan.scratch_specs().items()},
    )
    for name, values in (
        ("cache_seqlens", [-5, 1 << 30]),
        ("page_table", [[-(1 << 30), 1 << 29], [4, -1]]),
        ("cu_seqlens_q", [-3, 1 << 28, 7]),
        ("cu_seqlens_q", [3, 1, 4]),
    ):
        tensor = getattr(binding, name)
        held = tensor.clone()
        tensor.copy_(torch.tensor(values))
        launch(binding, Tiles(16, 32, 8, 2, False, 0), INTERPRETED)
        tensor.copy_(held)
        assert all(bool((band == 7.0).all()) for band in bands), f"{name} = {values}"


CASES: dict[str, Callable[[], None]] = {
    **{f"format {name}, bf16 partials": formats(name, torch.bfloat16) for name in FORMATS},
    **{f"format {name}, float32 partials": formats(name, torch.float32) for name in FORMATS},
    **{f"format {name}, weights far below the largest": sink(name) for name in FORMATS},
    **{f"page size {size}": page_size(size) for size in (1, 16, 32, 48, 64, 128)},
    **{f"{heads} heads": head_count(heads) for heads in (1, 12, 33)},
    "no rope columns": right_without_rope,
    "bounds of each query": bounds_of_each_query,
    "rows of no request": rows_of_no_request,
    "a bad row that one query sees": bad_row,
    "nothing to see": nothing_to_see,
    "alone or in a batch": alone_or_in_a_batch,
    "eager or graph": eager_or_graph,
    "wide tiles": tiles(64, 64, False),
    "tiles from the copy engine": tiles(64, 64, True),
    "logits that grow": growing_logits,
    "integers that lie": integers_that_lie,
}


def repair_interpreter() -> None:
    """What Triton 3.6's interpreter lacks: indices under NumPy 2.4, and products of bf16 (held as uint16)."""
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def widen(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: create_dot(self, widen(a), widen(b), *rest)


def main() -> None:
    repair_interpreter()
    for name in sys.argv[1:]:
        fault = None
        try:
            with np.errstate(all="ignore"):
                CASES[name]()
        except Exception:  # noqa: BLE001 (whatever went wrong is this case's result)
            fault = traceback.format_exc()
        print(json.dumps({"case": name, "fault": fault}), flush=True)


if __name__ == "__main__":
    main()
