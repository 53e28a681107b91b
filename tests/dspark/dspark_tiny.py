"""Small targets and drafts, and draft servers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from densemla.dspark.checkpoint import save_draft
from densemla.dspark.config import DSparkConfig, MLAConfig, RopeConfig
from densemla.dspark.model import DSparkDraft
from densemla.dspark.server import DraftServer
from densemla.dspark.tiny_target import PagedTarget, TinyTarget

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size": 61,
    "max_position_embeddings": 2048,
}
TARGET = MLAConfig(num_hidden_layers=3, **SIZES)
LAYERS = (0, 1, 2)


def draft_config(**changes: object) -> DSparkConfig:
    fields = {
        "num_hidden_layers": 2,
        "target_hidden_size": 48,
        "target_layer_ids": LAYERS,
        "mask_token_id": 60,
        "markov_rank": 8,
        "block_size": 5,
        **SIZES,
        **changes,
    }
    return DSparkConfig(**fields)  # type: ignore[arg-type]


PROMPTS = [[3, 14, 15, 9, 26], [5] * 12, list(range(40))]
NEW_TOKENS = 32

YARN = RopeConfig(factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)


def make_target(seed: int = 0) -> TinyTarget:
    """A target in which the previous token mostly, but not always, decides the next one."""
    torch.manual_seed(seed)
    target = TinyTarget(TARGET, LAYERS)
    with torch.no_grad():
        target.lm_head.weight.normal_(std=0.3)
    return target.requires_grad_(False)


def make_draft(seed: int = 1, **changes: object) -> DSparkDraft:
    """An untrained draft."""
    torch.manual_seed(seed)
    return DSparkDraft(draft_config(**changes)).requires_grad_(False)


def make_good_draft(target: TinyTarget) -> DSparkDraft:
    """A draft whose Markov head knows what the target says after each single token."""
    vocab = TARGET.vocab_size
    draft = make_draft(markov_rank=vocab)
    after, _ = target.forward_dense(torch.arange(vocab).unsqueeze(1))
    assert draft.markov_head is not None
    draft.markov_head.markov_w1.weight.copy_(torch.eye(vocab))
    draft.markov_head.markov_w2.weight.copy_(50 * after[:, 0].T)
    draft.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft


def save_pair(folder: Path, target: TinyTarget, draft: DSparkDraft) -> tuple[Path, Path]:
    target.save(folder / "target")
    save_draft(draft, folder / "draft")
    return folder / "target", folder / "draft"


def paged(target: TinyTarget, batch: int = 8) -> PagedTarget:
    return PagedTarget(target, batch, 512, 256)


@contextmanager
def process(*command: str) -> Iterator[tuple[dict[str, object], subprocess.Popen[str]]]:
    """A Python process that prints a line of JSON when it is ready; ended at the exit, whatever happens."""
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line, f"{command} ended with status {running.wait()}"
        yield json.loads(line), running
    finally:
        running.kill()
        running.wait()
        if running.stdout is not None:
            running.stdout.close()


@contextmanager
def serve_ready(
    target: Path, draft: Path, *options: str, bind: str = "tcp://127.0.0.1:*"
) -> Iterator[tuple[dict[str, object], subprocess.Popen[str]]]:
    """``densemla dspark serve``: what it prints when ready, and the process."""
    command = ("-m", "densemla.dspark.cli", "serve", "--draft", str(draft), "--target", str(target))
    with process(
        *command, "--bind", bind, "--http", "127.0.0.1:0", "--dtype", "fp32", "--threads", "1", "--json", *options
    ) as started:
        yield started


@contextmanager
def running(server: DraftServer) -> Iterator[DraftServer]:
    """A server on a thread of this process."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
