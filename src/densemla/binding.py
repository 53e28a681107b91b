"""Binding tensors to a plan: the one place where a caller's input is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .checks import check_apart, check_dense, check_leading, check_scale, check_tensor, check_writable, is_int
from .errors import ContractError
from .kv_formats import PACKED
from .planning import Plan


@dataclass(frozen=True, slots=True)
class HostLengths:
    """The integer inputs of one step, read on the host. Only where that costs no device sync."""

    cu_seqlens_q: list[int]
    cache_seqlens: list[int]
    visible: list[int]
    """Visible tokens of each query row; rows outside every request see 0."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A plan with its tensors; made by :func:`bind`, consumed by :func:`compile` and :func:`run`.

    The tensors are the caller's own: lengths, page table and data are read anew by every ``run``.
    ``q_scale`` and ``kv_scale`` are one-element float32 tensors on the plan's device, or None where the
    format has no scale. ``cu_seqlens_q`` is always present. ``dataclasses.replace`` checks as ``bind`` does.
    """

    plan: Plan
    scratch: Mapping[str, torch.Tensor]
    q: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    query_cache_seqlens: torch.Tensor | None
    q_scale: torch.Tensor | None
    kv_scale: torch.Tensor | None
    sm_scale: float
    active_splits: int

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "scratch", dict(self.scratch))

    @property
    def total_q(self) -> int:
        return self.q.shape[0]

    @property
    def batch(self) -> int:
        return self.cache_seqlens.shape[0]

    @property
    def num_pages(self) -> int:
        return self.kv_cache.shape[0]

    def host_lengths(self) -> HostLengths:
        """Read and check the integer inputs and the scales; for tensors in host memory.

        Raises:
            ContractError: a length is negative, beyond the plan or beyond the page table, ``cu_seqlens_q``
                is no running sum, a visible page id lies outside the cache, or a scale is not positive
                and finite.
        """
        for name, scale in (("q_scale", self.q_scale), ("kv_scale", self.kv_scale)):
            if scale is not None:
                check_scale(name, float(scale))
        cu = _ints(self.cu_seqlens_q)
        if cu[0] != 0:
            raise ContractError("cu_seqlens_q", "a running sum that starts at 0", f"{cu[0]} first")
        for i in range(self.batch):
            if cu[i + 1] < cu[i]:
                raise ContractError("cu_seqlens_q", "a running sum", f"{cu[i + 1]} after {cu[i]} at index {i + 1}")
        if cu[-1] > self.total_q:
            raise ContractError("cu_seqlens_q", f"at most total_q = {self.total_q} queries", cu[-1])
        lengths = _ints(self.cache_seqlens)
        capacity = self.plan.caps.max_cache_tokens
        table_tokens = self.page_table.shape[1] * self.plan.caps.page_size
        for i, length in enumerate(lengths):
            if not 0 <= length <= capacity:
                raise ContractError("cache_seqlens", f"0 to max_cache_tokens = {capacity}", f"{length} at index {i}")
            if length > table_tokens:
                raise ContractError(
                    "cache_seqlens",
                    f"at most {table_tokens} tokens, which page_table [{self.batch}, {self.page_table.shape[1]}] holds",
                    f"{length} at index {i}",
                )
        host = HostLengths(cu, lengths, self._visible(cu, lengths))
        self._check_page_ids(lengths)
        return host

    def _visible(self, cu: list[int], lengths: list[int]) -> list[int]:
        visible = [0] * self.total_q
        given = None if self.query_cache_seqlens is None else _ints(self.query_cache_seqlens)
        for i, length in enumerate(lengths):
            for row in range(cu[i], cu[i + 1]):
                if given is None:
                    visible[row] = max(length - (cu[i + 1] - row) + 1, 0)
                elif 0 <= given[row] <= length:
                    visible[row] = given[row]
                else:
                    raise ContractError(
                        "query_cache_seqlens",
                        f"0 to the request's cache_seqlens = {length}",
                        f"{given[row]} at index {row}",
                    )
        return visible

    def _check_page_ids(self, lengths: list[int]) -> None:
        page_size = self.plan.caps.page_size
        for i, length in enumerate(lengths):
            pages = -(-length // page_size)
            if pages == 0:
                continue
            # Not torch, which looks at a long row with threads that a forked child does not have.
            ids = self.page_table[i, :pages].numpy()
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.num_pages:
                raise ContractError(
                    "page_table",
                    f"page ids in [0, {self.num_pages}) up to the visible length",
                    f"{low if low < 0 else high} in row {i}",
                )


def _ints(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.tolist()
    return values


def bind(
    plan: Plan,
    *,
    scratch: Mapping[str, torch.Tensor],
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
    active_splits: int | None = None,
) -> Binding:
    """Check ``plan`` and tensors against each other once, before any number of runs.

    Args:
        plan: from :func:`densemla.plan`.
        scratch: from ``plan.empty_scratch()``; its content does not matter.
        q: [total_q, num_q_heads, kv_lora_rank + qk_rope_head_dim], ``caps.q_dtype``; already absorbed
            into the latent space.
        kv_cache: [num_pages, page_size, row width], with its real strides; the last one is 1.
        output: [total_q, num_q_heads, kv_lora_rank], ``caps.output_dtype``; written by ``run``.
        lse: [total_q, num_q_heads] float32; written by ``run``; **natural log** of the sum of
            ``exp(sm_scale * q @ k)``, -inf for a query that sees nothing.
        page_table: int32 [batch, width]. Entries past the visible length may hold anything.
        cache_seqlens: int32 [batch], visible tokens including the newest; 0 is normal.
        sm_scale: factor on the scores, finite and above 0 in float32.
        cu_seqlens_q: int32 [batch + 1], running sum of queries per request. None: one each. Query ``t``
            of ``n`` sees ``cache_seqlens - n + 1 + t`` tokens, never below 0. Query rows past the last
            sum belong to no request and get 0 and -inf.
        query_cache_seqlens: int32 [total_q], visible tokens per query in place of that rule; at most the
            request's ``cache_seqlens``.
        q_scale: for fp8 queries, value = stored * q_scale: a number or a one-element float32 tensor on
            the plan's device, positive and finite; None is 1.
        kv_scale: the same for a ``float8_e4m3fn`` cache.
        active_splits: splits to launch, 1 to ``plan.num_splits``; None launches them all, as a graph
            must. ``plan.launch_splits(longest)`` is the fewest with a graph's bits.

    Returns:
        A binding. Nothing has been written.

    Raises:
        ContractError: an argument does not fit; the message names it. What lies in host memory (lengths,
            page ids, scales) is checked by value, here and again in every ``run``.
    """
    if not isinstance(plan, Plan):
        raise ContractError("plan", "a densemla.Plan", type(plan).__name__)
    if cu_seqlens_q is None:
        total_q = check_leading("q", q, plan.caps.max_total_q, "max_total_q")
        batch = check_leading("cache_seqlens", cache_seqlens, plan.caps.max_batch, "max_batch")
        if total_q != batch:
            raise ContractError("cu_seqlens_q", f"a tensor when total_q = {total_q} is not batch = {batch}", None)
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=plan.caps.device)
    return Binding(
        plan=plan,
        scratch=scratch,
        q=q,
        kv_cache=kv_cache,
        output=output,
        lse=lse,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        query_cache_seqlens=query_cache_seqlens,
        q_scale=_scale("q_scale", q_scale, plan),
        kv_scale=_scale("kv_scale", kv_scale, plan),
        sm_scale=check_scale("sm_scale", sm_scale),
        active_splits=plan.num_splits if active_splits is None else active_splits,
    )


def _check(binding: Binding) -> None:
    """Raise :class:`ContractError` unless the fields fit each other, and by value where they lie in host memory."""
    plan, q, kv_cache = binding.plan, binding.q, binding.kv_cache
    if not isinstance(plan, Plan):
        raise ContractError("plan", "a densemla.Plan", type(plan).__name__)
    caps, fmt = plan.caps, plan.caps.kv_format
    total_q = check_leading("q", q, caps.max_total_q, "max_total_q")
    check_tensor("q", q, caps.q_dtype, (total_q, caps.num_q_heads, caps.head_dim), caps.device)
    check_dense("kv_cache", kv_cache)
    if kv_cache.dim() != 3:
        raise ContractError("kv_cache", "3 dimensions [num_pages, page_size, row width]", list(kv_cache.shape))
    check_tensor("kv_cache", kv_cache, fmt.dtype, (kv_cache.shape[0], caps.page_size, fmt.row_width), caps.device)
    if caps.kv_dtype == PACKED and any(step % 4 for step in (kv_cache.data_ptr(), *kv_cache.stride()[:2])):
        raise ContractError(
            "kv_cache",
            "packed records on 4-byte boundaries",
            f"address {kv_cache.data_ptr():#x}, strides {kv_cache.stride()}",
        )
    rows = (total_q, caps.num_q_heads)
    check_tensor("output", binding.output, caps.output_dtype, (*rows, caps.kv_lora_rank), caps.device)
    check_tensor("lse", binding.lse, torch.float32, rows, caps.device, unit_stride=False)
    for name, tensor in (("output", binding.output), ("lse", binding.lse)):
        check_writable(name, tensor)
    batch = check_leading("cache_seqlens", binding.cache_seqlens, caps.max_batch, "max_batch")
    check_tensor("cache_seqlens", binding.cache_seqlens, torch.int32, (batch,), caps.device)
    page_table = binding.page_table
    check_dense("page_table", page_table)
    if page_table.dim() != 2:
        raise ContractError("page_table", f"2 dimensions [batch = {batch}, width]", list(page_table.shape))
    check_tensor("page_table", page_table, torch.int32, (batch, page_table.shape[1]), caps.device)
    check_tensor("cu_seqlens_q", binding.cu_seqlens_q, torch.int32, (batch + 1,), caps.device)
    if binding.query_cache_seqlens is not None:
        if not plan.supports("query_cache_seqlens"):
            raise ContractError("query_cache_seqlens", f"None (backend {plan.backend})", "a tensor")
        check_tensor("query_cache_seqlens", binding.query_cache_seqlens, torch.int32, (total_q,), caps.device)
    for name, scale in (("q_scale", binding.q_scale), ("kv_scale", binding.kv_scale)):
        if _takes_scale(name, scale, plan):
            check_tensor(name, scale, torch.float32, (1,), caps.device)
    check_scale("sm_scale", binding.sm_scale)
    if not is_int(binding.active_splits, 1, plan.num_splits):
        raise ContractError(
            "active_splits", f"an int in [1, plan.num_splits = {plan.num_splits}]", repr(binding.active_splits)
        )
    _check_scratch(plan, binding.scratch)
    _check_aliases(binding)
    if caps.device.type == "cpu":
        binding.host_lengths()


def _check_aliases(binding: Binding) -> None:
    lengths = ("page_table", "cache_seqlens", "cu_seqlens_q", "query_cache_seqlens")
    names = ("q", "kv_cache", *lengths, "q_scale", "kv_scale")
    check_apart(
        {
            "output": binding.output,
            "lse": binding.lse,
            **{f"scratch[{name!r}]": tensor for name, tensor in binding.scratch.items()},
        },
        {name: getattr(binding, name) for name in names},
    )


def _check_scratch(plan: Plan, scratch: Mapping[str, torch.Tensor]) -> None:
    specs = plan.scratch_specs()
    if not isinstance(scratch, Mapping) or set(scratch) != set(specs):
        came = sorted(map(str, scratch)) if isinstance(scratch, Mapping) else type(scratch).__name__
        raise ContractError("scratch", f"the tensors of plan.scratch_specs(): {sorted(specs)}", came)
    for name, spec in specs.items():
        tensor = scratch[name]
        check_tensor(f"scratch[{name!r}]", tensor, spec.dtype, spec.shape, plan.caps.device)
        if not tensor.is_contiguous():
            raise ContractError(f"scratch[{name!r}]", "a contiguous tensor", f"strides {tensor.stride()}")


_SCALED = {"q_scale": "float8_e4m3fn queries", "kv_scale": "a float8_e4m3fn cache"}


def _takes_scale(name: str, value: object, plan: Plan) -> bool:
    """Whether the plan's formats have this scale; one given where they have none is refused."""
    if plan.supports(name):
        return True
    if value is not None:
        raise ContractError(name, f"None: it applies only to {_SCALED[name]}", "a scale")
    return False


def _scale(name: str, value: torch.Tensor | float | None, plan: Plan) -> torch.Tensor | None:
    """A caller's scale as the one-element tensor that a binding holds."""
    if not _takes_scale(name, value, plan):
        return None
    device = plan.caps.device
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ContractError(name, f"one float32 on {device}", list(value.shape))
        check_tensor(name, value, torch.float32, tuple(value.shape), device, unit_stride=False)
        return value.reshape(1)
    scale = check_scale(name, 1.0 if value is None else value)
    return torch.tensor([scale], dtype=torch.float32, device=device)
