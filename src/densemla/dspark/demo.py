"""``densemla dspark demo``: a tiny target and its draft, trained here, the draft in a process of its own.

The text is the source code of Python's standard library, byte by byte. The draft learns from the target's
own continuations, which is what it has to predict.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from .checkpoint import identity, load_config, save_draft
from .config import DSparkConfig, MLAConfig, RopeConfig
from .layers import softmax_scale
from .model import DSparkDraft, draft_loss
from .protocol import geometry_of
from .remote import RemoteDraft
from .speculate import Generation, generate
from .tiny_target import PagedTarget, TinyTarget

MASK = 256
"""The token after the 256 bytes."""

_SEQUENCE, _BATCH, _PROMPT = 128, 8, 32
_BLOCKS = 8
"""Anchors per sequence in a training step of the draft."""

_LESSON_STEPS = 6
"""Steps of the draft's training between two batches of the target's continuations."""

_CORPUS_BYTES = 4_000_000

_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 257,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope": RopeConfig(),
}

TARGET = MLAConfig(num_hidden_layers=6, **_SIZES)

DRAFT = DSparkConfig(
    num_hidden_layers=1,
    target_hidden_size=96,
    target_layer_ids=(1, 3, 5),
    mask_token_id=MASK,
    markov_rank=64,
    block_size=7,
    **_SIZES,
)

_VERSION = "1"
"""Part of the cache's name: counts up when sizes or training change."""


class DemoError(RuntimeError):
    """The demo can't go on; the message says why."""


