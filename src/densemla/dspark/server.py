"""The draft server: one socket, one thread that drafts, and a page for people and Prometheus."""

from __future__ import annotations

import ipaddress
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from ..errors import ContractError
from . import slab
from ._extra import msgspec, prometheus_client, zmq
from .engine import Engine
from .protocol import (
    CLIENT_BYTES,
    PROTOCOL_VERSION,
    Draft,
    Drafted,
    Failed,
    Hello,
    ProtocolError,
    Refused,
    VersionError,
    Welcome,
    check_frames,
    check_items,
    decode_at_server,
    encode,
    mismatch,
)

log = logging.getLogger(__name__)

POLL_MILLISECONDS = 100
"""How long a stop may go unnoticed while nothing arrives."""

QUIET_MILLISECONDS = 500
"""A stopped server ends when it has heard nothing for so long: a call that has reached this host may still be on its
way from the kernel through ZeroMQ's own thread."""

MAX_SESSIONS = 256
"""Verifiers known at once; the one silent for longest is forgotten."""

SLAB_BYTES = 64 << 20
"""Shared memory per verifier on the same host; pages that are never written cost nothing."""


class BindError(ValueError):
    """An address that the server refuses to listen on, or keys that it can't use there."""


@dataclass(frozen=True, slots=True)
class CurveServer:
    """CURVE for a server: its own secret key file, and a folder with the public keys of its verifiers."""

    secret_key_file: Path
    verifiers: Path


def is_loopback(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint can be reached from this host only."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        return True
    if parts.scheme != "tcp" or not parts.hostname:
        return False
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return False


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        return
    port = parts.netloc.rpartition(":")[2]
    # ZeroMQ would take a larger number and listen on what is left of it in 16 bits.
    in_range = port == "*" or (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16)
    if parts.scheme != "tcp" or not in_range:
        raise BindError(
            f"can't bind {endpoint!r}: expected tcp://HOST:PORT, with a port below 65536 or *, or ipc://PATH"
        )


@dataclass(slots=True)
class _Session:
    number: int
    routing_id: bytes
    slab: slab.Slab | None


class _Metrics:
    def __init__(self, engine: Engine) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        counter, prefix = prometheus_client.Counter, "densemla_dspark"
        self.calls = counter(f"{prefix}_calls", "Draft calls carried out", registry=self.registry)
        self.tokens = counter(f"{prefix}_tokens", "Token ids drafted", registry=self.registry)
        self.resets = counter(
            f"{prefix}_needs_reset", "Requests told to start anew (evicted, or a gap)", registry=self.registry
        )
        self.rejected = counter(f"{prefix}_rejected", "Messages not carried out", ["cause"], registry=self.registry)
        self.seconds = prometheus_client.Histogram(
            f"{prefix}_call_seconds",
            "Time from a call's arrival to its reply",
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0),
            registry=self.registry,
        )
        for name in engine.stats():
            gauge = prometheus_client.Gauge(f"{prefix}_{name}", f"{name} of the draft engine", registry=self.registry)
            gauge.set_function(partial(_stat, engine, name))


def _stat(engine: Engine, name: str) -> float:
    return engine.stats()[name]


