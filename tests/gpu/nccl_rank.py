"""One of two NCCL ranks that share a GPU: decodes, eagerly or from a graph, until something stops it."""

from __future__ import annotations

import sys

import torch

import densemla
from densemla.distributed import DcpDecoder
from densemla.distributed.check import bind_step, captured_graph, join
from densemla.inputs import random_step


def main(launch: str, timeout: float) -> None:
    device = join("nccl", timeout)
    caps = densemla.Caps(device=device, num_q_heads=24, max_total_q=4, max_batch=2, max_cache_tokens=600)
    step = random_step(caps, [500, 30], queries=[2, 2])
    decoder = DcpDecoder(densemla.plan(caps))
    binding = bind_step(decoder, step)
    decoder.compile(binding)

    def decode() -> None:
        decoder.run(binding)

    replay = captured_graph(decode) if launch == "graph" else None
    started = False
    while True:
        if replay is None:
            decode()
        else:
            replay()
            decoder.watch()
        torch.cuda.synchronize()
        if not started:
            print("decoding", flush=True)
        started = True


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
