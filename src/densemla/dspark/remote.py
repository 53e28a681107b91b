"""The verifier's side of a draft server: proposals, or -1 in time, whatever the other side does.

:meth:`RemoteDraft.propose` never raises and never takes longer than its timeout. Whatever goes wrong (no
server, a slow one, a reply that is late, damaged, too wide or holds an id outside the vocabulary) ends as
-1 for the whole batch, a counter, and a mark on its requests: they get -1 without a message until they
leave or start anew with ``reset`` and all their context rows. Only ids that have passed every check come
out, so nothing else ever reaches the target's embedding.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ..checks import is_int
from . import slab
from ._extra import zmq
from .protocol import (
    CLIENT_BYTES,
    MAX_HEADER_BYTES,
    NEEDS_RESET,
    OK,
    PROTOCOL_VERSION,
    Draft,
    Drafted,
    Failed,
    Geometry,
    Hello,
    Item,
    ProtocolError,
    Refused,
    VersionError,
    Welcome,
    decode_at_verifier,
    encode,
    mismatch,
)

log = logging.getLogger(__name__)

_Ids = np.ndarray[Any, np.dtype[np.int64]]

_MOST_FRAMES = 8
"""A reply has two; a few more are told apart by their number."""

_DTYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}


class DraftUnreachableError(ConnectionError):
    """No draft server answered :meth:`RemoteDraft.connect` in time."""


class DraftRefusedError(ConnectionError):
    """Verifier and server do not fit together.

    Attributes:
        field: of the :class:`Geometry`, or ``protocol_version``.
        expected: the verifier's value.
        got: the server's.
    """

    def __init__(self, field: str, expected: str, got: str) -> None:
        self.field, self.expected, self.got = field, expected, got
        super().__init__(f"draft server does not fit: {field}: expected {expected}, got {got}")


@dataclass(frozen=True, slots=True)
class CurveVerifier:
    """CURVE for a verifier: its own secret key file, and the server's public one."""

    secret_key_file: Path
    server_public_key_file: Path


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request of a step.

    Attributes:
        request: the caller's number for it, at least 0, never used again for another.
        start: context tokens handed over before; the position of the first new row.
        rows: bf16 [n, context_width] in host memory, the accepted tokens' context rows (int32 [n] token
            ids for a token-only draft); n may be 0.
        anchor: the newest token, at position ``start + n``; -1 hands over rows and asks for nothing.
        reset: start anew: ``start`` is 0 and ``rows`` are all context rows so far.
    """

    request: int
    start: int
    rows: torch.Tensor
    anchor: int
    reset: bool = False


@dataclass(slots=True)
class _Link:
    """A connection: from the hello that was sent, to the session it got."""

    socket: zmq.Socket[bytes]
    deadline: float
    welcome: Welcome | None = None
    slab: slab.Slab | None = None
    space: torch.Tensor | None = None
    """The slab's memory as context rows."""


class _FailedCall(Exception):
    """Ends a call; ``cause`` is the counter."""

    def __init__(self, cause: str, detail: str = "") -> None:
        self.cause = cause
        super().__init__(f"{cause}: {detail}" if detail else cause)


def _milliseconds(seconds: float) -> int:
    """Rounded up, as a wait of 0 would spin."""
    return max(0, math.ceil(seconds * 1000))


def _frames(socket: zmq.Socket[bytes], flags: int = 0) -> list[bytes]:
    """The next message. Of one with a million frames only the first few are read, for reading takes time."""
    frames = [socket.recv(flags)]
    while socket.getsockopt(zmq.RCVMORE):
        if len(frames) == _MOST_FRAMES:
            raise _FailedCall("bad_frame", f"more than {_MOST_FRAMES} frames in a message")
        frames.append(socket.recv(flags))
    return frames


