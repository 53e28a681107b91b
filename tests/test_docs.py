"""The examples of README and docs run as they are, and what they point to is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from densemla.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def readme_names() -> dict[str, Any]:
    """What README's examples leave behind."""
    names: dict[str, Any] = {}
    examples = blocks("README.md", "python")
    assert len(examples) == 2
    torch.manual_seed(0)
    for example in examples:
        exec(example, names)
    return names


def test_readmes_examples_run() -> None:
    names = readme_names()
    assert names["output"].shape == (2, 96, 512)
    assert names["output"].isfinite().all()
    assert names["lse"].isfinite().all()
    plan = names["plan"]
    for name in ("backend", "num_splits", "chunks_per_split", "single_split_chunks"):
        assert hasattr(plan, name)


def test_a_step_is_saved_decoded_and_checked_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (saving,) = blocks("docs/precision.md", "python")
    exec(saving, readme_names())
    # The last block of the page; the words behind # are for the reader.
    for line in blocks("docs/precision.md", "sh")[-1].splitlines():
        command, *arguments = shlex.split(line, comments=True)
        assert command == "densemla"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert "all 2 queries agree with float64" in result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    files = re.findall(r"`((?:benchmarks|docs|scripts|src|tests)/[\w./-]+)`", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [file for file in files if not (ROOT / file).exists()] == []
