"""The messages between a verifier and a draft server.

A message is a multipart ZeroMQ message. Its first frame is the four bytes ``DMLA``, one byte of protocol
version, and a msgpack body (:mod:`msgspec` structs, tagged and as arrays). A call's bulk data follows as
raw frames: context rows on the way there (bf16 ``[rows, context_width]``, or int32 token ids for a
token-only draft; one frame per request that brings rows), drafted ids on the way back (``[batch, width]``).
On one host the rows may lie in shared memory instead (:mod:`.slab`). All numbers are little-endian.

The version byte stands outside the body, so that two versions can tell each other apart and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._extra import msgspec
from .config import DSparkConfig

PROTOCOL_VERSION = 1
MAGIC = b"DMLA"
_PREFIX = MAGIC + bytes([PROTOCOL_VERSION])

MAX_HEADER_BYTES = 1 << 20
"""A first frame larger than this is refused unread."""

CLIENT_BYTES = 16
"""Length of the random name that a verifier gives itself."""

OK = 0
NEEDS_RESET = 1
"""The server holds no rows for the request up to where the call's rows start: send all of them, with
``reset``."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What both sides must agree on before a token is drafted.

    Attributes:
        checkpoint: identity of the draft's checkpoint (``densemla.dspark.checkpoint.identity``). A
            verifier that leaves it empty takes any.
        vocab_size: drafted ids are in ``[-1, vocab_size)``.
        hidden_size: width of the shared embedding.
        target_hidden_size: width of one captured target layer.
        num_context_layers: captured layers in a context row; 0 for a token-only draft.
        block_size: tokens that one pass of the draft predicts.
        depth: most tokens in a reply. The server's may be below the verifier's.
    """

    checkpoint: str
    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_context_layers: int
    block_size: int
    depth: int

    @property
    def context_width(self) -> int:
        return self.num_context_layers * self.target_hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a context row: bf16 values, or one int32 token id for a token-only draft."""
        return 2 * self.context_width or 4


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello"):
    """Verifier to server: what it expects. ``client`` is random and stays with the verifier."""

    client: bytes
    geometry: Geometry


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="welcome"):
    """Server to verifier: agreed.

    Attributes:
        session: goes into every call.
        geometry: the server's.
        max_batch: most requests in a call.
        max_rows: most context rows of one request in one call; longer contexts come in several calls
            with anchor -1.
        slab: path of shared memory for rows, or empty.
        slab_bytes: its size.
    """

    session: int
    geometry: Geometry
    max_batch: int
    max_rows: int
    slab: str
    slab_bytes: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="refused"):
    """Server to verifier: not agreed, and on which field."""

    field: str
    expected: str
    got: str


