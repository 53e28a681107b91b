"""Tests that start a real vLLM; they run in its own environment (``make test-vllm``) and are skipped elsewhere."""

# ruff: noqa: PLC0415  (vLLM may be missing when this file is loaded)
from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import Reference

_HERE = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if _HERE else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if _HERE:
        # vLLM and what it imports warn a lot; the plugin's own code is tested under "error" elsewhere.
        config.addinivalue_line("filterwarnings", "ignore")


# Read by vLLM when it is imported, here and in its worker processes.
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
# A model this small gains nothing from threads, and loses much when the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from engines import make_reference

    return make_reference(tmp_path_factory.mktemp("deepseek") / "tiny-deepseek-v3")
