"""dcp-check as torchrun starts it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys

import pytest
import torch
import typer

import densemla
from densemla.distributed import check, lse_merge
from densemla.distributed.collectives import DUMP_WAIT


def dcp_check(*arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "densemla.cli", "dcp-check", *arguments]
    if ranks is not None:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(_free_port())]
        command[1:2] = [*launcher, "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_ranks_under_torchrun(tmp_path):
    report = tmp_path / "check.json"
    arguments = ("--tokens", "700", "--interleave", "4", "--repeat", "2", "--json", str(report))
    result = dcp_check(*arguments, ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" ok") == 4
    # Once, from rank 0.
    assert result.stdout.count("2 ranks over gloo, 24 heads") == 1
    found = json.loads(report.read_text())
    assert [(row["form"], row["partial_dtype"]) for row in found["rows"]] == [
        ("all_to_all", "bf16"), ("all_to_all", "fp32"), ("reduce_scatter", "bf16"), ("reduce_scatter", "fp32"),
    ]  # fmt: skip
    errors = {(row["form"], row["partial_dtype"]): row["error"] for row in found["rows"]}
    assert all(0 < error < 1e-2 for error in errors.values())


def alone(**options: object) -> None:
    """The command in this process, as a group of one."""
    check.dcp_check(
        **{"tokens": 300, "queries": 1, "heads": 4, "interleave": 1, "backend": "auto", "transport": "gloo",
           "repeat": 1, "timeout": 10, "seed": 0, "json_file": None, **options}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transport", "mpi"), ("interleave", 0), ("tokens", 0), ("queries", 0), ("heads", -1), ("backend", "abacus"),
        ("timeout", 0.0), ("timeout", math.nan), ("timeout", math.inf), ("seed", 1 << 64),
    ],
)  # fmt: skip
def test_bad_options_say_why(name, value):
    with pytest.raises(densemla.ContractError) as caught:
        alone(**{name: value})
    assert caught.value.argument == name


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "join", lambda *_: pytest.fail("it began"))
    with pytest.raises(densemla.ContractError, match="no folder"):
        alone(json_file=tmp_path / "none" / "report.json")


@pytest.mark.parametrize(
    ("variables", "named"),
    [({"RANK": "0"}, "environment"), ({"LOCAL_RANK": "first"}, "LOCAL_RANK"), ({"RANK": "x"}, "environment")],
)
def test_half_of_torchruns_environment_is_named(variables, named, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(densemla.ContractError) as caught:
        alone()
    assert caught.value.argument == named


def test_nan_is_the_worst_error(monkeypatch, capsys):
    def wrong(outputs, lses, *, base):
        merged, lse = densemla.merge(outputs, lses, base=base)
        # The longest request comes first; max() would forget a NaN that comes later.
        merged[1] = torch.nan
        return merged, lse

    monkeypatch.setattr(lse_merge, "merge", wrong)
    with pytest.raises(typer.Exit):
        alone()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "heads off" in line]
    assert [row[2] for row in rows] == ["nan"] * 4


def test_a_wrong_merge_fails(monkeypatch, capsys):
    alone()
    assert capsys.readouterr().out.count(" ok ") == 4

    def wrong(outputs, lses, *, base):
        merged, lse = densemla.merge(outputs, lses, base=base)
        return merged * 1.05, lse

    monkeypatch.setattr(lse_merge, "merge", wrong)
    with pytest.raises(typer.Exit) as caught:
        alone()
    assert caught.value.exit_code == 1
    assert capsys.readouterr().out.count("heads off") == 4


def test_ranks_that_never_meet(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    with pytest.raises(typer.Exit) as caught:
        alone(timeout=1)
    assert caught.value.exit_code == 1
    assert "MASTER_ADDR" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), [(None, "250"), ("4000", "4000")])
def test_a_lost_rank_is_no_long_wait(before, after, monkeypatch):
    """Under NCCL; read by torch when the group is made."""
    monkeypatch.setenv(DUMP_WAIT, before or "")
    if before is None:
        monkeypatch.delenv(DUMP_WAIT)
    alone()
    assert os.environ[DUMP_WAIT] == after
