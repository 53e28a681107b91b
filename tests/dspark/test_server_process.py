"""A real server in a process of its own: at work, killed, stopped, restarted, fuzzed, drained."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import dspark_tiny as tiny
import msgspec
import pytest
import torch
import zmq
from dspark_tiny import NEW_TOKENS, PROMPTS

from densemla.dspark.checkpoint import identity, load_config
from densemla.dspark.protocol import (
    Draft,
    Drafted,
    Failed,
    Geometry,
    Hello,
    Item,
    Refused,
    Welcome,
    decode_at_verifier,
    encode,
    geometry_of,
)
from densemla.dspark.remote import DraftRefusedError, DraftRequest, RemoteDraft
from densemla.dspark.speculate import generate
from densemla.dspark.tiny_target import TinyTarget


@pytest.fixture(scope="module")
def geometry(pair):
    return geometry_of(load_config(pair[1]), identity(pair[1]))


@pytest.fixture(scope="module")
def target(pair):
    return TinyTarget.load(pair[0], tiny.LAYERS)


@pytest.fixture(scope="module")
def server(pair):
    """Endpoint, HTTP address and pid of a server that the tests share and leave alive."""
    with tiny.serve_ready(*pair) as (ready, running):
        yield ready["endpoint"], "http://{}:{}".format(*ready["http"]), running.pid


def remote_of(endpoint, geometry, **options):
    return RemoteDraft(endpoint, geometry, **{"timeout": 5.0, "backoff": (0.01, 0.05), **options})


class Eventful:
    """A proposer before whose calls something happens."""

    def __init__(self, remote, events):
        self.remote, self.events = remote, dict(events)
        self.calls, self.slowest = 0, 0.0
        self.request_for, self.finish = remote.request_for, remote.finish

    def propose(self, requests):
        self.calls += 1
        self.events.pop(self.calls, lambda: None)()
        begin = time.monotonic()
        ids = self.remote.propose(requests)
        self.slowest = max(self.slowest, time.monotonic() - begin)
        return ids


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_draft_that_helps(shared_memory, server, geometry, target, plain):
    with remote_of(server[0], geometry, shared_memory=shared_memory) as remote:
        remote.connect()
        assert (remote._link.slab is not None) == shared_memory
        result = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, remote)
    assert result.tokens == plain
    assert result.acceptance_length > 2
    assert set(remote.counters) <= {"calls", "tokens", "marked", "connects"}


def test_the_documented_verifier_decodes_as_plainly(pair, server, target, plain):
    page = (Path(__file__).parents[2] / "docs" / "dspark.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    cache = tiny.paged(target)

    def step(tokens):
        logits, rows = cache.step([0], [tokens])
        return logits[0], rows[0]

    names = {
        "endpoint": server[0],
        "draft_folder": pair[1],
        "prompt": PROMPTS[0],
        "prefill": step,
        "step": step,
        "forget_after": lambda length: cache.truncate(0, length),
    }
    exec(example, names)
    written = names["tokens"][len(PROMPTS[0]) :]
    assert written[:24] == plain[0][:24]
    assert names["draft"].counters["connects"] == 1


def test_killed_in_a_call_and_restarted(pair, geometry, target, plain):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with (
        tiny.serve_ready(*pair, bind=endpoint) as (_, first),
        remote_of(endpoint, geometry, timeout=0.4, hello_timeout=0.4) as remote,
    ):
        remote.connect()
        accepted_before = []

        def kill_in_the_call():
            accepted_before.append(remote.counters["tokens"])
            first.send_signal(signal.SIGSTOP)
            threading.Timer(0.05, first.kill).start()

        eventful = Eventful(remote, {4: kill_in_the_call})
        result = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, eventful)
        assert result.tokens == plain
        assert accepted_before[0] > 0
        assert remote.counters["timeout"] == 1
        assert remote.counters["tokens"] == accepted_before[0]
        assert eventful.slowest < 0.9
        with tiny.serve_ready(*pair, bind=endpoint):
            remote.connect(10.0)
            again = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, remote, first=100)
            assert again.tokens == plain
            assert again.acceptance_length > 2


def test_a_stall_makes_late_replies_and_requests_start_anew_after_it(pair, server, geometry, target, plain):
    endpoint, _, pid = server
    with remote_of(endpoint, geometry, timeout=0.1, hello_timeout=0.2) as remote:
        remote.connect()
        eventful = Eventful(
            remote,
            {3: lambda: os.kill(pid, signal.SIGSTOP), 6: lambda: (os.kill(pid, signal.SIGCONT), time.sleep(0.3))},
        )
        try:
            result = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, eventful)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert result.tokens == plain
    assert remote.counters["timeout"] >= 1
    assert remote.counters["connects"] >= 2
    assert result.accepted > 0
    assert eventful.slowest < 0.6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 62),
        ("checkpoint", "sha256:other"),
        ("hidden_size", 64),
        ("target_hidden_size", 64),
        ("num_context_layers", 5),
        ("block_size", 7),
        ("depth", 3),
    ],
)
def test_the_server_refuses_a_mismatch_by_name(field, value, server, geometry):
    fields = msgspec.structs.asdict(geometry)
    with (
        remote_of(server[0], Geometry(**{**fields, field: value})) as remote,
        pytest.raises(DraftRefusedError, match=field) as caught,
    ):
        remote.connect()
    assert caught.value.field == field


def test_an_unpinned_checkpoint_and_a_wider_verifier_are_fine(server, geometry):
    fields = {**msgspec.structs.asdict(geometry), "checkpoint": "", "depth": 9}
    with remote_of(server[0], Geometry(**fields)) as remote:
        remote.connect()
        rows = torch.zeros(3, geometry.context_width, dtype=torch.bfloat16)
        ids = remote.propose([DraftRequest(1, 0, rows, 7, reset=True)])
    assert ids.shape == (1, 9)
    assert (ids[0, :5] >= 0).all()
    assert (ids[0, 5:] == -1).all()


class Raw:
    """A socket that speaks the protocol by hand."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def send(self, *frames):
        self.socket.send_multipart(frames)

    def receive(self, timeout=5000):
        assert self.socket.poll(timeout), "no reply"
        frames = self.socket.recv_multipart()
        return decode_at_verifier(frames[0]), frames[1:]

    def hello(self, geometry, name=b"n" * 16):
        self.send(encode(Hello(client=name, geometry=geometry)))
        welcome, _ = self.receive()
        assert isinstance(welcome, Welcome)
        return welcome.session


