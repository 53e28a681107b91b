from __future__ import annotations

from pathlib import Path

import dspark_tiny as tiny
import pytest
import torch

from densemla.dspark.speculate import generate
from densemla.dspark.tiny_target import TinyTarget


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a draft that helps it."""
    target = tiny.make_target()
    return tiny.save_pair(tmp_path_factory.mktemp("pair"), target, tiny.make_good_draft(target))


@pytest.fixture(scope="session")
def plain(pair: tuple[Path, Path]) -> list[list[int]]:
    """What plain greedy decoding of the prompts gives."""
    target = TinyTarget.load(pair[0], tiny.LAYERS)
    return generate(tiny.paged(target), tiny.PROMPTS, tiny.NEW_TOKENS).tokens
