"""A dense MLA language model of any size, for the demo and the tests: the target that a draft helps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .checkpoint import CONFIG_FILE, SINGLE_FILE, inside, read_json
from .config import MLAConfig, RopeConfig, mla_fields
from .kv_pool import KVPool
from .layers import Attend, DecoderLayer, RMSNorm, attend_cached, attend_dense, softmax_scale
from .paged import PagedAttention


class _Stack(nn.Module):
    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyTarget(nn.Module):
    """Causal, with DeepSeek-V3's tensor names; hands out the outputs of chosen layers.

    Args:
        config: any sizes.
        captured: layers (from 0) whose outputs make a context row.
    """

    def __init__(self, config: MLAConfig, captured: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.captured = tuple(captured)
        self.model = _Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens`` int64 [..., T]: logits [..., T, vocab_size], context rows bf16 [..., T, width]."""
        hidden = self.model.embed_tokens(tokens)
        seen = []
        for i, layer in enumerate(self.model.layers):
            hidden = layer(hidden, positions, attend)
            if i in self.captured:
                seen.append(hidden)
        rows = torch.cat(seen, -1).to(torch.bfloat16) if seen else tokens.to(torch.int32)
        return self.lm_head(self.model.norm(hidden)), rows

    def forward_dense(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole sequences [B, T] at once, causal; differentiable."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = positions.unsqueeze(1) >= positions
        return self.forward(tokens, positions, attend_dense(mask, softmax_scale(self.config)))

    @torch.no_grad()
    def continue_greedily(self, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """Prompts int64 [B, T] with their greedy continuations [B, T + new_tokens], the batch in step."""
        (batch, start), config = prompts.shape, self.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        cache = torch.empty(config.num_hidden_layers, batch, start + new_tokens, width)
        tokens, new, begin = prompts, prompts, 0
        for _ in range(new_tokens):
            positions = torch.arange(begin, tokens.shape[1])
            seen = positions.unsqueeze(1) >= torch.arange(tokens.shape[1])
            logits, _ = self(new, positions, attend_cached(cache, begin, seen, softmax_scale(config)))
            begin, new = tokens.shape[1], logits[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, new), 1)
        return tokens

    def save(self, folder: Path) -> None:
        """Write ``model.safetensors`` and ``config.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}, folder / SINGLE_FILE
        )
        (folder / CONFIG_FILE).write_text(json.dumps(_fields(self.config), indent=2))

    @classmethod
    def load(cls, folder: Path, captured: Sequence[int]) -> TinyTarget:
        """Read what :meth:`save` wrote."""
        target = cls(MLAConfig(**mla_fields(read_json(folder / CONFIG_FILE))), captured)
        target.load_state_dict(load_file(inside(folder, SINGLE_FILE, "the demo's cache")))
        return target.requires_grad_(False)


def _fields(config: MLAConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in MLAConfig.__dataclass_fields__}
    rope: RopeConfig = fields.pop("rope")
    return {**fields, "rope_theta": rope.theta, "rope_interleave": rope.interleave}


class PagedTarget:
    """A :class:`TinyTarget` serving many requests (:class:`densemla.dspark.speculate.Target`).

    Args:
        target: in float32 or bf16, on the CPU.
        max_batch: most requests in a step.
        max_step: most new tokens in a step, prompts included.
        max_tokens: longest request.
    """

    def __init__(self, target: TinyTarget, max_batch: int, max_step: int, max_tokens: int) -> None:
        self.target = target.eval()
        config, page_size = target.config, 64
        dtype = target.lm_head.weight.dtype
        pages = max_batch * -(-max_tokens // page_size)
        row = (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
        self.pool = KVPool(
            pages * page_size * config.num_hidden_layers * row,
            num_layers=config.num_hidden_layers,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            page_size=page_size,
            dtype=dtype,
        )
        self.attention = PagedAttention(config, self.pool, max_batch, max_step)

    @torch.inference_mode()
    def step(
        self, requests: Sequence[int], tokens: Sequence[list[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        entries, starts, counts = [], [], [len(new) for new in tokens]
        for request, count in zip(requests, counts, strict=True):
            entry = self.pool.get(request) or self.pool.reset(request)
            starts.append(entry.tokens)
            entry.tokens += count
            if not self.pool.reserve(request, entry.tokens, keep=requests):
                raise MemoryError(f"request {request} has {entry.tokens} tokens, more than the pool was made for")
            entries.append(entry)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        flat = torch.tensor([token for new in tokens for token in new])
        logits, rows = self.target(flat, positions, self.attention.step(entries, starts, counts, causal=True))
        return list(logits.split(counts)), list(rows.split(counts))

    def truncate(self, request: int, length: int) -> None:
        entry = self.pool.get(request)
        assert entry is not None
        entry.tokens = length

    def finish(self, request: int) -> None:
        self.pool.release(request)
