"""What a call to a draft server costs beyond the drafting: 8 requests x 7 tokens with Kimi-K3's sizes.

A server process with a model that does nothing answers a verifier in this process over loopback. Measured
is the whole of ``RemoteDraft.propose``: encoding, context rows, both sockets, the server's checks, the
reply's checks. A context row is 5 layers x 7168 bf16 = 71 680 bytes; a call carries the rows of the tokens
that were accepted since the last one, 1 to 8 per request.

The floor is a bare ZeroMQ round trip of 300 bytes each way between the same two processes: what the
machine's wake-ups cost before this protocol does anything. Both the whole and the part above it are shown.

Usage: dspark_protocol.py [--json FILE] [--calls N] [--busy-us N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import zmq

from densemla.dspark import KIMI_K3_DSPARK, DraftRequest, RemoteDraft
from densemla.dspark.protocol import Geometry, Item, geometry_of
from densemla.dspark.server import DraftServer

REQUESTS = 8
BAR_US = 200


class NullEngine:
    """Drafts token 1 for everyone, and looks at nothing."""

    max_batch, max_rows = 64, 64

    def __init__(self) -> None:
        self.geometry: Geometry = geometry_of(KIMI_K3_DSPARK, "null")

    def draft(
        self, session: int, items: Sequence[Item], frames: Sequence[memoryview]
    ) -> tuple[torch.Tensor, list[int]]:
        return torch.ones(len(items), self.geometry.depth, dtype=torch.int64), [0] * len(items)

    def forget(self, session: int, requests: Sequence[int] | None = None) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    echo = zmq.Context().socket(zmq.ROUTER)
    port = echo.bind_to_random_port("tcp://127.0.0.1")
    pipe.send(f"tcp://127.0.0.1:{port}")
    while (frames := echo.recv_multipart())[1]:
        echo.send_multipart(frames)
    server = DraftServer(NullEngine(), http=None)
    pipe.send(server.endpoint)
    server.run()


def pause(seconds: float) -> None:
    """The verifier's own step, in which a server may fall asleep."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def summary(took: list[float], calls: int) -> dict[str, float]:
    """Of microseconds per call, the warm-up left out."""
    took = sorted(took[-calls:])
    return {
        "p10_us": took[len(took) // 10],
        "p50_us": statistics.median(took),
        "p99_us": took[len(took) * 99 // 100],
    }


def ping(endpoint: str, calls: int, busy: float) -> dict[str, float]:
    """The floor; ends the echo."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        took = []
        for _ in range(calls + calls // 10):
            pause(busy)
            begin = time.perf_counter()
            socket.send(b"p" * 300)
            socket.recv()
            took.append((time.perf_counter() - begin) * 1e6)
        socket.send(b"")
    return summary(took, calls)


def measure(endpoint: str, shared_memory: bool, rows: int, calls: int, busy: float) -> dict[str, float]:
    """Microseconds per call, over ``calls`` calls after a warm-up."""
    geometry = geometry_of(KIMI_K3_DSPARK, "null")
    states = [torch.randn(rows, geometry.context_width).to(torch.bfloat16) for _ in range(REQUESTS)]
    with RemoteDraft(endpoint, geometry, timeout=1.0, shared_memory=shared_memory) as remote:
        remote.connect()
        if shared_memory and (remote._link is None or remote._link.slab is None):
            raise SystemExit("no shared memory on this platform")
        took = []
        for step in range(calls + calls // 10):
            requests = [DraftRequest(i, step * rows, states[i], 5, reset=step == 0) for i in range(REQUESTS)]
            pause(busy)
            begin = time.perf_counter()
            ids = remote.propose(requests)
            took.append((time.perf_counter() - begin) * 1e6)
            if int(ids.min()) != 1:
                raise SystemExit(f"the call failed: {remote.last_error}")
    return {
        "rows_per_request": rows,
        "bytes": REQUESTS * rows * geometry.row_bytes,
        **summary(took, calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--busy-us", type=float, default=500.0, help="work between two calls")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    results, busy = [], arguments.busy_us / 1e6
    print(f"{REQUESTS} requests x 7 tokens, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    try:
        floor = ping(mine.recv(), arguments.calls, busy)
        print(f"bare ZeroMQ round trip: p10 {floor['p10_us']:.0f}, p50 {floor['p50_us']:.0f} us")
        print("rows go by      rows/request  MB/call     p10     p50      p99  p50 above floor  us")
        endpoint = mine.recv()
        for shared in (True, False):
            for rows in (0, 1, 3, 7):
                figures = measure(endpoint, shared, rows, arguments.calls, busy)
                figures["p50_above_floor_us"] = figures["p50_us"] - floor["p50_us"]
                where = "shared memory" if shared else "tcp frames"
                results.append({"rows_by": where, **figures})
                print(
                    f"{where:<16}{rows:>12}{figures['bytes'] / 1e6:>9.2f}{figures['p10_us']:>8.0f}"
                    f"{figures['p50_us']:>8.0f}{figures['p99_us']:>9.0f}{figures['p50_above_floor_us']:>17.0f}",
                    flush=True,
                )
    finally:
        server.terminate()
        server.join()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"bar_us": BAR_US, "cores": os.cpu_count(), "floor": floor, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
