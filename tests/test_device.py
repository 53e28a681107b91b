"""CUDA's compatibility rule, as a table, and devices that can't be used wherever one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import densemla
from densemla import Caps, ContractError
from densemla.captured import load_step
from densemla.device import RULE, check_arch, usable
from densemla.dspark.checkpoint import load_draft
from densemla.dspark.cli import check_device
from densemla.dspark.kv_pool import KVPool
from densemla.inputs import random_step
from densemla.presets import preset
from densemla.study import StudyConfig

LAYER = Path(__file__).parent / "data" / "deepseek_v3_layer.safetensors"

FIELD_CASE_32 = [
    ((12, 1), ["sm_120"], True),
    ((8, 9), ["sm_86"], True),
    ((8, 6), ["sm_80"], True),
    ((9, 0), ["sm_90a"], True),
    ((10, 3), ["sm_100a"], False),
    ((12, 0), ["compute_90"], True),
    ((8, 9), ["sm_80", "sm_86"], True),
    ((12, 0), ["sm_100"], False),
]

TABLE = [
    *FIELD_CASE_32,
    ((8, 0), ["sm_86"], False),
    ((9, 0), ["sm_80", "sm_86", "sm_89"], False),
    ((9, 0), ["sm_100"], False),
    ((10, 0), ["sm_90a"], False),
    ((9, 0), ["compute_90a"], True),
    ((10, 0), ["compute_90a"], False),
    ((8, 9), ["compute_90"], False),
    ((9, 0), ["compute_80"], True),
    ((7, 5), ["compute_80", "sm_80"], False),
    ((10, 3), ["sm_100f"], True),
    ((10, 0), ["sm_103f"], False),
    ((12, 0), ["sm_100f"], False),
    ((12, 0), ["compute_100f"], False),
    ((10, 3), ["compute_100f"], True),
    ((12, 1), ["sm_121"], True),
    ((12, 0), ["sm_121"], False),
    ((12, 1), ["compute_121"], True),
    ((7, 5), ["sm_75", "sm_80"], True),
    ((9, 0), [], False),
]


@pytest.mark.parametrize(("capability", "arch_list", "ok"), TABLE)
def test_compatibility(capability: tuple[int, int], arch_list: list[str], ok: bool) -> None:
    result = check_arch(capability, arch_list, device="GPU 3")
    assert bool(result) is result.ok is ok
    assert result.entry in (arch_list if ok else [None])
    assert "GPU 3" in result.message
    assert "{}.{}".format(*capability) in result.message
    assert RULE in result.message
    assert all(entry in result.message for entry in arch_list)


def test_the_entry_named_is_one_that_runs() -> None:
    assert check_arch((9, 0), ["sm_80", "sm_120", "sm_90", "compute_80"]).entry == "sm_90"


@pytest.mark.parametrize("entry", ["", "sm_9", "sm90", "sm_90b", "sm_9000", "gfx90a", "SM_90", "sm_90 ", "sm_९०"])
def test_an_entry_that_cannot_be_read_is_refused(entry: str) -> None:
    # Also where an entry before it would do: a list that is half understood is not understood.
    with pytest.raises(ContractError, match="arch_list") as caught:
        check_arch((9, 0), ["sm_90", entry])
    assert repr(entry) in str(caught.value)


@pytest.mark.parametrize("capability", [90, (9,), (9, 0, 0), ("9", "0"), (9, -1), (True, 0), None])
def test_a_capability_that_is_no_pair_is_refused(capability: object) -> None:
    with pytest.raises(ContractError, match="capability"):
        check_arch(capability, ["sm_90"])  # type: ignore[arg-type]


@pytest.mark.parametrize("arch_list", ["sm_90", None, 90, [90]])
def test_what_is_no_list_of_names_is_refused(arch_list: object) -> None:
    with pytest.raises(ContractError, match="arch_list"):
        check_arch((9, 0), arch_list)  # type: ignore[arg-type]


capabilities = st.tuples(st.integers(5, 15), st.integers(0, 9))


@given(capabilities, capabilities)
def test_suffixes_only_narrow(built: tuple[int, int], device: tuple[int, int]) -> None:
    number = f"{built[0]}{built[1]}"

    def runs(name: str) -> bool:
        return check_arch(device, [name.format(number)]).ok

    assert runs("sm_{}a") == runs("compute_{}a") == (built == device)
    assert runs("sm_{}a") <= runs("sm_{}f") <= runs("sm_{}") <= runs("compute_{}")
    assert runs("sm_{}") == (built[0] == device[0] and built[1] <= device[1])
    assert runs("compute_{}") == (built <= device)


TAKES_A_DEVICE: dict[str, Callable[[object], object]] = {
    "usable": usable,
    "kv_cache.empty": lambda device: densemla.kv_cache.empty(1, 1, device=device),
    "random_step": lambda device: random_step(Caps(num_q_heads=1, device=device), [1]),
    "StudyConfig": lambda device: StudyConfig(preset=preset("kimi-k3"), device=device),
    "CapturedStep.to": lambda device: load_step(LAYER).to(device),
    "KVPool": lambda device: KVPool(1 << 20, num_layers=1, kv_lora_rank=8, qk_rope_head_dim=4, device=device),
    "check_device": check_device,
    "load_draft": lambda device: load_draft(Path("no such folder"), Path("nor this"), device=device),
}


@pytest.mark.parametrize("taker", TAKES_A_DEVICE)
@pytest.mark.parametrize(
    "device", ["nope", "", "cuda:-1", "cuda:99999999999", "xpu", "mps", torch.device("meta"), None, 3, 1.5], ids=repr
)
def test_a_device_that_nothing_runs_on_is_refused_by_name(taker: str, device: object) -> None:
    with pytest.raises(ContractError, match=r"^device: ") as caught:
        TAKES_A_DEVICE[taker](device)
    assert str(device) in str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
@pytest.mark.parametrize("taker", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")], ids=repr)
def test_a_gpu_that_is_not_there_is_explained(taker: str, device: object) -> None:
    with pytest.raises(ContractError, match=r"^device: .*built without CUDA"):
        TAKES_A_DEVICE[taker](device)


def test_the_cpu_is_taken_under_every_name() -> None:
    for name in ("cpu", "cpu:0", torch.device("cpu")):
        assert usable(name).type == "cpu"
        assert densemla.kv_cache.empty(2, 3, device=name).shape == (2, 3, 576)
