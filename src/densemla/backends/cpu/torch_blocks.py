"""The CPU decode in torch alone, for machines where the native one could not be built.

A request is scanned in blocks of about a thousand tokens: its pages are gathered and widened to float32,
then scores, softmax and values are three products over the block. A block holds several whole splits, or
part of a long one; each split's result is rounded to the partial dtype exactly as a GPU kernel would
round it. All shapes depend on the request alone, which is what makes its bits independent of the batch.

Torch's intra-op threads share each product, so one request already uses all cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...splits import CHUNK_TOKENS, ceil_div, chunks_per_split, live_chunks, live_splits

if TYPE_CHECKING:
    from ...binding import Binding, HostLengths
    from ...caps import Caps

BLOCK_TOKENS = 1024
"""Tokens scored at once: the widened rows (2.4 MB at 576 columns) stay in a shared cache level."""

_TILE_ROWS = 512
"""Query rows (queries times heads) scored at once."""

_LOWEST = torch.finfo(torch.float32).min

_BLOCK_SPLITS = BLOCK_TOKENS // CHUNK_TOKENS
"""Most splits in one block."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive tokens that are gathered together: whole splits of ``width``, or part of one."""

    start: int
    tokens: int
    split: int
    width: int
    continues: bool
    """The block goes on with the split that the block before it left open."""
    closes: bool
    """The last split in the block ends with it."""