def call(session, *items, sequence=1, finished=(), in_slab=False):
    return encode(
        Draft(session=session, sequence=sequence, items=list(items), finished=list(finished), in_slab=in_slab)
    )


def item(request=0, start=0, rows=0, anchor=1, reset=True):
    return Item(request=request, start=start, rows=rows, anchor=anchor, reset=reset)


def test_another_version_is_told_so(server, geometry):
    with Raw(server[0]) as raw:
        hello = encode(Hello(client=b"n" * 16, geometry=geometry))
        raw.send(b"DMLA\x09" + hello[5:])
        refusal, _ = raw.receive()
        assert isinstance(refusal, Refused)
        assert (refusal.field, refusal.expected, refusal.got) == ("protocol_version", "9", "1")


def test_impossible_calls_are_refused(server, geometry):
    row = bytes(geometry.row_bytes)
    with Raw(server[0]) as raw, Raw(server[0]) as thief:
        session = raw.hello(geometry)
        for frames in (
            (call(session, item(rows=1)),),
            (call(session, item(rows=1)), row, row),
            (call(session, item(rows=2)), row),
            (call(session, item(rows=1)), row[:-1]),
            (call(session, item(rows=-1)),),
            (call(session, item(start=3)),),
            (call(session, item(start=-3, reset=False)),),
            (call(session, item(anchor=geometry.vocab_size)),),
            (call(session, item(anchor=-2)),),
            (call(session, item(), item()),),
            (call(session, *[item(i) for i in range(65)]),),
            (call(session, item(rows=4000), in_slab=True), b""),
            (call(session, *[item(i, rows=4096) for i in range(64)], in_slab=True),),
        ):
            raw.send(*frames)
            answer, _ = raw.receive()
            assert isinstance(answer, (Failed, Drafted)), answer
            if isinstance(answer, Failed):
                assert answer.code == "bad_request"
            else:
                assert b"" in frames
        thief.send(call(session, item()))
        answer, _ = thief.receive()
        assert (answer.code, answer.sequence) == ("unknown_session", 1)
        raw.send(call(session, item(5, start=2, reset=False), sequence=9))
        answer, ids = raw.receive()
        assert (answer.sequence, answer.status) == (9, [1])
        assert ids[0] == b"\xff" * 4 * geometry.depth


