"""What of the benchmarks can go wrong without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the names in their annotations.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "arguments",
    [
        ["small", "--limit=60", "--tile", "48"],
        ["small", "--limit", "60", "--tile", "48"],
        ["--limit", "60", "small", "--tile", "48"],
        ["small", "--lim", "60", "--tile", "48"],
    ],
)
def test_a_time_limit_is_not_handed_on(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A child with the limit would start a child of its own, for ever."""
    hopper_check = load("hopper_check")
    started: list[list[str]] = []

    def start(command: list[str], *, timeout: float, check: bool) -> subprocess.CompletedProcess[bytes]:
        assert timeout == 60
        started.append(command[1:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(hopper_check.subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["hopper_check.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        hopper_check.main()
    assert ended.value.code == 3
    assert started == [[str(BENCHMARKS / "hopper_check.py"), "small", "--tile", "48"]]


def test_replays_are_watched_between_the_timed_region_and_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog sees no collective inside a graph: a replay whose peer is gone would wait for ever."""
    dcp_merge = load("dcp_merge")
    happened: list[str] = []

    class Event:
        def record(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("wait")

        def elapsed_time(self, _: Event) -> float:
            return 1.0

    # A GPU without a GPU.
    monkeypatch.setattr(dcp_merge.torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(dcp_merge.torch, "tensor", lambda values, device: values[0])
    monkeypatch.setattr(dcp_merge, "captured_graph", lambda call: lambda: happened.append("replay"))
    monkeypatch.setattr(dcp_merge.dist, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(dcp_merge.dist, "all_reduce", lambda *_: None)
    gpu = dcp_merge.torch.device("cuda")

    def watch() -> None:
        happened.append("watch")

    dcp_merge.time_us(lambda: None, gpu, watch)
    timed = ["record", *["replay"] * dcp_merge.REPLAYS, "record"]
    assert happened == ["barrier", "replay", *timed, "watch", "wait"] * dcp_merge.ROUNDS
    happened.clear()
    dcp_merge.graph_or_call(lambda: None, gpu, watch)()
    assert happened == ["replay", "watch"]