def default_cache() -> Path:
    """``densemla/dspark-demo`` in the user's cache (``XDG_CACHE_HOME``, or ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "densemla" / f"dspark-demo-{_VERSION}"


def corpus() -> torch.Tensor:
    """The standard library's modules, one after another, as uint8 bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    if len(text) < 100_000:
        raise DemoError(f"{folder} holds too few Python sources to train on ({len(text)} bytes)")
    return torch.frombuffer(text, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Budget:
    """When a training ends: by the clock, or after ``steps``."""

    seconds: float
    steps: int | None = None


def _train(
    parameters: list[nn.Parameter],
    budget: Budget,
    rate: float,
    loss_of: Callable[[], torch.Tensor],
    report: Callable[[float, float], None],
) -> None:
    """AdamW with a warm-up and a linear end; ``report(share done, smoothed loss)`` after every step."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    begin, step, smooth, done = time.monotonic(), 0, math.nan, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10, 2.5 * (1 - done))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        smooth = loss.item() if math.isnan(smooth) else 0.9 * smooth + 0.1 * loss.item()
        done = (time.monotonic() - begin) / budget.seconds
        if budget.steps is not None:
            done = max(done, step / budget.steps)
        report(min(done, 1.0), smooth)


def _samples(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(text.numel() - length, (count,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(length)].long()


def train_target(text: torch.Tensor, budget: Budget, report: Callable[[float, float], None]) -> TinyTarget:
    """A byte model of ``text``."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    target = TinyTarget(TARGET, DRAFT.target_layer_ids)
    _initialise(target)

    def loss_of() -> torch.Tensor:
        tokens = _samples(text, _BATCH, _SEQUENCE + 1, generator)
        logits, _ = target.forward_dense(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    _train(list(target.parameters()), budget, 3e-3, loss_of, report)
    return target.requires_grad_(False)


def train_draft(
    target: TinyTarget, text: torch.Tensor, budget: Budget, report: Callable[[float, float], None]
) -> DSparkDraft:
    """A draft for ``target``, taught by the target's greedy continuations of ``text``."""
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    draft = DSparkDraft(DRAFT)
    _initialise(draft)
    draft.embed_tokens.weight, draft.lm_head.weight = target.model.embed_tokens.weight, target.lm_head.weight
    own = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    scale = softmax_scale(DRAFT)
    lessons: list[tuple[torch.Tensor, torch.Tensor]] = []
    uses = itertools.count()

    def loss_of() -> torch.Tensor:
        if next(uses) % _LESSON_STEPS == 0:
            tokens = target.continue_greedily(_samples(text, _BATCH, _PROMPT, generator), _SEQUENCE - _PROMPT)
            with torch.no_grad():
                lessons.append((tokens, target.forward_dense(tokens)[1]))
        tokens, rows = lessons[int(torch.randint(len(lessons), (), generator=generator))]
        size = DRAFT.block_size
        anchors = torch.randint(_PROMPT, _SEQUENCE - size, (_BATCH, _BLOCKS), generator=generator)
        logits = draft.teacher_forced_logits(rows, anchors, tokens, scale)
        after = (anchors.unsqueeze(-1) + 1 + torch.arange(size)).flatten(1)
        return draft_loss(logits, tokens.gather(1, after).view(_BATCH, _BLOCKS, size))

    _train(own, budget, 3e-3, loss_of, report)
    return draft.requires_grad_(False)


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.06)


def trained_pair(
    cache: Path, seconds: float, *, retrain: bool, max_steps: int | None, console: Console
) -> tuple[Path, Path]:
    """Folders of target and draft; trained if ``cache`` does not hold them."""
    # Apart from those that a later demo should find trained.
    home = cache if max_steps is None else cache / f"{max_steps}-steps"
    target_folder, draft_folder = home / "target", home / "draft"
    # The draft is written last: with it, the pair is whole.
    if not retrain and (draft_folder / "config.json").exists():
        return target_folder, draft_folder
    # Before the training, which would be lost.
    home.mkdir(parents=True, exist_ok=True)
    (draft_folder / "config.json").unlink(missing_ok=True)
    text = corpus()
    columns = (BarColumn(), TextColumn("loss {task.fields[loss]:.2f}"), TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:

        def report(name: str) -> Callable[[float, float], None]:
            task = progress.add_task(f"training the {name}", total=1.0, loss=math.nan)
            return lambda done, loss: progress.update(task, completed=done, loss=loss)

        target = train_target(text, Budget(seconds * 0.55, max_steps), report("target"))
        draft = train_draft(target, text, Budget(seconds * 0.45, max_steps), report("draft"))
    target.save(target_folder)
    save_draft(draft, draft_folder)
    return target_folder, draft_folder


@contextmanager
def draft_server(draft: Path, target: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``densemla dspark serve`` as a separate process on a free port: its endpoint and the process."""
    command = [sys.executable, "-m", "densemla.dspark.cli", "serve", "--draft", str(draft), "--target", str(target)]
    command += ["--bind", "tcp://127.0.0.1:*", "--http", "off", "--dtype", "fp32", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise DemoError(f"the draft server ended with status {process.wait()} before it was ready")
        yield json.loads(line)["endpoint"], process
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo measured.

    Attributes:
        equal: drafted and plain greedy decoding gave the same tokens.
        acceptance_length: mean tokens per target step with the draft.
        plain_tokens_per_second: without the draft.
        drafted_tokens_per_second: with it.
        plain_steps: target steps without the draft.
        drafted_steps: with it.
        sample: a piece of generated text.
    """

    equal: bool
    acceptance_length: float
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    plain_steps: int
    drafted_steps: int
    sample: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        table = Table(title="Greedy decoding of a tiny target on the CPU", title_justify="left")
        for name, justify in (("", "left"), ("plain", "right"), ("with the remote draft", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_row("target steps", str(self.plain_steps), str(self.drafted_steps))
        table.add_row("tokens per target step", "1.00", f"{self.acceptance_length:.2f}")
        table.add_row(
            "tokens per second", f"{self.plain_tokens_per_second:.0f}", f"{self.drafted_tokens_per_second:.0f}"
        )
        table.add_row("tokens", "", "equal" if self.equal else "DIFFERENT")
        return table


def run_demo(
    cache: Path,
    seconds: float,
    tokens: int,
    prompts: int,
    *,
    retrain: bool,
    max_steps: int | None,
    console: Console,
) -> Outcome:
    """Train or find the pair, serve the draft, generate both ways, compare.

    Raises:
        DemoError: there is no text to train on, or the server did not start.
    """
    threads = torch.get_num_threads()
    # Products this small gain little from a second thread, and on a busy machine lose a lot by waiting for it.
    torch.set_num_threads(1)
    try:
        target_folder, draft_folder = trained_pair(
            cache, seconds, retrain=retrain, max_steps=max_steps, console=console
        )
        target = TinyTarget.load(target_folder, DRAFT.target_layer_ids)
        geometry = geometry_of(load_config(draft_folder), identity(draft_folder))
        starts = _samples(corpus(), prompts, _PROMPT, torch.Generator().manual_seed(7)).tolist()
        with (
            draft_server(draft_folder, target_folder, "--threads", "1") as (endpoint, _),
            RemoteDraft(endpoint, geometry, timeout=1.0) as remote,
        ):
            remote.connect(30.0)
            plain, plain_time = _timed(target, starts, tokens, None, console)
            drafted, drafted_time = _timed(target, starts, tokens, remote, console)
    finally:
        torch.set_num_threads(threads)
    total = prompts * tokens
    written = bytes(token for token in (*starts[0], *drafted.tokens[0]) if token < MASK)
    return Outcome(
        equal=plain.tokens == drafted.tokens,
        acceptance_length=drafted.acceptance_length,
        plain_tokens_per_second=total / plain_time,
        drafted_tokens_per_second=total / drafted_time,
        plain_steps=plain.target_steps,
        drafted_steps=drafted.target_steps,
        sample=written.decode(errors="replace"),
    )


def _timed(
    target: TinyTarget, prompts: list[list[int]], tokens: int, remote: RemoteDraft | None, console: Console
) -> tuple[Generation, float]:
    """One prompt after another, as a single user sees it."""
    whole, seconds = Generation(), 0.0
    count = TextColumn("{task.completed:.0f}/{task.total:.0f} tokens")
    with Progress(TextColumn("{task.description}"), BarColumn(), count, console=console) as progress:
        name = "decoding plainly" if remote is None else "decoding with the draft"
        task = progress.add_task(name, total=len(prompts) * tokens)
        for number, prompt in enumerate(prompts):
            longest = len(prompt) + tokens + DRAFT.block_size + 1
            paged = PagedTarget(target, 1, longest, longest)
            begin = time.perf_counter()
            one = generate(paged, [prompt], tokens, remote, partial(progress.advance, task), first=number)
            seconds += time.perf_counter() - begin
            # The last step may have gone past the end.
            progress.update(task, completed=(number + 1) * tokens)
            whole = replace(
                whole,
                tokens=[*whole.tokens, *one.tokens],
                target_steps=whole.target_steps + one.target_steps,
                request_steps=whole.request_steps + one.request_steps,
                accepted=whole.accepted + one.accepted,
            )
    return whole, seconds
