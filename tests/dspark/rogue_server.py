"""A draft server that breaks every rule, each on a port of its own. Prints the ports as JSON.

Usage: rogue_server.py GEOMETRY_JSON
"""

from __future__ import annotations

import json
import random
import struct
import sys
import time

import zmq

from densemla.dspark import slab
from densemla.dspark.protocol import (
    Draft,
    Drafted,
    Failed,
    Geometry,
    Hello,
    Refused,
    Welcome,
    decode_at_server,
    encode,
)

GEOMETRY = Geometry(**json.loads(sys.argv[1]))
V, DEPTH = GEOMETRY.vocab_size, GEOMETRY.depth


def welcome(**changes):
    fields = {"session": 1, "geometry": GEOMETRY, "max_batch": 64, "max_rows": 4096, "slab": "", "slab_bytes": 0}
    return [encode(Welcome(**{**fields, **changes}))]


def other_geometry(**changes):
    return Geometry(**{**{name: getattr(GEOMETRY, name) for name in GEOMETRY.__struct_fields__}, **changes})


def drafted(call, ids=1, width=DEPTH, dtype="int32", code="i", status=None, sequence=None, size=None):
    batch = len(call.items)
    head = Drafted(
        sequence=call.sequence if sequence is None else sequence,
        width=width,
        dtype=dtype,
        status=[0] * batch if status is None else status,
    )
    count = batch * width if size is None else size
    return [encode(head), struct.pack(f"<{count}{code}", *[ids] * count)]


held: list[list[bytes]] = []
rng = random.Random(11)


def late(call):
    """Holds every reply back until the next call, with ids that would all be wrong."""
    previous = held.pop() if held else None
    held.append(drafted(call, ids=7))
    return previous


def fuzzed(call):
    frames = [bytearray(frame) for frame in drafted(call, ids=V)]
    for _ in range(rng.randrange(1, 6)):
        frame = rng.choice(frames)
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    frame = rng.choice(frames)
    del frame[rng.randrange(1, len(frame) + 1) :]
    return [bytes(frame) for frame in frames]


def one_bad(call):
    """One id of the last request is outside, all others are fine."""
    head, ids = drafted(call, ids=1)
    return [head, ids[:-4] + struct.pack("<i", V)]


def some_minus_one(call):
    """-1 ends a proposal, whatever follows it."""
    batch = len(call.items)
    row = [2, -1] + [3] * (DEPTH - 2)
    head, _ = drafted(call)
    return [head, struct.pack(f"<{batch * DEPTH}i", *row * batch)]


CALLS = {
    "minus_two": lambda call: drafted(call, ids=-2),
    "vocab_size": lambda call: drafted(call, ids=V),
    "padded_head": lambda call: drafted(call, ids=V + 3),
    "two_to_31": lambda call: drafted(call, ids=2**31, dtype="int64", code="q"),
    "one_bad": one_bad,
    "too_wide": lambda call: drafted(call, width=DEPTH + 1),
    "negative_width": lambda call: drafted(call, width=-1, size=0),
    "narrow": lambda call: drafted(call, width=2),
    "no_width": lambda call: drafted(call, width=0),
    "minus_one": some_minus_one,
    "short_frame": lambda call: drafted(call, size=1),
    "no_frame": lambda call: drafted(call)[:1],
    "extra_frame": lambda call: [*drafted(call), b"more"],
    "float_ids": lambda call: drafted(call, dtype="float32"),
    "status_count": lambda call: drafted(call, status=[0]),
    "status_value": lambda call: drafted(call, status=[5] * len(call.items)),
    "truncated_head": lambda call: [frame[: len(frame) // 2] for frame in drafted(call)],
    "garbage": lambda call: [b"\x00" * 40],
    "empty": lambda call: [b""],
    "stale": lambda call: drafted(call, ids=7, sequence=call.sequence - 1),
    "late": late,
    "silent": lambda call: None,
    "failed": lambda call: [encode(Failed(sequence=call.sequence, code="internal", message="out of order"))],
    "welcome_again": lambda call: welcome(),
    "refused_again": lambda call: [encode(Refused(field="mood", expected="good", got="bad"))],
    "other_version": lambda call: [b"DMLA\x02" + drafted(call)[0][5:]],
    "fuzzed": fuzzed,
    "huge": lambda call: [*drafted(call)[:1], bytes(4 << 20)],
    "many_frames": lambda call: [*drafted(call), *[b""] * 9],
}
HELLOS = {
    "hello_silent": lambda: None,
    "hello_garbage": lambda: [b"nonsense"],
    "hello_version": lambda: [b"DMLA\x07" + welcome()[0][5:]],
    "hello_vocabulary": lambda: welcome(geometry=other_geometry(vocab_size=V + 1)),
    "hello_refused": lambda: [encode(Refused(field="block_size", expected="5", got="6"))],
    "hello_frames": lambda: [*welcome(), *[b""] * 9],
    "slab_nowhere": lambda: welcome(slab="/proc/1/fd/999999", slab_bytes=1 << 20),
    "slab_elsewhere": lambda: welcome(slab="/etc/passwd", slab_bytes=1 << 20),
}


def slab_of_less_than_a_row(hello):
    memory = slab.create(hello.client, 2)
    return welcome(slab=memory.path, slab_bytes=2)


def main():
    context = zmq.Context()
    names, ports = {}, {}
    poller = zmq.Poller()
    for name in [*CALLS, *HELLOS, "flood", "slab_short"]:
        socket = context.socket(zmq.ROUTER)
        ports[name] = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        names[socket] = name
        poller.register(socket, zmq.POLLIN)
    print(json.dumps(ports), flush=True)
    while True:
        for socket, _ in poller.poll():
            name = names[socket]
            sender, head, *_ = socket.recv_multipart()
            message = decode_at_server(head)
            if isinstance(message, Hello):
                reply = HELLOS[name]() if name in HELLOS else welcome()
                if name == "slab_short":
                    reply = slab_of_less_than_a_row(message)
            elif name == "flood":
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    socket.send_multipart([sender, *drafted(message, ids=7, sequence=message.sequence - 1)])
                continue
            else:
                assert isinstance(message, Draft)
                reply = CALLS.get(name, drafted)(message)
            if reply is not None:
                socket.send_multipart([sender, *reply])


if __name__ == "__main__":
    main()
