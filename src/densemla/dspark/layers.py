"""Dense MLA decoder layers of the DeepSeek-V3 kind, written in the latent space throughout.

The key half of ``kv_b_proj`` is folded into the query and the value half is applied to the attention's
output, so training (dense, with a mask) and serving (paged, over densemla's decode) are one function of
the same latent rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .config import MLAConfig, RopeConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, q [..., T, heads, kv_lora_rank + rope], latent [..., T, kv_lora_rank], rope [..., T, rope]) ->
[..., T, heads, >= kv_lora_rank]``: stores the rows where it keeps them, then attends."""


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Rotary:
    """Cosines and sines of positions, with DeepSeek's YaRN where the config asks for it."""

    def __init__(self, config: RopeConfig, width: int) -> None:
        self.interleave = config.interleave
        # Not on the default device: a model may be built on "meta".
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
        turns = config.theta**-exponents
        if config.factor > 1:
            low = max(math.floor(_correction_dim(config, config.beta_fast, width)), 0)
            high = min(math.ceil(_correction_dim(config, config.beta_slow, width)), width - 1)
            places = torch.arange(width // 2, dtype=torch.float64, device="cpu")
            ramp = ((places - low) / max(high - low, 1e-3)).clamp(0, 1)
            turns = turns * (1 - ramp) + turns / config.factor * ramp
        self.turns = turns.float()
        self.scale = yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``positions`` int64 [...] to cosine and sine, float32 [..., width / 2]."""
        self.turns = self.turns.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self.turns
        return angles.cos() * self.scale, angles.sin() * self.scale

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the last dimension of ``x``; ``cos`` and ``sin`` broadcast against half of it."""
        if self.interleave:
            first, second = x[..., 0::2].float(), x[..., 1::2].float()
        else:
            first, second = x.float().chunk(2, -1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return (torch.stack(turned, -1).flatten(-2) if self.interleave else torch.cat(turned, -1)).to(x.dtype)


def yarn_mscale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1`` (YaRN's attention temperature, as DeepSeek-V3 applies it)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 and mscale else 1.0


def _correction_dim(config: RopeConfig, turns: float, width: int) -> float:
    """The (fractional) frequency index that makes ``turns`` turns over the original context."""
    original = config.original_max_position_embeddings
    return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


class MLAAttention(nn.Module):
    def __init__(self, config: MLAConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads = config.num_attention_heads
        self.nope, self.rope, self.v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        query_width = self.heads * (self.nope + self.rope)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.direct_query = config.q_lora_rank is None
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v, config.hidden_size, bias=False)
        self.rotary = None if config.rope is None else Rotary(config.rope, self.rope)

    def latent(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds of ``hidden`` [..., T, hidden_size]: latent [..., T, rank], rotated rope part."""
        latent, rope = self.kv_a_proj_with_mqa(hidden).split((self.rank, self.rope), -1)
        if self.rotary is not None:
            rope = self.rotary.rotate(rope, *self.rotary(positions))
        return self.kv_a_layernorm(latent), rope

    def _up(self) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_b_proj.weight.view(self.heads, self.nope + self.v, self.rank)
        return both[:, : self.nope], both[:, self.nope :]

    def query(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Absorbed query [..., T, heads, rank + rope]."""
        flat = self.q_proj(hidden) if self.direct_query else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        nope, rope = flat.unflatten(-1, (self.heads, -1)).split((self.nope, self.rope), -1)
        if self.rotary is not None:
            cos, sin = self.rotary(positions)
            rope = self.rotary.rotate(rope, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return torch.cat((torch.einsum("...hn,hnr->...hr", nope, self._up()[0]), rope), -1)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        seen = attend(self.index, self.query(hidden, positions), *self.latent(hidden, positions))
        value = torch.einsum("...hr,hvr->...hv", seen[..., : self.rank], self._up()[1])
        projected: torch.Tensor = self.o_proj(value.flatten(-2))
        return projected


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: MLAConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLAAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """``hidden`` [..., T, hidden_size], ``positions`` int64 [..., T]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def softmax_scale(config: MLAConfig) -> float:
    """Factor on the scores: ``1 / sqrt(head width)``, times YaRN's temperature squared."""
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if config.rope is not None:
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def attend_dense(mask: torch.Tensor, sm_scale: float) -> Attend:
    """Attention of a whole batch of sequences under a mask; differentiable, keeps nothing.

    Args:
        mask: bool [T, T], True where query (row) sees key (column).
        sm_scale: factor on the scores.
    """

    def attend(_layer: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return _masked(q, torch.cat((latent, rope), -1), mask, sm_scale)

    return attend


def attend_cached(cache: torch.Tensor, begin: int, mask: torch.Tensor, sm_scale: float) -> Attend:
    """Attention of a batch that grows in step, over rows kept in ``cache``.

    Args:
        cache: [layers, B, longest, kv_lora_rank + rope]; rows from ``begin`` on are written.
        begin: tokens already in it.
        mask: bool [T, begin + T] for T new tokens.
        sm_scale: factor on the scores.
    """

    def attend(layer: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        end = begin + latent.shape[1]
        cache[layer, :, begin:end] = torch.cat((latent, rope), -1)
        return _masked(q, cache[layer, :, :end], mask, sm_scale)

    return attend


def _masked(q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """q [B, T, heads, width] over rows [B, S, width] that all heads share, to [B, T, heads, width].

    The rope columns of the result mean nothing: the caller keeps the first ``kv_lora_rank``.
    """
    shared = rows.unsqueeze(1).expand(-1, q.shape[2], -1, -1)
    seen = F.scaled_dot_product_attention(q.transpose(1, 2), shared, shared, attn_mask=mask, scale=sm_scale)
    return seen.transpose(1, 2)
