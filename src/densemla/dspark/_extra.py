"""The packages of the ``dspark`` extra, imported in one place so that their absence has one message."""

from __future__ import annotations

try:
    import msgspec
    import prometheus_client
    import zmq
    import zmq.auth.thread
except ModuleNotFoundError as error:
    raise ImportError(
        f"remote drafting needs {error.name!r}: pip install '.[dspark]' in a checkout of densemla"
    ) from error

__all__ = ["msgspec", "prometheus_client", "zmq"]
