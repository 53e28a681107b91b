"""Shared memory for context rows between a server and a verifier of one host.

A call of 8 requests with 7 rows of a Kimi-K3 target carries 4 MB. Through a socket these bytes are copied
four times; here the verifier writes them once where the server reads them.

The server makes the memory (a sealed ``memfd``: nobody can shrink it under its users, and it is gone
with its last user, whatever way that one ends) and names it by a path under ``/proc``. A verifier that
can't open the path, or does not find its own token there, is on another host or under another user, and
sends frames; so it does where the seal is missing, as a write behind the end would end its process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import sys
from dataclasses import dataclass

TOKEN_BYTES = 64
"""Room at the start for the token by which a verifier recognises its slab; rows begin after it."""

_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


@dataclass(slots=True)
class Slab:
    """Mapped shared memory; ``rows`` is what may hold context rows."""

    path: str
    map: mmap.mmap
    rows: memoryview

    def close(self) -> None:
        """Unmap; waits for nobody. Views that tensors still hold keep the memory alive."""
        try:
            self.rows.release()
            self.map.close()
        except BufferError:
            pass


def supported() -> bool:
    return sys.platform == "linux"


def create(token: bytes, size: int) -> Slab:
    """New shared memory of ``size`` bytes for rows, marked with ``token``."""
    fd = os.memfd_create("densemla-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, TOKEN_BYTES + size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    shared = mmap.mmap(fd, TOKEN_BYTES + size)
    shared[: len(token)] = token
    return _OwnedSlab(f"/proc/{os.getpid()}/fd/{fd}", shared, memoryview(shared)[TOKEN_BYTES:], fd)


@dataclass(slots=True)
class _OwnedSlab(Slab):
    fd: int

    def close(self) -> None:
        os.close(self.fd)
        Slab.close(self)


def attach(path: str, token: bytes, size: int) -> Slab | None:
    """The slab that a server offers; None when it can't be reached from here or is not the one meant."""
    if not supported() or not _PATH.fullmatch(path):
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # The seal first: only what can't shrink any more has a size to rely on. Other files have no seals: OSError.
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fd).st_size != TOKEN_BYTES + size:
            return None
        shared = mmap.mmap(fd, TOKEN_BYTES + size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    if shared[: len(token)] != token:
        shared.close()
        return None
    return Slab(path, shared, memoryview(shared)[TOKEN_BYTES:])
