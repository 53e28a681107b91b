"""A rank that dies or stalls under NCCL: the other ends with a clear error, soon after the group's timeout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

TIMEOUT = 8.0
# torch looks the stack of the collective up for at most 8 s, and then waits one more.
SLACK = 15.0

# NCCL refuses two ranks on one GPU of one host: it shall take them for two hosts, which speak through sockets.
APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def start(rank: int, port: int, launch: str, log: Path) -> subprocess.Popen[str]:
    torchrun = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    environment = {**os.environ, **torchrun, **APART, "NCCL_HOSTID": f"host{rank}"}
    environment["TORCH_FR_DUMP_TEMP_FILE"] = str(log.with_suffix(".trace"))
    command = [sys.executable, str(Path(__file__).with_name("nccl_rank.py")), launch, str(TIMEOUT)]
    with log.open("w") as errors:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
@pytest.mark.parametrize(
    ("launch", "end"), [("eager", signal.SIGSTOP), ("graph", signal.SIGSTOP), ("graph", signal.SIGKILL)]
)
def test_the_other_rank_ends(launch: str, end: signal.Signals, tmp_path: Path) -> None:
    # As torchrun's agent does, this process holds the store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(rank, store.port, launch, tmp_path / f"rank{rank}") for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "decoding\n", (tmp_path / "rank0").read_text()
        began = time.monotonic()
        ranks[1].send_signal(end)
        assert ranks[0].wait(TIMEOUT + SLACK) != 0
        seconds = time.monotonic() - began
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    said = (tmp_path / "rank0").read_text()
    reason = "raised the following async exception" if end == signal.SIGKILL else "caught collective operation timeout"
    assert reason in said
    # The stack that led to the collective.
    assert re.search(r"#\d+ (watch|gather_queries|merge) from .*distributed/dcp\.py", said), said
    assert seconds < TIMEOUT + SLACK
