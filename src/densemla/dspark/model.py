"""The DSpark draft: one parallel pass over a block, then a Markov head from left to right.

For every request the target hands over one *context row* per accepted token (the outputs of a few of its
layers, side by side). The draft projects a row once and keeps, per layer, only its latent. To draft, it
runs the newest token (the *anchor*) followed by mask tokens through its layers; every row of this block
sees the whole context and the whole block. Row ``i`` predicts the token ``i + 1`` places after the anchor,
and the Markov head adds a bias that depends on the token drafted just before.

Names of modules are those of the published ``k3_dspark`` checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import kv_cache
from ..errors import ContractError
from .config import DSparkConfig
from .kv_pool import Entry, KVPool
from .layers import Attend, DecoderLayer, RMSNorm
from .paged import PagedAttention


class MarkovHead(nn.Module):
    """A low-rank table of logit biases given the previous token: ``w2 @ w1[previous]``."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, previous: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.markov_w2(self.markov_w1(previous))
        return bias


class DSparkDraft(nn.Module):
    """The draft's own weights, and the target's embedding and LM head beside them.

    ``embed_tokens`` and ``lm_head`` are the target's: the loader and the trainer set them, and
    :meth:`own_state_dict` leaves them out.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.context_width or config.hidden_size
        self.context_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.attentions = [layer.self_attn for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank) if config.markov_rank else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def own_state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors of a draft checkpoint."""
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.startswith(("embed_tokens.", "lm_head."))
        }

    def context(self, rows: torch.Tensor) -> torch.Tensor:
        """Context rows [..., context_width] (token ids [...] for a token-only draft) to [..., hidden_size]."""
        states = rows if self.config.context_width else self.embed_tokens(rows.long())
        out: torch.Tensor = self.context_norm(self.context_proj(states.to(self.context_proj.weight.dtype)))
        return out

    def context_latents(self, rows: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each layer keeps of context rows: (latent [..., T, rank], rotated rope part)."""
        states = self.context(rows)
        return [attention.latent(states, positions) for attention in self.attentions]

    def block_inputs(self, anchors: torch.Tensor) -> torch.Tensor:
        """Token ids of the block: ``anchors`` [...] to [..., block_size]."""
        masks = anchors.new_full((*anchors.shape, self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors.unsqueeze(-1), masks), -1)

    def block_logits(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits before the Markov bias: [..., T] block tokens to [..., T, vocab_size]."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, positions, attend)
        logits: torch.Tensor = self.lm_head(self.final_norm(hidden))
        return logits

    def choose(self, logits: torch.Tensor, anchors: torch.Tensor, depth: int) -> torch.Tensor:
        """Greedy draft from left to right: logits [B, >= depth, V] and anchors [B] to int64 [B, depth]."""
        previous, chosen = anchors, []
        for i in range(depth):
            step = logits[:, i]
            if self.markov_head is not None:
                step = step + self.markov_head(previous)
            previous = step.argmax(-1)
            chosen.append(previous)
        return torch.stack(chosen, 1)

    def teacher_forced_logits(
        self, context: torch.Tensor, anchors_at: torch.Tensor, tokens: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """Logits of many blocks per sequence, with the true previous tokens in the Markov head (training).

        Args:
            context: context rows [B, T, context_width] (token ids [B, T] for a token-only draft).
            anchors_at: int64 [B, K]: positions of anchors; ``anchor + block_size < T``.
            tokens: int64 [B, T].
            sm_scale: factor on the scores.

        Returns:
            [B, K, block_size, vocab_size]; row ``i`` of a block predicts ``tokens[anchor + 1 + i]``.
        """
        (batch, blocks), size, length = anchors_at.shape, self.config.block_size, tokens.shape[1]
        steps = torch.arange(size, device=tokens.device)
        positions = anchors_at.unsqueeze(-1) + steps
        ahead = torch.arange(length, device=tokens.device) < anchors_at.unsqueeze(-1)
        latents = self.context_latents(context, torch.arange(length, device=tokens.device))

        def attend(layer: int, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
            # q [B, K, block, heads, width]: rows see the context before their anchor, then their own block.
            shared = torch.cat(latents[layer], -1)
            own = torch.cat((latent, rope), -1)
            from_context = torch.einsum("bkshd,btd->bkhst", q, shared).masked_fill(
                ~ahead[:, :, None, None, :], float("-inf")
            )
            from_block = torch.einsum("bkshd,bktd->bkhst", q, own)
            weights = torch.softmax(torch.cat((from_context, from_block), -1) * sm_scale, -1)
            rank = latent.shape[-1]
            return torch.einsum("bkhst,btr->bkshr", weights[..., :length], shared[..., :rank]) + torch.einsum(
                "bkhst,bktr->bkshr", weights[..., length:], own[..., :rank]
            )

        anchors = tokens.gather(1, anchors_at)
        logits = self.block_logits(self.block_inputs(anchors), positions, attend)
        if self.markov_head is not None:
            previous = tokens.gather(1, positions.flatten(1)).view(batch, blocks, size)
            logits = logits + self.markov_head(previous)
        return logits


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What one request brings to a drafting step."""

    entry: Entry
    rows: torch.Tensor
    """New context rows [n, context_width] (token ids [n] for a token-only draft), n >= 0."""
    anchor: int
    """The newest token; -1 stores the rows and drafts nothing."""


class PagedDraft:
    """A draft serving many requests from one pool.

    Args:
        model: in the dtype and on the device of ``pool``.
        pool: holds ``num_hidden_layers`` layers.
        max_batch: most requests in a step.
    """

    def __init__(self, model: DSparkDraft, pool: KVPool, max_batch: int) -> None:
        self.model = model.eval()
        self.pool = pool
        config = model.config
        if pool.capacity < config.block_size:
            raise ContractError("byte_budget", f"room for a block of {config.block_size} tokens", pool.capacity)
        self.attention = PagedAttention(config, pool, max_batch, max_batch * config.block_size)

    @torch.inference_mode()
    def step(self, steps: list[BlockStep], depth: int) -> torch.Tensor:
        """Store each request's rows and draft after its anchor.

        The pages of every entry must already reach ``entry.tokens + rows + block_size``. ``entry.tokens``
        is advanced by the rows; the block's own latent rows lie behind it and are overwritten next time.

        Returns:
            int64 [len(steps), depth] on the CPU; -1 where the anchor is -1.
        """
        self._store(steps)
        drafting = [i for i, step in enumerate(steps) if step.anchor >= 0]
        out = torch.full((len(steps), depth), -1, dtype=torch.int64)
        if drafting:
            size, device = self.model.config.block_size, self.pool.caches.device
            entries = [steps[i].entry for i in drafting]
            starts = [entry.tokens for entry in entries]
            anchors = torch.tensor([steps[i].anchor for i in drafting], device=device)
            positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(size, device=device)
            attend = self.attention.step(entries, starts, [size] * len(entries), causal=False)
            logits = self.model.block_logits(self.model.block_inputs(anchors).flatten(), positions.flatten(), attend)
            out[drafting] = self.model.choose(logits.view(len(entries), size, -1), anchors, depth).cpu()
        return out

    def _store(self, steps: list[BlockStep]) -> None:
        fresh = [step for step in steps if step.rows.shape[0]]
        if not fresh:
            return
        device = self.pool.caches.device
        counts = [step.rows.shape[0] for step in fresh]
        slots, positions = [], []
        for step, count in zip(fresh, counts, strict=True):
            slots.append(self.pool.slots(step.entry, step.entry.tokens, count))
            positions.append(torch.arange(step.entry.tokens, step.entry.tokens + count))
            step.entry.tokens += count
        rows = torch.cat([step.rows for step in fresh]).to(device)
        slot_mapping = torch.cat(slots).to(device)
        for layer, latent in enumerate(self.model.context_latents(rows, torch.cat(positions).to(device))):
            kv_cache.append(*latent, self.pool.caches[layer], slot_mapping)


def draft_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy; early places of the block weigh more, since nothing counts after a miss.

    Args:
        logits: [..., block_size, vocab_size].
        targets: int64 [..., block_size].
    """
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    weight = 0.8 ** torch.arange(targets.shape[-1], device=targets.device)
    return (losses * weight).sum() / (weight.sum() * losses.numel() / targets.shape[-1])