class DraftServer:
    """Answers verifiers until :meth:`stop`.

    Args:
        engine: drafts.
        endpoint: ZeroMQ address to bind; ``tcp://127.0.0.1:*`` picks a free port. An address that other
            hosts can reach needs ``curve``.
        curve: keys, for other hosts.
        http: host and port of ``/health`` and ``/metrics``; None for none.
        drain_seconds: how long at most a stopped server goes on answering calls; it ends sooner when none comes for
            ``QUIET_MILLISECONDS``.

    Raises:
        BindError: the address is taken, malformed, or reachable from other hosts without CURVE; the secret key
            can't be read; or the folder of the verifiers' keys holds none.
        ContractError: ``drain_seconds`` is negative or NaN.
    """

    def __init__(
        self,
        engine: Engine,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        curve: CurveServer | None = None,
        http: tuple[str, int] | None = ("127.0.0.1", 0),
        drain_seconds: float = 2.0,
    ) -> None:
        _check_endpoint(endpoint)
        if curve is None and not is_loopback(endpoint):
            raise BindError(
                f"{endpoint} can be reached from other hosts: give CURVE keys (densemla dspark keygen), or bind "
                "tcp://127.0.0.1:PORT"
            )
        if curve is not None and not any(curve.verifiers.glob("*.key")):
            raise BindError(
                f"{curve.verifiers} holds no .key file, so no verifier could come in (densemla dspark keygen)"
            )
        if not drain_seconds >= 0:  # NaN neither
            raise ContractError("drain_seconds", "at least 0", drain_seconds)
        self.engine = engine
        self.drain_seconds = drain_seconds
        self._local = is_loopback(endpoint) and slab.supported()
        self._stop = threading.Event()
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._by_number: dict[int, _Session] = {}
        self._next_session = 1
        self.metrics = _Metrics(engine)
        self._http: ThreadingHTTPServer | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._authenticator = _authenticator(self._context, curve)
        try:
            self._bind(endpoint, curve)
            if http is not None:
                self._http = self._serve_http(*http)
        except BindError:
            self.close()
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.http: tuple[str, int] | None = self._http.server_address[:2] if self._http is not None else None  # type: ignore[assignment]

    def _bind(self, endpoint: str, curve: CurveServer | None) -> None:
        socket = self._socket
        # A reply to a verifier that has gone is an error to count, not a message to lose in silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.RCVTIMEO, POLL_MILLISECONDS)
        largest = self.engine.max_rows * self.engine.geometry.row_bytes
        socket.setsockopt(zmq.MAXMSGSIZE, max(largest, 1 << 20))
        if curve is not None:
            try:
                public, secret = zmq.auth.load_certificate(curve.secret_key_file)
            except (OSError, ValueError) as error:
                raise BindError(f"can't read {curve.secret_key_file}: {error}") from error
            if secret is None:
                raise BindError(f"{curve.secret_key_file} holds no secret key: give the file ending in .key_secret")
            socket.curve_publickey, socket.curve_secretkey = public, secret
            socket.curve_server = True
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BindError(f"can't bind {endpoint}: {error}") from error

    def run(self) -> None:
        """Serve on the calling thread until :meth:`stop`, then drain and close."""
        try:
            while not self._stop.is_set():
                self._receive()
            deadline = time.monotonic() + self.drain_seconds
            while (left := deadline - time.monotonic()) > 0:
                self._socket.setsockopt(zmq.RCVTIMEO, int(min(QUIET_MILLISECONDS, 1000 * left)))
                if not self._receive():
                    break
        finally:
            self.close()

    def stop(self) -> None:
        """Ask :meth:`run` to finish; safe from signal handlers and other threads."""
        self._stop.set()

    @property
    def draining(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        """Free the sockets, the HTTP port and all shared memory."""
        for session in list(self._by_number.values()):
            self._end(session)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()

    def _receive(self) -> bool:
        """Deal with the next message; False when none came in time."""
        try:
            # A receive that waits is one system call less than a poll.
            parts = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            return False
        self._handle(parts)
        return True

    def _handle(self, parts: list[zmq.Frame]) -> None:
        arrived = time.perf_counter()
        sender = parts[0].bytes
        if len(parts) < 2:
            self._reject("malformed")
            return
        try:
            message = decode_at_server(parts[1].buffer)
            if isinstance(message, Hello):
                self._reply(sender, self._welcome(sender, message))
                return
            session = self._by_number.get(message.session)
            if session is None or session.routing_id != sender:
                self._fail(sender, message, "unknown_session", "say hello first")
            else:
                self._draft(session, message, [part.buffer for part in parts[2:]])
                self.metrics.seconds.observe(time.perf_counter() - arrived)
        except VersionError as error:
            self._reject("version")
            self._reply(
                sender, Refused(field="protocol_version", expected=str(error.version), got=str(PROTOCOL_VERSION))
            )
        except ProtocolError as error:
            log.info("malformed message: %s", error)
            self._reject("malformed")

    def _welcome(self, sender: bytes, hello: Hello) -> Welcome | Refused:
        if len(hello.client) != CLIENT_BYTES:
            raise ProtocolError(f"a client name of {len(hello.client)} bytes")
        refusal = mismatch(hello.geometry, self.engine.geometry)
        if self.draining:
            refusal = Refused(field="state", expected="serving", got="draining")
        if refusal is not None:
            log.warning("refused a verifier: %s is %s there, %s here", refusal.field, refusal.expected, refusal.got)
            self._reject("refused")
            return refusal
        # A verifier has one session, and so has a connection.
        for old in [s for name, s in self._sessions.items() if name == hello.client or s.routing_id == sender]:
            self._end(old)
        if len(self._sessions) >= MAX_SESSIONS:
            self._end(next(iter(self._sessions.values())))
        memory = slab.create(hello.client, SLAB_BYTES) if self._local else None
        session = _Session(self._next_session, sender, memory)
        self._next_session += 1
        self._sessions[hello.client] = session
        self._by_number[session.number] = session
        return Welcome(
            session=session.number,
            geometry=self.engine.geometry,
            max_batch=self.engine.max_batch,
            max_rows=self.engine.max_rows,
            slab=memory.path if memory is not None else "",
            slab_bytes=SLAB_BYTES if memory is not None else 0,
        )

    def _end(self, session: _Session) -> None:
        self.engine.forget(session.number)
        del self._by_number[session.number]
        client = next(client for client, known in self._sessions.items() if known is session)
        del self._sessions[client]
        if session.slab is not None:
            session.slab.close()

    def _draft(self, session: _Session, call: Draft, frames: list[memoryview]) -> None:
        try:
            check_items(call.items, self.engine.geometry, self.engine.max_batch, self.engine.max_rows)
            if call.in_slab:
                frames = list(self._slab_frames(session, call))
            check_frames(call.items, frames, self.engine.geometry)
        except ProtocolError as error:
            self._fail(session.routing_id, call, "bad_request", str(error))
            return
        try:
            if call.finished:
                self.engine.forget(session.number, call.finished)
            ids, status = self.engine.draft(session.number, call.items, frames)
        except RuntimeError as error:
            # Torch's own (out of memory, a device fault): what was stored of this session is in doubt.
            log.exception("drafting failed")
            self.engine.forget(session.number)
            self._fail(session.routing_id, call, "internal", str(error).split("\n", 1)[0])
            return
        drafted = ids.numpy()
        reply = Drafted(sequence=call.sequence, width=drafted.shape[1], dtype="int32", status=status)
        self._reply(session.routing_id, reply, drafted.astype("<i4").tobytes())
        # The verifier waits for the reply, not for the counting.
        self.metrics.calls.inc()
        self.metrics.tokens.inc(int(np.count_nonzero(drafted >= 0)))
        self.metrics.resets.inc(sum(status))

    def _slab_frames(self, session: _Session, call: Draft) -> Iterator[memoryview]:
        total = sum(item.rows for item in call.items) * self.engine.geometry.row_bytes
        if session.slab is None or total > SLAB_BYTES:
            raise ProtocolError(f"{total} bytes of rows in a slab of {SLAB_BYTES if session.slab else 0}")
        start = 0
        for item in call.items:
            if item.rows:
                end = start + item.rows * self.engine.geometry.row_bytes
                yield session.slab.rows[start:end]
                start = end

    def _fail(self, to: bytes, call: Draft, code: str, message: str) -> None:
        self._reject(code)
        self._reply(to, Failed(sequence=call.sequence, code=code, message=message))

    def _reject(self, cause: str) -> None:
        self.metrics.rejected.labels(cause).inc()

    def _reply(self, to: bytes, message: msgspec.Struct, *frames: bytes) -> None:
        try:
            self._socket.send_multipart([to, encode(message), *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._reject("verifier_gone")

    def health(self) -> dict[str, object]:
        """What ``/health`` says."""
        return {
            "status": "draining" if self.draining else "ok",
            "protocol_version": PROTOCOL_VERSION,
            "endpoint": self.endpoint,
            "geometry": msgspec.structs.asdict(self.engine.geometry),
            "sessions": len(self._by_number),
            **self.engine.stats(),
        }

    def _serve_http(self, host: str, port: int) -> ThreadingHTTPServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/health":
                    code = 503 if server.draining else 200
                    self._send(code, "application/json", json.dumps(server.health()).encode())
                elif self.path == "/metrics":
                    body = prometheus_client.generate_latest(server.metrics.registry)
                    self._send(200, prometheus_client.CONTENT_TYPE_LATEST, body)
                else:
                    self._send(404, "text/plain", b"/health and /metrics\n")

            def _send(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        try:
            listening = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise BindError(f"can't serve HTTP on {host}:{port}: {error}") from error
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return listening


def _authenticator(
    context: zmq.Context[zmq.Socket[bytes]], curve: CurveServer | None
) -> zmq.auth.thread.ThreadAuthenticator | None:
    if curve is None:
        return None
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(curve.verifiers))
    return authenticator