def _blocks(length: int, width: int) -> Iterator[_Block]:
    if width <= BLOCK_TOKENS:
        step = BLOCK_TOKENS // width * width
        for start in range(0, length, step):
            yield _Block(start, min(step, length - start), start // width, width, False, True)
        return
    for split, begin in enumerate(range(0, length, width)):
        end = min(begin + width, length)
        for start in range(begin, end, BLOCK_TOKENS):
            tokens = min(BLOCK_TOKENS, end - start)
            yield _Block(start, tokens, split, tokens, start > begin, start + tokens == end)


class _Step:
    """One run: the binding, its lengths and views of its workspace."""

    def __init__(self, binding: Binding, host: HostLengths) -> None:
        caps, scratch = binding.plan.caps, binding.scratch
        self.binding = binding
        self.host = host
        self.fmt = caps.kv_format
        self.heads = caps.num_q_heads
        self.rank = caps.kv_lora_rank
        self.page_size = caps.page_size
        self.partial_output = scratch["partial_output"]
        self.partial_lse = scratch["partial_lse"]
        self.pages = scratch.get("pages")
        self.rows = scratch["rows"]
        self.q_rows = scratch["q_rows"]
        self.scores = scratch["scores"]
        self.probs = scratch["probs"]
        self.values = scratch["values"]
        self.open_values = scratch["open_values"]
        self.stats = scratch["stats"]
        self.rows_of_merge = scratch["q_rows"].view(-1)[: self.heads * self.rank].view(self.heads, self.rank)
        self.kv_scale = 1.0 if binding.kv_scale is None else float(binding.kv_scale)
        q_scale = 1.0 if binding.q_scale is None else float(binding.q_scale)
        self.score_scale = binding.sm_scale * q_scale * self.kv_scale

    def run(self) -> None:
        binding, cu = self.binding, self.host.cu_seqlens_q
        self.partial_lse[: binding.active_splits, : binding.total_q].fill_(-math.inf)
        self._clear(cu[-1], binding.total_q)
        queries_per_tile = max(1, _TILE_ROWS // self.heads)
        for i, length in enumerate(self.host.cache_seqlens):
            if length == 0:
                self._clear(cu[i], cu[i + 1])
                continue
            for begin in range(cu[i], cu[i + 1], queries_per_tile):
                self._tile(i, length, begin, min(begin + queries_per_tile, cu[i + 1]))

    def _clear(self, begin: int, end: int) -> None:
        """Queries that see nothing: exactly 0 and -inf."""
        self.binding.output[begin:end].zero_()
        self.binding.lse[begin:end].fill_(-math.inf)

    def _tile(self, request: int, length: int, begin: int, end: int) -> None:
        plan, launched = self.binding.plan, self.binding.active_splits
        chunks = live_chunks(length)
        width = chunks_per_split(chunks, launched, plan.single_split_chunks) * CHUNK_TOKENS
        single = live_splits(chunks, launched, plan.single_split_chunks) == 1
        visible = self.host.visible[begin:end]
        q_rows = self.q_rows[: (end - begin) * self.heads]
        q_rows.view(end - begin, self.heads, -1).copy_(self.binding.q[begin:end])
        q_rows.mul_(self.score_scale)
        seen_by_any = max(visible)
        for block in _blocks(length, width):
            if block.start >= seen_by_any:
                break
            rows = self._gather(request, block.start, block.tokens)
            seen = [min(max(v - block.start, 0), block.tokens) for v in visible]
            if min(seen) == max(seen):
                self._block(block, rows, begin, end, begin, seen[0], single)
            else:
                # Queries differ in what they see here: one at a time, each over exactly its own rows, so
                # that a NaN beyond one query's bound can't reach it as 0 * NaN.
                for t, tokens in enumerate(seen, begin):
                    if tokens:
                        self._block(block, rows, t, t + 1, begin, tokens, single)
        for t in range(begin, end):
            if visible[t - begin] == 0:
                self._clear(t, t + 1)
            elif not single:
                self._merge(t, ceil_div(visible[t - begin], width))

    def _gather(self, request: int, start: int, tokens: int) -> torch.Tensor:
        """Rows ``[start, start + tokens)`` of a request, float32 [tokens, head_dim], ``kv_scale`` not applied."""
        first, last = start // self.page_size, ceil_div(start + tokens, self.page_size)
        ids = self.binding.page_table[request, first:last]
        offset = start - first * self.page_size
        if self.pages is None:
            held = self.rows[: (last - first) * self.page_size]
            torch.index_select(self.binding.kv_cache, 0, ids, out=held.view(last - first, self.page_size, -1))
            return held[offset : offset + tokens]
        pages = self.pages[: (last - first) * self.page_size]
        torch.index_select(self.binding.kv_cache, 0, ids, out=pages.view(last - first, self.page_size, -1))
        rows = self.rows[:tokens]
        self.fmt.widen(pages[offset : offset + tokens], rows)
        return rows

    def _block(
        self, block: _Block, rows: torch.Tensor, begin: int, end: int, tile: int, tokens: int, single: bool
    ) -> None:
        """Attend with queries ``[begin, end)`` of a tile over the first ``tokens`` rows of a block."""
        q = self.q_rows[(begin - tile) * self.heads : (end - tile) * self.heads]
        whole = tokens // block.width
        for split, width, first, groups in (
            (block.split, block.width, 0, whole),
            (block.split + whole, tokens - whole * block.width, whole * block.width, 1),
        ):
            if groups == 0 or width == 0:
                continue
            values, lse = self._attend(q, rows[first : first + groups * width], groups)
            if block.continues or not block.closes:
                open_values = self.open_values[(begin - tile) * self.heads : (end - tile) * self.heads]
                open_lse = self.stats[0, (begin - tile) * self.heads : (end - tile) * self.heads]
                self._fold(open_values, open_lse, values[0], lse[0], block.continues)
                values, lse = open_values.unsqueeze(0), open_lse.unsqueeze(0)
            self._publish(values, lse, split, begin, end, single)

    def _attend(self, q: torch.Tensor, rows: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax attention over each of ``groups`` equal runs of rows.

        Returns normalised values [groups, q rows, kv_lora_rank] and natural-log LSE [groups, q rows].
        """
        count, tokens = q.shape[0], rows.shape[0]
        width = tokens // groups
        scores = self.scores[: count * tokens].view(count, tokens)
        torch.mm(q, rows.T, out=scores)
        scores = scores.view(count, groups, width)
        probs = self.probs[: count * tokens].view(count, groups, width)
        torch.softmax(scores, -1, out=probs)
        # torch's softmax is far faster than its exp. The largest probability is 1 / Z relative to the
        # largest score, which recovers the LSE.
        top = self.stats[1].narrow(0, 0, count * groups).view(count, groups)
        largest = self.stats[2].narrow(0, 0, count * groups).view(count, groups)
        torch.amax(scores, -1, out=top)
        torch.amax(probs, -1, out=largest)
        if bool((nothing := top == -math.inf).any()):
            # Scores of nothing but -inf weigh 0, where a softmax alone would say NaN.
            probs.masked_fill_(nothing.unsqueeze(-1), 0.0)
            largest.masked_fill_(nothing, 1.0)
        top.sub_(largest.log_())
        values = self.values[: groups * count * self.rank].view(groups, count, self.rank)
        if groups == 1:
            torch.mm(probs.view(count, tokens), rows[:, : self.rank], out=values[0])
        else:
            torch.bmm(probs.transpose(0, 1), rows.view(groups, width, -1)[:, :, : self.rank], out=values)
        if self.kv_scale != 1.0:
            values.mul_(self.kv_scale)
        return values, top.T

    def _fold(
        self, into: torch.Tensor, into_lse: torch.Tensor, values: torch.Tensor, lse: torch.Tensor, continues: bool
    ) -> None:
        """Merge a block's result into the split that is still open, in float32."""
        if not continues:
            into.copy_(values)
            into_lse.copy_(lse)
            return
        count = lse.shape[0]
        merged, old, new = (self.stats[k].narrow(0, 0, count) for k in (3, 4, 5))
        torch.logaddexp(into_lse, lse, out=merged)
        # Not below the lowest number: -inf less -inf would be NaN.
        shift = self.stats[6].narrow(0, 0, count)
        torch.clamp(merged, min=_LOWEST, out=shift)
        torch.sub(into_lse, shift, out=old).exp_()
        torch.sub(lse, shift, out=new).exp_()
        into.mul_(old.unsqueeze(1)).add_(values.mul_(new.unsqueeze(1)))
        into_lse.copy_(merged)

    def _publish(self, values: torch.Tensor, lse: torch.Tensor, split: int, begin: int, end: int, single: bool) -> None:
        """Round once: a lone split to the output, others to the partials."""
        groups, shape = values.shape[0], (end - begin, self.heads)
        self.partial_lse[split : split + groups, begin:end].copy_(lse.unflatten(1, shape))
        if single:
            self.binding.output[begin:end].copy_(values[0].unflatten(0, shape))
            self.binding.lse[begin:end].copy_(lse[0].unflatten(0, shape))
        else:
            self.partial_output[split : split + groups, begin:end].copy_(values.unflatten(1, shape))

    def _merge(self, query: int, splits: int) -> None:
        """Merge the first ``splits`` partials of one query: exactly those that it sees."""
        heads = self.heads
        lses = self.partial_lse[:splits, query]
        top, total = self.stats[3][:heads], self.stats[4][:heads]
        torch.amax(lses, 0, out=top)
        top.clamp_(min=_LOWEST)
        merged = self.open_values[:heads]
        merged.zero_()
        total.zero_()
        for first in range(0, splits, _BLOCK_SPLITS):
            count = min(_BLOCK_SPLITS, splits - first)
            weight = self.stats[1][: count * heads].view(count, heads)
            torch.sub(lses[first : first + count], top, out=weight).exp_()
            total.add_(torch.sum(weight, 0, out=self.stats[5][:heads]))
            part = self.partial_output[first : first + count, query]
            weighted = self.values[: count * heads * self.rank].view(count, heads, self.rank)
            weighted.copy_(part).mul_(weight.unsqueeze(2))
            merged.add_(torch.sum(weighted, 0, out=self.rows_of_merge))
        self.binding.lse[query].copy_(top.add_(torch.log(total, out=self.stats[5][:heads])))
        merged.div_(total.masked_fill_(total == 0, 1.0).unsqueeze(1))
        self.binding.output[query].copy_(merged)


def workspace(caps: Caps) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Scratch by name: the gathered pages (unless they are float32 already), their rows, and one tile's results."""
    fmt = caps.kv_format
    rows = min(max(_TILE_ROWS // caps.num_q_heads, 1), caps.max_total_q) * caps.num_q_heads
    gathered = (ceil_div(BLOCK_TOKENS, caps.page_size) + 1) * caps.page_size
    space = {
        "rows": ((gathered, caps.head_dim), torch.float32),
        "q_rows": ((rows, caps.head_dim), torch.float32),
        "scores": ((rows * BLOCK_TOKENS,), torch.float32),
        "probs": ((rows * BLOCK_TOKENS,), torch.float32),
        "values": ((_BLOCK_SPLITS * rows * caps.kv_lora_rank,), torch.float32),
        "open_values": ((rows, caps.kv_lora_rank), torch.float32),
        "stats": ((7, _BLOCK_SPLITS * rows), torch.float32),
    }
    if fmt.packed or fmt.dtype is not torch.float32:
        space["pages"] = ((gathered, fmt.row_width), fmt.dtype)
    return space


def run(binding: Binding, host: HostLengths) -> None:
    """Decode one step whose lengths have been read and checked."""
    _Step(binding, host).run()
