"""Decode context parallelism: every rank keeps a shard of every request's tokens and owns some heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .. import decoding
from ..binding import Binding, bind
from ..checks import check_apart, check_dense, check_leading, check_tensor, check_writable
from ..errors import ContractError
from ..planning import Plan
from ..planning import plan as make_plan
from .collectives import Group
from .lse_merge import FORMS, Form, LseMerge
from .sharding import (
    check_layout,
    local_index,
    local_length,
    local_lengths,
    local_positions,
    local_visible_lengths,
    owner,
    visible_lengths,
)

__all__ = [
    "FORMS",
    "DcpBinding",
    "DcpDecoder",
    "Form",
    "local_index",
    "local_length",
    "local_lengths",
    "local_positions",
    "local_visible_lengths",
    "owner",
    "visible_lengths",
]


@dataclass(frozen=True, slots=True)
class DcpBinding:
    """One rank's tensors of a step; made by :meth:`DcpDecoder.bind`.

    ``q``, ``output`` and ``lse`` hold the rank's own heads, the three length tensors are *global*, and
    ``local`` is the decode of all heads over the rank's shard, in the decoder's buffers.
    """

    q: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    query_cache_seqlens: torch.Tensor | None
    local: Binding


class DcpDecoder:
    """Decodes with the cache spread over the ranks of ``group``.

    A step gathers the heads' queries, decodes the rank's shard with all heads, and merges by LSE so that
    each rank ends with its own heads' output. Local outputs stay in the plan's partial type until the
    merge, so its precision choice holds across ranks as it does across splits.

    All buffers are allocated here. One decoder serves every layer of a step (and several bindings, one
    at a time). Making one and :meth:`bind` are collective: each rank calls them, in the same order.

    Args:
        plan: the *local* decode: ``num_q_heads`` counts the heads of all ranks (a multiple of the group's
            size), ``max_cache_tokens`` bounds a request's tokens on one rank;
            ``local_length(longest, 0, world, interleave)`` is enough.
        group: process group; None is the default one. Rank ``r`` owns heads ``[r * n, (r + 1) * n)`` with
            ``n = num_q_heads / world``.
        interleave: consecutive tokens that stay together, see :mod:`.sharding`.
        form: how partials are merged, see :mod:`.lse_merge`.

    Attributes:
        rank, world: this rank's number, and how many there are.
        own_heads: heads that each rank owns.
        local_plan: ``plan`` with its output in the partial type and its splits pinned. Under
            ``backend="auto"`` that type may need another backend than ``plan`` has.

    Raises:
        ContractError: on every rank, if an argument does not fit or the ranks don't agree on them.
        PeerError: a peer died or did not join.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup | None = None,
        *,
        interleave: int = 1,
        form: Form = "all_to_all",
    ) -> None:
        ranks = self._ranks = Group(group)
        error = None
        facts: dict[str, object] = dict.fromkeys(("plan", "interleave", "form"))
        try:
            if not isinstance(plan, Plan):
                raise ContractError("plan", "a densemla.Plan", type(plan).__name__)
            caps = plan.caps
            check_layout(ranks.rank, ranks.world, interleave)
            self._merge = LseMerge(
                group,
                num_heads=caps.num_q_heads,
                width=caps.kv_lora_rank,
                max_rows=caps.max_total_q,
                partial_dtype=plan.partial_dtype,
                form=form,
                device=caps.device,
            )
            # A rank's device number is its own affair.
            shared = replace(caps, device=torch.device(caps.device.type))
            facts = {"plan": shared, "interleave": interleave, "form": form}
        except ContractError as refusal:
            error = refusal
        ranks.agree(facts, error)
        self.plan = plan
        self.rank, self.world, self.own_heads = ranks.rank, ranks.world, self._merge.own_heads
        self.interleave, self.form = interleave, self._merge.form
        self.local_plan = make_plan(
            replace(
                caps,
                output_dtype=plan.partial_dtype,
                num_splits=plan.num_splits,
                single_split_chunks=plan.single_split_chunks,
            )
        )
        heads = caps.max_total_q * caps.num_q_heads
        device = caps.device
        self._gathered = torch.empty(heads * caps.head_dim, dtype=caps.q_dtype, device=device)
        self._q = torch.empty_like(self._gathered)
        self._cache_seqlens = torch.empty(caps.max_batch, dtype=torch.int32, device=device)
        self._visible = torch.empty(caps.max_total_q, dtype=torch.int32, device=device)
        self._scratch = self.local_plan.empty_scratch()
        self._sign = torch.zeros(1, dtype=torch.uint8, device=device)
        self._signs = torch.zeros(ranks.world, dtype=torch.uint8, device=device)

    def bind(
        self,
        *,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        sm_scale: float,
        cu_seqlens_q: torch.Tensor | None = None,
        query_cache_seqlens: torch.Tensor | None = None,
        q_scale: torch.Tensor | float | None = None,
        kv_scale: torch.Tensor | float | None = None,
    ) -> DcpBinding:
        """Check this rank's tensors, and that the ranks' steps fit together.

        Args:
            q: [total_q, own_heads, kv_lora_rank + qk_rope_head_dim], contiguous; the own heads' queries.
            kv_cache: [num_pages, page_size, row width]; this rank's shard. Other tokens are not in it.
            output: [total_q, own_heads, kv_lora_rank], the plan's output type; written by :meth:`run`.
            lse: float32 [total_q, own_heads]; written by :meth:`run`; **natural log**, over all ranks'
                tokens; -inf for a query that sees nothing.
            page_table: int32 [batch, width]; pages of this rank's shard.
            cache_seqlens: int32 [batch], *global* visible lengths including the newest token.
            sm_scale, q_scale, kv_scale: as for :func:`densemla.bind`; the same on every rank.
            cu_seqlens_q: int32 [batch + 1], running sum of queries per request; None: one each. Queries
                are causal as for :func:`densemla.bind`, in global positions.
            query_cache_seqlens: int32 [total_q], *global* visible length per query instead of that rule.

        Raises:
            ContractError: on every rank, if a tensor does not fit on any of them, or total_q, batch, the scale
                or which of the length tensors are given differ between ranks.
            PeerError: a peer died or did not join.
        """
        error, binding = None, None
        facts: dict[str, object] = dict.fromkeys(
            ("q", "cache_seqlens", "cu_seqlens_q", "query_cache_seqlens", "sm_scale")
        )
        try:
            binding = self._bound(
                q, kv_cache, output, lse, page_table, cache_seqlens, sm_scale, cu_seqlens_q, query_cache_seqlens,
                q_scale, kv_scale,
            )  # fmt: skip
            facts = {
                "q": list(q.shape),
                "cache_seqlens": list(cache_seqlens.shape),
                "cu_seqlens_q": "one each" if cu_seqlens_q is None else "given",
                "query_cache_seqlens": "none" if query_cache_seqlens is None else "given",
                "sm_scale": binding.local.sm_scale,
            }
        except ContractError as refusal:
            error = refusal
        self._ranks.agree(facts, error)
        assert binding is not None
        return binding

    def _bound(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        sm_scale: float,
        cu_seqlens_q: torch.Tensor | None,
        query_cache_seqlens: torch.Tensor | None,
        q_scale: torch.Tensor | float | None,
        kv_scale: torch.Tensor | float | None,
    ) -> DcpBinding:
        caps = self.plan.caps
        device = self._q.device
        total_q = check_leading("q", q, caps.max_total_q, "max_total_q")
        batch = check_leading("cache_seqlens", cache_seqlens, caps.max_batch, "max_batch")
        check_tensor("q", q, caps.q_dtype, (total_q, self.own_heads, caps.head_dim), device)
        if not q.is_contiguous():
            raise ContractError("q", "a contiguous tensor", f"strides {q.stride()}")
        check_tensor("output", output, caps.output_dtype, (total_q, self.own_heads, caps.kv_lora_rank), device)
        check_tensor("lse", lse, torch.float32, (total_q, self.own_heads), device, unit_stride=False)
        for name, tensor in (("output", output), ("lse", lse)):
            check_writable(name, tensor)
        check_tensor("cache_seqlens", cache_seqlens, torch.int32, (batch,), device, unit_stride=False)
        if cu_seqlens_q is not None:
            check_tensor("cu_seqlens_q", cu_seqlens_q, torch.int32, (batch + 1,), device, unit_stride=False)
        elif total_q != batch:
            raise ContractError("cu_seqlens_q", f"a tensor when total_q = {total_q} is not batch = {batch}", None)
        if query_cache_seqlens is not None:
            check_tensor("query_cache_seqlens", query_cache_seqlens, torch.int32, (total_q,), device, unit_stride=False)
        check_apart(
            {"output": output, "lse": lse},
            {
                "q": q,
                "kv_cache": check_dense("kv_cache", kv_cache),
                "page_table": check_dense("page_table", page_table),
                "cache_seqlens": cache_seqlens,
                "cu_seqlens_q": cu_seqlens_q,
                "query_cache_seqlens": query_cache_seqlens,
            },
        )
        self._localise(cache_seqlens, cu_seqlens_q, query_cache_seqlens, total_q)
        heads = total_q * caps.num_q_heads
        shape = (total_q, caps.num_q_heads)
        # With one row the gathered layout [world, 1, own_heads] is already [1, num_q_heads].
        queries = self._gathered if total_q == 1 else self._q
        partial_output, partial_lse = self._merge.partials(total_q)
        plain = cu_seqlens_q is None and query_cache_seqlens is None
        local = bind(
            self.local_plan,
            scratch=self._scratch,
            q=queries[: heads * caps.head_dim].view(*shape, caps.head_dim),
            kv_cache=kv_cache,
            output=partial_output,
            lse=partial_lse,
            page_table=page_table,
            cache_seqlens=self._cache_seqlens[:batch],
            cu_seqlens_q=cu_seqlens_q,
            query_cache_seqlens=None if plain else self._visible[:total_q],
            sm_scale=sm_scale,
            q_scale=q_scale,
            kv_scale=kv_scale,
        )
        return DcpBinding(q, output, lse, cache_seqlens, cu_seqlens_q, query_cache_seqlens, local)

    def localise(self, binding: DcpBinding) -> None:
        """Read the *global* lengths anew into the decoder's local ones, which its bindings share.

        Waits for nothing and can be captured in a CUDA graph.
        """
        self._localise(binding.cache_seqlens, binding.cu_seqlens_q, binding.query_cache_seqlens, binding.q.shape[0])

    def _localise(
        self,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        query_cache_seqlens: torch.Tensor | None,
        total_q: int,
    ) -> None:
        layout = (self.rank, self.world, self.interleave)
        local = self._local("cache_seqlens", cache_seqlens)
        if query_cache_seqlens is not None:
            self._visible[:total_q].copy_(self._local("query_cache_seqlens", query_cache_seqlens))
        elif cu_seqlens_q is not None:
            self._visible[:total_q].copy_(local_visible_lengths(cache_seqlens, cu_seqlens_q, total_q, *layout))
        self._cache_seqlens[: cache_seqlens.shape[0]].copy_(local)

    def _local(self, name: str, lengths: torch.Tensor) -> torch.Tensor:
        try:
            return local_lengths(lengths, self.rank, self.world, self.interleave)
        except ContractError as error:
            raise ContractError(name, error.expected, error.got) from error

    def compile(self, binding: DcpBinding) -> None:
        """Build the local decode's kernels and warm up the merge: before the first capture. Collective."""
        decoding.compile(binding.local)
        self.gather_queries(binding)
        self.merge(binding)

    def run(self, binding: DcpBinding, *, localise: bool = True) -> None:
        """Decode one layer of the step into the bound ``output`` and ``lse``. Collective.

        On NCCL it only launches, on the current stream, and can be captured in a CUDA graph.

        Args:
            localise: read the bound global lengths anew. The later layers of a step save that with False,
                as long as nothing else was bound or run on this decoder in between.

        Raises:
            ContractError: in host memory, a local length or page id does not fit.
            PeerError: a peer died or did not join.
        """
        if localise:
            self.localise(binding)
        self.gather_queries(binding)
        decoding.run(binding.local)
        self.merge(binding)

    def watch(self) -> None:
        """Put what was launched before this under the group's timeout. Collective.

        Call it behind the replay of a CUDA graph. NCCL's watchdog knows the collectives that were launched one by
        one and none inside a graph, so a replay whose peer is gone waits for ever. This launches an all-gather of
        one byte outside the graph, and the watchdog sees that wait. Once per step is enough; the host waits for
        nothing.

        Raises:
            ContractError: a graph is being captured, in which this would have no effect.
            PeerError: on gloo, a peer died or did not join.
        """
        if self._sign.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ContractError("watch", "a call outside the capture of a graph", "a capturing stream")
        self._ranks.all_gather(self._signs, self._sign, "signs of life")

    def gather_queries(self, binding: DcpBinding) -> None:
        """The first part of :meth:`run`: all heads' queries onto every rank."""
        local = binding.local.q
        gathered = self._gathered[: local.numel()]
        self._ranks.all_gather(gathered, binding.q, "queries")
        if binding.q.shape[0] > 1:
            total_q, own_heads, head_dim = binding.q.shape
            by_rank = gathered.view(self.world, total_q, own_heads, head_dim).transpose(0, 1)
            local.view(total_q, self.world, own_heads, head_dim).copy_(by_rank)

    def merge(self, binding: DcpBinding) -> None:
        """The last part of :meth:`run`: the ranks' partials into each rank's own heads."""
        self._merge.run(binding.output, binding.lse)
