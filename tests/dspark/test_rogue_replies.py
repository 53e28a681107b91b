"""Whatever a server answers, the tokens are those of plain greedy decoding, in time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import dspark_tiny as tiny
import msgspec
import numpy as np
import pytest
import torch
import zmq
from dspark_tiny import NEW_TOKENS, PROMPTS

from densemla.dspark import slab
from densemla.dspark.checkpoint import identity, load_config
from densemla.dspark.protocol import CLIENT_BYTES, Drafted, encode, geometry_of
from densemla.dspark.remote import DraftRefusedError, DraftRequest, DraftUnreachableError, RemoteDraft
from densemla.dspark.speculate import generate
from densemla.dspark.tiny_target import TinyTarget

TIMEOUT = 0.06
SLACK = 0.5
"""What a loaded machine may add to a wait."""

FAULTS = {
    "minus_two": "bad_id",
    "vocab_size": "bad_id",
    "padded_head": "bad_id",
    "two_to_31": "bad_id",
    "one_bad": "bad_id",
    "too_wide": "bad_width",
    "negative_width": "bad_width",
    "short_frame": "bad_shape",
    "no_frame": "bad_shape",
    "extra_frame": "bad_shape",
    "float_ids": "bad_dtype",
    "status_count": "bad_status",
    "status_value": "bad_status",
    "truncated_head": "bad_frame",
    "garbage": "bad_frame",
    "empty": "bad_frame",
    "stale": "stale_reply",
    "late": "timeout",
    "silent": "timeout",
    "flood": "timeout",
    "failed": "server_failed",
    "welcome_again": "bad_frame",
    "refused_again": "bad_frame",
    "other_version": "bad_frame",
    "fuzzed": "",
    "huge": "timeout",
    "many_frames": "bad_frame",
    "hello_frames": "bad_frame",
    "hello_silent": "no_server",
    "hello_garbage": "bad_frame",
    "hello_version": "refused",
    "hello_vocabulary": "refused",
    "hello_refused": "refused",
}
HARMLESS = ["narrow", "no_width", "minus_one", "slab_nowhere", "slab_elsewhere", "slab_short"]


class Timed:
    """A proposer that notes how long the slowest call took, and what came out."""

    def __init__(self, remote: RemoteDraft, vocab_size: int) -> None:
        self.remote = remote
        self.vocab_size = vocab_size
        self.slowest = 0.0
        self.request_for = remote.request_for
        self.finish = remote.finish

    def propose(self, requests):
        begin = time.monotonic()
        ids = self.remote.propose(requests)
        self.slowest = max(self.slowest, time.monotonic() - begin)
        assert ids.dtype is torch.int64
        assert tuple(ids.shape) == (len(requests), self.remote.geometry.depth)
        assert -1 <= int(ids.min()) <= int(ids.max()) < self.vocab_size
        return ids


@pytest.fixture(scope="module")
def geometry(pair):
    return geometry_of(load_config(pair[1]), identity(pair[1]))


@pytest.fixture(scope="module")
def rogue(geometry):
    script = str(Path(__file__).with_name("rogue_server.py"))
    with tiny.process(script, json.dumps(msgspec.structs.asdict(geometry))) as (ports, _):
        yield ports


@pytest.fixture(scope="module")
def target(pair):
    return TinyTarget.load(pair[0], tiny.LAYERS)


def run(endpoint, geometry, target, timeout=TIMEOUT):
    backoff = (0.005, 0.02)
    with RemoteDraft(endpoint, geometry, timeout=timeout, hello_timeout=0.1, backoff=backoff) as remote:
        try:
            remote.connect(0.3)
        except (DraftRefusedError, DraftUnreachableError):
            assert not remote.connected
        timed = Timed(remote, geometry.vocab_size)
        result = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, timed)
    assert timed.slowest < timeout + SLACK
    return result, remote


@pytest.mark.parametrize(("fault", "cause"), FAULTS.items(), ids=FAULTS)
def test_a_fault_costs_the_proposals_and_nothing_else(fault, cause, rogue, geometry, target, plain):
    # Slow faults are limited by the backoff between two tries; nothing else in the loop waits.
    result, remote = run(rogue[fault], geometry, target)
    assert result.tokens == plain
    assert cause == "" or remote.counters[cause] > 0, remote.counters
    if fault != "fuzzed":
        assert remote.counters["tokens"] == 0


@pytest.mark.parametrize("variant", HARMLESS)
def test_a_normal_variant_is_no_fault(variant, rogue, geometry, target, plain):
    result, remote = run(rogue[variant], geometry, target, timeout=5.0)
    assert result.tokens == plain
    failures = set(remote.counters) - {"calls", "tokens", "marked", "connects"}
    assert not failures, remote.counters
    assert (remote.counters["tokens"] > 0) == (variant != "no_width")


def test_ids_after_minus_one_are_dropped(rogue, geometry):
    with RemoteDraft(rogue["minus_one"], geometry, timeout=1.0) as remote:
        remote.connect()
        rows = torch.zeros(2, geometry.context_width, dtype=torch.bfloat16)
        ids = remote.propose([DraftRequest(0, 0, rows, 5, reset=True)])
    assert ids.tolist() == [[2, -1, -1, -1, -1]]


def test_a_refusal_names_the_field(rogue, geometry):
    for name, field in (
        ("hello_vocabulary", "vocab_size"),
        ("hello_version", "protocol_version"),
        ("hello_refused", "block_size"),
    ):
        with RemoteDraft(rogue[name], geometry) as remote, pytest.raises(DraftRefusedError, match=field) as caught:
            remote.connect()
        assert caught.value.field == field


class Chatterbox:
    """A socket on which a stale reply is always waiting."""

    def __init__(self, real):
        self.real = real
        self.until = time.monotonic() + 2.0
        self.setsockopt = self.send = lambda *_, **__: None

    def recv(self, *_):
        assert time.monotonic() < self.until, "propose reads on and on"
        return encode(Drafted(sequence=0, width=0, dtype="int32", status=[]))

    def getsockopt(self, option):
        assert option == zmq.RCVMORE
        return 0

    def close(self, linger):
        self.real.close(linger=linger)


def test_stale_replies_without_end_do_not_hold_a_call_up(rogue, geometry):
    with RemoteDraft(rogue["narrow"], geometry, timeout=0.05) as remote:
        remote.connect()
        remote._link.socket = Chatterbox(remote._link.socket)
        rows = torch.zeros(1, geometry.context_width, dtype=torch.bfloat16)
        assert remote.propose([DraftRequest(0, 0, rows, 5, reset=True)]).eq(-1).all()
        assert remote.counters["timeout"] == 1
        assert remote.counters["stale_reply"] > 10


def test_memory_that_its_server_can_take_back_is_not_used(tmp_path):
    """A write behind the end of a file that was cut is no exception but the end of the process."""
    token = b"t" * CLIENT_BYTES
    with contextlib.closing(slab.create(token, 4096)) as memory:
        sealed = slab.attach(memory.path, token, 4096)
        assert sealed is not None
        sealed.close()
        for odd in ((memory.path, token, 4095), (memory.path, b"u" * CLIENT_BYTES, 4096)):
            assert slab.attach(*odd) is None
    fds = [os.memfd_create("rows", os.MFD_ALLOW_SEALING), os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)]
    for fd in fds:
        os.ftruncate(fd, slab.TOKEN_BYTES + 4096)
        os.pwrite(fd, token, 0)
        assert slab.attach(f"/proc/{os.getpid()}/fd/{fd}", token, 4096) is None
        os.close(fd)


def test_nobody_there(geometry):
    with RemoteDraft("tcp://127.0.0.1:9", geometry, hello_timeout=0.05) as remote:
        with pytest.raises(DraftUnreachableError, match="densemla dspark serve"):
            remote.connect(0.2)
        rows = torch.zeros(1, geometry.context_width, dtype=torch.bfloat16)
        assert remote.propose([DraftRequest(0, 0, rows, 5, reset=True)]).eq(-1).all()
        assert remote.needs_reset(0)


def test_a_malformed_address_is_the_callers_error(geometry):
    with pytest.raises(ValueError, match="carrier-pigeon"):
        RemoteDraft("carrier-pigeon://loft", geometry)


def test_a_callers_mistake_is_counted_not_raised(rogue, geometry):
    width = geometry.context_width
    good = torch.zeros(1, width, dtype=torch.bfloat16)
    bad = [
        DraftRequest(0, 0, good.float(), 5, reset=True),
        DraftRequest(0, 0, good[:, 1:], 5, reset=True),
        DraftRequest(0, 0, good[0], 5, reset=True),
        DraftRequest(0, 0, good, geometry.vocab_size, reset=True),
        DraftRequest(0, 0, good, -2, reset=True),
        DraftRequest(-1, 0, good, 5, reset=True),
        DraftRequest(2**63, 0, good, 5, reset=True),
        DraftRequest(0, 0, torch.zeros(5000, width, dtype=torch.bfloat16), 5, reset=True),
        DraftRequest(0, 0, None, 5, reset=True),
        DraftRequest(0, 0, good.tolist(), 5, reset=True),
        DraftRequest(0, 0, good.to_sparse(), 5, reset=True),
        DraftRequest(0, 0, torch._neg_view(good), 5, reset=True),
        DraftRequest(0, 0, good, np.int64(5), reset=True),
        DraftRequest(0, 0, good, None, reset=True),
        DraftRequest(0, 0, good, True, reset=True),
        DraftRequest(0, np.int64(0), good, 5, reset=True),
        DraftRequest(np.int64(0), 0, good, 5, reset=True),
        DraftRequest("0", 0, good, 5, reset=True),
        DraftRequest(0, 0, good, 5, reset=np.bool_(True)),
    ]
    with RemoteDraft(rogue["narrow"], geometry, timeout=1.0) as remote:
        remote.connect()
        for i, request in enumerate(bad, 1):
            assert remote.propose([request]).eq(-1).all()
            assert remote.counters["bad_request"] == i, request
        assert remote.propose([DraftRequest(0, 0, good, 5, reset=True)]).tolist() == [[1, 1, -1, -1, -1]]
        assert remote.propose([]).shape == (0, geometry.depth)


def test_a_request_resumes_only_after_a_reset_and_marks_end_with_it(rogue, geometry):
    rows = torch.zeros(1, geometry.context_width, dtype=torch.bfloat16)
    with RemoteDraft(rogue["silent"], geometry, timeout=0.02, backoff=(0.001, 0.001)) as remote:
        remote.connect()
        assert remote.needs_reset(4)
        remote.propose([DraftRequest(4, 0, rows, 5, reset=True)])
        assert remote.counters["timeout"] == 1
        remote.connect()
        remote.propose([DraftRequest(4, 1, rows, 5)])
        assert (remote.counters["timeout"], remote.counters["marked"]) == (1, 1)
        remote.propose([DraftRequest(4, 0, rows, 5, reset=True)])
        assert remote.counters["timeout"] == 2
        remote.finish([4])
        assert not remote._marked


def test_a_known_request_whose_call_failed_here_has_a_gap(rogue, geometry):
    rows = torch.zeros(1, geometry.context_width, dtype=torch.bfloat16)
    with RemoteDraft(rogue["narrow"], geometry, timeout=1.0) as remote:
        remote.connect()
        remote.propose([DraftRequest(4, 0, rows, 5, reset=True)])
        assert not remote.needs_reset(4)
        remote.propose([DraftRequest(4, 1, rows.float(), 5)])
        assert remote.needs_reset(4)
        assert remote.propose([DraftRequest(4, 2, rows, 5)]).eq(-1).all()
        assert remote.propose([DraftRequest(4, 0, rows, 5, reset=True)])[0, 0] == 1


def test_connections_leak_no_descriptors(rogue, geometry, target):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    run(rogue["garbage"], geometry, target)
    before = descriptors()
    _, remote = run(rogue["garbage"], geometry, target)
    assert remote.counters["connects"] > 3
    assert descriptors() <= before