class Item(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request in a call.

    Attributes:
        request: the verifier's number for it.
        start: position of the first row it brings: the context tokens that the server already has.
        rows: context rows it brings, 0 or more.
        anchor: its newest token, at position ``start + rows``; -1 stores the rows and drafts nothing.
        reset: forget what the server has of it; ``start`` is then 0.
    """

    request: int
    start: int
    rows: int
    anchor: int
    reset: bool


class Draft(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="draft"):
    """Verifier to server: store and draft.

    Attributes:
        session: from the welcome.
        sequence: number of the call; its answer carries the same.
        items: the requests, each at most once.
        finished: requests that left; forgotten first.
        in_slab: the rows lie one after another in the slab, and no frames follow.
    """

    session: int
    sequence: int
    items: list[Item]
    finished: list[int]
    in_slab: bool


class Drafted(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="drafted"):
    """Server to verifier, with one more frame: the ids, ``[len(status), width]`` of ``dtype``.

    Attributes:
        sequence: of the call this answers.
        width: ids per request, at most the agreed depth.
        dtype: ``"int32"`` or ``"int64"``.
        status: ``OK`` or ``NEEDS_RESET`` per request, in the call's order.
    """

    sequence: int
    width: int
    dtype: str
    status: list[int]


class Failed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="failed"):
    """Server to verifier: the call was not carried out.

    Attributes:
        sequence: of the call this answers.
        code: ``unknown_session`` (say hello again), ``bad_request`` or ``internal``.
        message: for a person.
    """

    sequence: int
    code: str
    message: str


class ProtocolError(ValueError):
    """A message that does not follow the protocol; never a caller's fault."""


class VersionError(ProtocolError):
    """A message of another protocol version."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"protocol_version: expected {PROTOCOL_VERSION}, got {version}")


_encoder = msgspec.msgpack.Encoder()
_to_server = msgspec.msgpack.Decoder(Hello | Draft)
_to_verifier = msgspec.msgpack.Decoder(Welcome | Refused | Drafted | Failed)


def encode(message: msgspec.Struct) -> bytes:
    """The first frame of a message."""
    return _PREFIX + _encoder.encode(message)


def _body(frame: Any) -> memoryview:
    view = memoryview(frame)
    if len(view) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(view)} bytes, at most {MAX_HEADER_BYTES}")
    if len(view) <= len(_PREFIX) or bytes(view[: len(MAGIC)]) != MAGIC:
        raise ProtocolError("no densemla message")
    if view[len(MAGIC)] != PROTOCOL_VERSION:
        raise VersionError(view[len(MAGIC)])
    return view[len(_PREFIX) :]


def decode_at_server(frame: Any) -> Hello | Draft:
    """The body of a verifier's message, types checked.

    Raises:
        ProtocolError: (:class:`VersionError`) it is not one.
    """
    try:
        message: Hello | Draft = _to_server.decode(_body(frame))
        return message
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def decode_at_verifier(frame: Any) -> Welcome | Refused | Drafted | Failed:
    """The body of a server's message, types checked.

    Raises:
        ProtocolError: (:class:`VersionError`) it is not one.
    """
    try:
        message: Welcome | Refused | Drafted | Failed = _to_verifier.decode(_body(frame))
        return message
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def geometry_of(config: DSparkConfig, checkpoint: str, depth: int | None = None) -> Geometry:
    """The geometry of a draft; ``depth`` None is its block size, and never more."""
    return Geometry(
        checkpoint=checkpoint,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.target_hidden_size,
        num_context_layers=len(config.target_layer_ids),
        block_size=config.block_size,
        depth=config.block_size if depth is None else min(depth, config.block_size),
    )


def mismatch(verifier: Geometry, server: Geometry) -> Refused | None:
    """The first field on which two geometries do not agree, as the message that refuses it."""
    for name in verifier.__struct_fields__:
        expected, got = getattr(verifier, name), getattr(server, name)
        if name == "checkpoint" and not expected:
            continue
        if got > expected if name == "depth" else got != expected:
            wanted = f"at most {expected}" if name == "depth" else str(expected)
            return Refused(field=name, expected=wanted, got=str(got))
    return None


def check_items(items: Sequence[Item], geometry: Geometry, max_batch: int, max_rows: int) -> None:
    """Whether a call's numbers are possible at all.

    Raises:
        ProtocolError: saying which are not.
    """
    if len(items) > max_batch:
        raise ProtocolError(f"{len(items)} requests in a call, at most {max_batch}")
    if len({item.request for item in items}) != len(items):
        raise ProtocolError("a request twice in a call")
    for item in items:
        if item.start < 0 or not 0 <= item.rows <= max_rows or (item.reset and item.start):
            raise ProtocolError(f"request {item.request}: start {item.start}, {item.rows} rows, reset {item.reset}")
        if not -1 <= item.anchor < geometry.vocab_size:
            raise ProtocolError(f"request {item.request}: anchor {item.anchor} outside [-1, {geometry.vocab_size})")


def check_frames(items: Sequence[Item], frames: Sequence[memoryview], geometry: Geometry) -> None:
    """Whether the frames of rows are those that the items announce.

    Raises:
        ProtocolError: a frame is missing, too many, or of another size.
    """
    bringing = [item for item in items if item.rows]
    if len(frames) != len(bringing):
        raise ProtocolError(f"{len(frames)} frames of rows for {len(bringing)} requests that bring some")
    for item, frame in zip(bringing, frames, strict=True):
        if frame.nbytes != item.rows * geometry.row_bytes:
            raise ProtocolError(
                f"request {item.request}: {frame.nbytes} bytes for {item.rows} rows of {geometry.row_bytes}"
            )