def test_ten_thousand_fuzzed_messages(server, geometry, target, plain):
    endpoint, http, pid = server
    rng = random.Random(5)

    def resident() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    with Raw(endpoint) as raw:
        session = raw.hello(geometry, b"f" * 16)
        row = bytes(geometry.row_bytes)
        seeds = [
            [call(session, item(1, rows=2)), row * 2],
            [call(session, item(1, 2, 1, 4, False), item(2)), row],
            [encode(Hello(client=b"f" * 16, geometry=geometry))],
            [call(session, item(3), finished=[1, 2], in_slab=True)],
        ]

        def mutated():
            frames = [bytearray(frame) for frame in rng.choice(seeds)]
            for _ in range(rng.randrange(1, 5)):
                frame = rng.choice(frames)
                kind = rng.randrange(5)
                if kind == 0 and frame:
                    frame[rng.randrange(len(frame))] = rng.randrange(256)
                elif kind == 1:
                    del frame[rng.randrange(len(frame) + 1) :]
                elif kind == 2:
                    frame.insert(rng.randrange(len(frame) + 1), rng.randrange(256))
                elif kind == 3:
                    frames.insert(rng.randrange(len(frames) + 1), bytearray(rng.randbytes(rng.randrange(40))))
                elif len(frames) > 1:
                    frames.remove(frame)
            return [bytes(frame) for frame in frames]

        def burst(count):
            for i in range(count):
                raw.send(*(mutated() if i % 4 else [rng.randbytes(rng.randrange(1, 80))]))
                while raw.socket.poll(0):
                    raw.socket.recv_multipart()
            # A reply to something valid says that all before it has been dealt with.
            raw.send(encode(Hello(client=b"g" * 16, geometry=geometry)))
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                frames = raw.socket.recv_multipart() if raw.socket.poll(1000) else [b""]
                if frames[0][5:].startswith(b"\x97\xa7welcome") and not raw.socket.poll(200):
                    return
            raise AssertionError("the server does not answer any more")

        burst(2000)
        memory, files = resident(), descriptors()
        burst(8000)
        assert resident() - memory < 64 << 20
        assert descriptors() <= files + 2
    with remote_of(endpoint, geometry) as remote:
        remote.connect()
        result = generate(tiny.paged(target), PROMPTS, NEW_TOKENS, remote)
    assert result.tokens == plain
    assert result.acceptance_length > 2
    metrics = urllib.request.urlopen(f"{http}/metrics", timeout=5).read().decode()
    malformed = 'densemla_dspark_rejected_total{cause="malformed"} '
    assert float(metrics.split(malformed)[1].split()[0]) > 5000


def test_health_and_metrics(server, geometry):
    _, http, _ = server
    health = json.load(urllib.request.urlopen(f"{http}/health", timeout=5))
    assert health["status"] == "ok"
    assert health["geometry"] == msgspec.structs.asdict(geometry)
    answer = urllib.request.urlopen(f"{http}/metrics", timeout=5)
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    text = answer.read().decode()
    for name in ("calls_total", "tokens_total", "needs_reset_total", "call_seconds_bucket", "kv_bytes_used"):
        assert f"densemla_dspark_{name}" in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{http}/etc", timeout=5)


def test_sigterm_drains(pair, geometry):
    with tiny.serve_ready(*pair) as (ready, running), Raw(ready["endpoint"]) as raw:
        session = raw.hello(geometry)
        running.send_signal(signal.SIGSTOP)
        for sequence in range(1, 4):
            raw.send(call(session, item(sequence, rows=1), sequence=sequence), bytes(geometry.row_bytes))
        time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        running.send_signal(signal.SIGCONT)
        answers = [raw.receive()[0] for _ in range(3)]
        assert [answer.sequence for answer in answers] == [1, 2, 3]
        assert all(isinstance(answer, Drafted) and answer.status == [0] for answer in answers)
        assert running.wait(10) == 0
