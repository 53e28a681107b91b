"""What every test starts from."""

from __future__ import annotations

import pytest

from densemla.options import PARTIAL_DTYPE_ENV, SINGLE_SPLIT_CHUNKS_ENV


@pytest.fixture(autouse=True)
def _default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of whoever runs the tests are not those of the tests."""
    for name in (PARTIAL_DTYPE_ENV, SINGLE_SPLIT_CHUNKS_ENV):
        monkeypatch.delenv(name, raising=False)