def _take(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The message that a poll has announced."""
    try:
        return _frames(socket, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        raise _FailedCall("bad_frame", str(error)) from error


def _load_keys(curve: CurveVerifier) -> tuple[bytes, bytes, bytes]:
    public, secret = zmq.auth.load_certificate(curve.secret_key_file)
    server, _ = zmq.auth.load_certificate(curve.server_public_key_file)
    if secret is None:
        raise ValueError(f"{curve.secret_key_file} holds no secret key: give the file ending in .key_secret")
    return public, secret, server


class RemoteDraft:
    """A draft behind a socket. Not safe to share between threads.

    Args:
        endpoint: the server's ZeroMQ address.
        geometry: what this verifier expects; see :class:`Geometry`. Proposals are at most ``depth`` wide.
        timeout: most seconds that :meth:`propose` takes.
        hello_timeout: seconds after which an unanswered hello is given up.
        backoff: first and longest pause, in seconds, before connecting again; doubles in between.
        curve: keys, for a server on another host.
        shared_memory: use the server's slab where it can be reached.

    Attributes:
        counters: what happened how often: ``calls``, ``tokens``, ``needs_reset``, ``marked`` (requests
            that got -1 because of an earlier failure), ``connects``, ``stale_reply``, and the causes of
            failure ``no_server``, ``refused``, ``timeout``, ``send_failed``, ``bad_request``,
            ``bad_frame``, ``bad_dtype``, ``bad_width``, ``bad_shape``, ``bad_status``, ``bad_id``,
            ``server_failed``.
        last_error: the latest failure in words.
    """

    def __init__(
        self,
        endpoint: str,
        geometry: Geometry,
        *,
        timeout: float = 0.05,
        hello_timeout: float = 2.0,
        backoff: tuple[float, float] = (0.1, 5.0),
        curve: CurveVerifier | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._keys = None if curve is None else _load_keys(curve)
        self.endpoint = endpoint
        self.geometry = geometry
        self.timeout = timeout
        self.hello_timeout = hello_timeout
        self.backoff = backoff
        self.shared_memory = shared_memory
        self.counters: Counter[str] = Counter()
        self.last_error = ""
        self._client = secrets.token_bytes(CLIENT_BYTES)
        self._context = zmq.Context()
        self._link: _Link | None = None
        self._sequence = 0
        self._marked: set[int] = set()
        self._known: set[int] = set()
        self._finished: list[int] = []
        self._pause = backoff[0]
        self._next_attempt = 0.0
        self._refusal: DraftRefusedError | None = None
        width = geometry.context_width
        self._row_dtype = torch.bfloat16 if width else torch.int32
        self._row_shape = (width,) if width else ()
        try:
            self._link = self._say_hello()
        except _FailedCall as failure:
            self._context.destroy()
            raise ValueError(f"can't use the endpoint {endpoint!r}: {failure}") from failure

    def connect(self, timeout: float = 5.0) -> None:
        """Connect now and say what is wrong, for a start-up; :meth:`propose` connects by itself too.

        Raises:
            DraftRefusedError: the server is of another version, checkpoint or size; names the field.
            DraftUnreachableError: nobody answered within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        self._next_attempt = 0.0
        while not self._ready(max(0.0, deadline - time.monotonic())):
            if self._refusal is not None:
                raise self._refusal
            if time.monotonic() >= deadline:
                raise DraftUnreachableError(
                    f"no draft server answered at {self.endpoint} within {timeout} s ({self.last_error or 'silence'}): "
                    "is `densemla dspark serve` running there?"
                )

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.welcome is not None

    @property
    def max_rows(self) -> int:
        """Most rows of one request in one call (0 while not connected); send longer contexts in parts."""
        return self._link.welcome.max_rows if self._link is not None and self._link.welcome is not None else 0

    def needs_reset(self, request: int) -> bool:
        """Whether the request gets -1 until it starts anew (or never started)."""
        return request in self._marked or request not in self._known

    def request_for(self, request: int, rows: torch.Tensor, sent: int, anchor: int) -> DraftRequest:
        """The next :class:`DraftRequest` of a request whose caller keeps all its context rows.

        Starts anew where that is needed, and hands over at most :attr:`max_rows` rows: a long context goes
        over in several calls, and the anchor with the last of them.

        Args:
            request: its number.
            rows: all context rows so far: every token's but the newest.
            sent: how many of them the latest request for it covered (``start + len(rows)``).
            anchor: the newest token.
        """
        reset = self.needs_reset(request)
        start = 0 if reset else sent
        end = min(rows.shape[0], start + (self.max_rows or rows.shape[0]))
        whole = end == rows.shape[0]
        return DraftRequest(request, start, rows[start:end], anchor if whole else -1, reset)

    def propose(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        """One drafting step.

        Returns:
            int64 [len(requests), depth] in host memory: ids in ``[0, vocab_size)``, then -1. A row of -1
            is a request without a proposal.
        """
        self.counters["calls"] += 1
        # numpy, because its calls on a few numbers take a third of torch's time.
        ids = np.full((len(requests), self.geometry.depth), -1, np.int64)
        asking = [i for i, request in enumerate(requests) if request.reset or not self.needs_reset(request.request)]
        self.counters["marked"] += len(requests) - len(asking)
        if not asking:
            self._ready(0.0)
            return torch.from_numpy(ids)
        batch = [requests[i] for i in asking]
        deadline = time.monotonic() + self.timeout
        try:
            drafted, status = self._call(batch, deadline)
        except _FailedCall as failure:
            self._fail(batch, failure)
            return torch.from_numpy(ids)
        for i, (request, state) in enumerate(zip(batch, status, strict=True)):
            if state == OK:
                self._known.add(request.request)
                self._marked.discard(request.request)
            else:
                self.counters["needs_reset"] += 1
                self._marked.add(request.request)
                drafted[i] = -1
        ids[asking, : drafted.shape[1]] = drafted
        self.counters["tokens"] += int(np.count_nonzero(drafted >= 0))
        return torch.from_numpy(ids)

    def finish(self, requests: Iterable[int]) -> None:
        """Requests that leave: their marks go, and the server forgets them with the next call."""
        for request in requests:
            self._marked.discard(request)
            if request in self._known:
                self._known.discard(request)
                self._finished.append(request)

    def close(self) -> None:
        """Drop the connection; nothing is waited for."""
        self._drop()
        self._context.destroy(linger=0)

    def __enter__(self) -> RemoteDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, batch: Sequence[DraftRequest], failure: _FailedCall) -> None:
        self.counters[failure.cause] += 1
        self.last_error = str(failure)
        log.warning("no proposals from %s: %s", self.endpoint, self.last_error)
        self._marked.update(request.request for request in batch)
        if failure.cause not in ("no_server", "bad_request"):
            self._disconnect()

    def _disconnect(self) -> None:
        """Give the connection up. Every request that the server knew has to start anew with the next one."""
        self._drop()
        self._marked |= self._known
        self._finished.clear()
        self._next_attempt = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self.backoff[1])

    def _drop(self) -> None:
        if self._link is not None:
            # Without linger: what has not been sent yet, and what comes back late, dies with this socket.
            self._link.socket.close(linger=0)
            self._link.space = None
            if self._link.slab is not None:
                self._link.slab.close()
            self._link = None

    # --- connecting ---

    def _ready(self, wait: float) -> bool:
        """Whether calls can be made; takes the next step towards it, waiting ``wait`` seconds at most."""
        deadline = time.monotonic() + wait
        while True:
            now = time.monotonic()
            if self._link is None:
                if now < self._next_attempt:
                    if self._refusal is not None or self._next_attempt >= deadline:
                        return False
                    time.sleep(self._next_attempt - now)
                    continue
                self._refusal = None
            try:
                if self._link is None:
                    self._link = self._say_hello()
                if self._link.welcome is not None:
                    return True
                patience = min(deadline, self._link.deadline) - now
                if not self._link.socket.poll(_milliseconds(patience)):
                    if time.monotonic() < self._link.deadline:
                        return False
                    raise _FailedCall("no_server", f"no answer to hello in {self.hello_timeout} s")
                self._take_welcome(self._link)
            except _FailedCall as failure:
                self.counters[failure.cause] += 1
                self.last_error = str(failure)
                self._disconnect()

    def _say_hello(self) -> _Link:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self._keys
        try:
            socket.connect(self.endpoint)
            socket.send(encode(Hello(client=self._client, geometry=self.geometry)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            socket.close()
            raise _FailedCall("no_server", str(error)) from error
        self.counters["connects"] += 1
        return _Link(socket, time.monotonic() + self.hello_timeout)

    def _take_welcome(self, link: _Link) -> None:
        frames = _take(link.socket)
        try:
            message = decode_at_verifier(frames[0])
        except VersionError as error:
            self._refuse("protocol_version", str(PROTOCOL_VERSION), str(error.version))
        except ProtocolError as error:
            raise _FailedCall("bad_frame", str(error)) from error
        if isinstance(message, Welcome):
            refusal = mismatch(self.geometry, message.geometry)
            if refusal is None:
                if self.shared_memory and message.slab:
                    link.slab = slab.attach(message.slab, self._client, message.slab_bytes)
                whole = 0
                if link.slab is not None:
                    whole = len(link.slab.rows) // self.geometry.row_bytes * self.geometry.row_bytes
                if link.slab is not None and whole:
                    space = torch.frombuffer(link.slab.rows[:whole], dtype=self._row_dtype)
                    link.space = space.view(-1, *self._row_shape)
                link.welcome = message
                self._pause = self.backoff[0]
                return
            message = refusal
        if isinstance(message, Refused):
            self._refuse(message.field, message.expected, message.got)
        raise _FailedCall("bad_frame", f"{type(message).__name__} in answer to hello")

    def _refuse(self, field: str, expected: str, got: str) -> None:
        self._refusal = DraftRefusedError(field, expected, got)
        raise _FailedCall("refused", str(self._refusal))

    # --- calling ---

    def _call(self, batch: Sequence[DraftRequest], deadline: float) -> tuple[_Ids, list[int]]:
        """Send a call and check its answer: int64 ids [batch, width], -1 from the first -1 on, and status."""
        if not self._ready(0.0) or self._link is None or self._link.welcome is None:
            raise _FailedCall("no_server", self.last_error)
        link, welcome = self._link, self._link.welcome
        items = [self._item(request, welcome) for request in batch]
        if len(items) > welcome.max_batch:
            raise _FailedCall("bad_request", f"{len(items)} requests, the server takes {welcome.max_batch}")
        self._sequence += 1
        rows = [request.rows for request, item in zip(batch, items, strict=True) if item.rows]
        self._send(link, items, rows)
        while True:
            frames = self._receive(link, deadline)
            try:
                message = decode_at_verifier(frames[0])
            except ProtocolError as error:
                raise _FailedCall("bad_frame", str(error)) from error
            if isinstance(message, Failed) and message.sequence == self._sequence:
                raise _FailedCall("server_failed", f"{message.code}: {message.message}")
            if not isinstance(message, (Drafted, Failed)):
                raise _FailedCall("bad_frame", f"{type(message).__name__} in answer to a call")
            if message.sequence == self._sequence and isinstance(message, Drafted):
                return self._checked(message, frames[1:], len(items)), message.status
            self.counters["stale_reply"] += 1

    def _item(self, request: DraftRequest, welcome: Welcome) -> Item:
        for name, value, low, high in (
            ("request", request.request, 0, (1 << 63) - 1),
            ("start", request.start, 0, (1 << 31) - 1),
            ("anchor", request.anchor, -1, self.geometry.vocab_size - 1),
        ):
            if not is_int(value, low, high):
                raise _FailedCall(
                    "bad_request", f"{name} of request {request.request!r}: {value!r}, no int in [{low}, {high}]"
                )
        if not isinstance(request.reset, bool):
            raise _FailedCall("bad_request", f"reset of request {request.request}: {request.reset!r}, no bool")
        rows = request.rows
        plain = isinstance(rows, torch.Tensor) and rows.layout is torch.strided and rows.is_cpu and not rows.is_neg()
        if not plain or rows.dtype is not self._row_dtype or not rows.dim() or rows.shape[1:] != self._row_shape:
            came = f"{rows.dtype} {list(rows.shape)} on {rows.device}" if plain else type(rows).__name__
            raise _FailedCall(
                "bad_request",
                f"rows of request {request.request}: {came}, not {self._row_dtype} {['n', *self._row_shape]} in "
                "plain CPU memory",
            )
        if rows.shape[0] > welcome.max_rows:
            raise _FailedCall(
                "bad_request",
                f"request {request.request}: {rows.shape[0]} rows, the server takes {welcome.max_rows}",
            )
        return Item(
            request=request.request,
            start=request.start,
            rows=rows.shape[0],
            anchor=request.anchor,
            reset=request.reset,
        )

    def _send(self, link: _Link, items: list[Item], rows: list[torch.Tensor]) -> None:
        assert link.welcome is not None
        total = sum(item.rows for item in items)
        in_slab = link.space is not None and total <= len(link.space)
        call = Draft(
            session=link.welcome.session,
            sequence=self._sequence,
            items=items,
            finished=self._finished,
            in_slab=in_slab,
        )
        head = encode(call)
        try:
            if in_slab or not rows:
                if rows and link.space is not None:
                    torch.cat(rows, out=link.space[:total])
                link.socket.send(head, zmq.NOBLOCK)
            else:
                link.socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
                for i, row in enumerate(rows):
                    more = zmq.SNDMORE if i < len(rows) - 1 else 0
                    data = row.contiguous().view(torch.uint8).numpy().data
                    link.socket.send(data, zmq.NOBLOCK | more, copy=False)
        except zmq.ZMQError as error:
            raise _FailedCall("send_failed", str(error)) from error
        self._finished = []

    def _receive(self, link: _Link, deadline: float) -> list[bytes]:
        left = deadline - time.monotonic()
        # Judged by the clock first: a server that floods us with stale replies must not hold us up.
        if left <= 0:
            raise _FailedCall("timeout", f"no reply in {self.timeout} s")
        # A receive that waits is one system call less than a poll.
        link.socket.setsockopt(zmq.RCVTIMEO, _milliseconds(left))
        try:
            return _frames(link.socket)
        except zmq.Again as error:
            raise _FailedCall("timeout", f"no reply in {self.timeout} s") from error
        except zmq.ZMQError as error:
            raise _FailedCall("bad_frame", str(error)) from error

    def _checked(self, reply: Drafted, frames: list[bytes], batch: int) -> _Ids:
        """The ids of a reply, after every check there is."""
        dtype = _DTYPES.get(reply.dtype)
        if dtype is None:
            raise _FailedCall("bad_dtype", reply.dtype)
        if not 0 <= reply.width <= self.geometry.depth:
            raise _FailedCall("bad_width", f"{reply.width}, at most {self.geometry.depth}")
        if len(reply.status) != batch or any(status not in (OK, NEEDS_RESET) for status in reply.status):
            raise _FailedCall("bad_status", f"{reply.status} for {batch} requests")
        if len(frames) != 1 or len(frames[0]) != batch * reply.width * dtype.itemsize:
            sizes = [len(frame) for frame in frames]
            raise _FailedCall("bad_shape", f"frames of {sizes} bytes for {batch} x {reply.width} {reply.dtype}")
        ids: _Ids = np.frombuffer(frames[0], dtype).astype(np.int64).reshape(batch, reply.width)
        if not ids.size:
            return ids
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= self.geometry.vocab_size:
            raise _FailedCall("bad_id", f"{low if low < -1 else high} outside [-1, {self.geometry.vocab_size})")
        if low < 0:
            ids[np.logical_or.accumulate(ids < 0, axis=1)] = -1
        return ids
