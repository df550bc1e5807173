"""sample@1 in Triton: two launches, no host synchronization, no shape that depends on data.

`tile_stats` reads the logits once; `select_and_sample` merges the tiles, finds what the filters keep and draws. Bias,
banned ids and penalties are applied before, by the core's torch formulas into one fp32 copy of the logits; the bitmask
is read by the kernels. Ranked results (kept ids, top n, rank) sort the row and cost what a sort costs.

Legend: N rows · V vocabulary · S tiles a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_common.requests import decode, edit
from rlkernel_core.spec.sample import SampleCall
from rlkernel_core.spec.sampling import SampleResult, Status
from rlkernel_triton.common.sampling_arguments import as_int64, flat
from rlkernel_triton.sample.extras import kept_ids, rank_of, top_of
from rlkernel_triton.sample.plan import SHAPE, Drawn, SamplePlan, SamplingParams, Shape, draw

__all__ = ["SHAPE", "SamplingParams", "Shape", "as_int64", "draw", "prepare", "sample"]


_PARAMETERS: Final = ("temperature", "top_k", "top_p", "min_p", "seed", "step", "slot")  # in the order of the arguments


def sample(call: SampleCall) -> SampleResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: SampleCall) -> Callable[[SampleCall], SampleResult]:
    """What runs calls of this shape: rlkernel_core.spec.sample.SampleCall is the contract."""
    return _Sampler(call).run


class _Sampler:
    """Calls of one shape: what they ask for, and the draw, which the first of them plans."""

    def __init__(self, call: SampleCall) -> None:
        (N, W), V = call.logits.shape, call.vocab_size or call.logits.shape[1]
        self._N, self._V, self._cuts = N, V, V != W
        given = {name: getattr(call, name) for name in _PARAMETERS}
        self._params = SamplingParams(**given, filter_order=call.filter_order, tie=call.tie, stream=call.stream)
        self._numbers = [None if isinstance(p, Tensor) else p for p in self._params.arguments()]
        self._tensors = [(i, name) for i, (name, value) in enumerate(given.items()) if isinstance(value, Tensor)]
        self._seed, self._step = (not isinstance(x, Tensor) for x in (call.seed, call.step))
        self._edits = any(x is not None for x in (call.penalties, call.bias, call.banned))
        self._ranked_raw = (call.top_n > 0 or call.rank) and call.top_n_from == "raw"
        self._raw = call.raw_logprob or self._ranked_raw
        self._more = bool(call.kept_capacity or call.top_n or call.rank)
        self._plan: SamplePlan | None = None

    def run(self, call: SampleCall) -> SampleResult:
        """One token per row."""
        given = call.logits[:, : self._V] if self._cuts else call.logits
        x, allowed, spoiled = given, call.allowed, None
        if self._edits:
            requests = decode(call, self._N, x.device, torch.float32, call.slot)
            edited = edit(given.to(torch.float32), 0, requests, bias=call.bias, allowed=allowed, banned=call.banned)
            x, allowed = edited.x, None
            spoiled = (edited.nan * 1 + (requests.bad | edited.bad) * 2).to(torch.int32)
        drawn = self._drawn(call, x, given if self._raw else None, allowed, spoiled)
        if self._more:
            return self._ranked(call, given, x, allowed, drawn)
        return drawn.result

    def _drawn(
        self, call: SampleCall, x: Tensor, raw: Tensor | None, allowed: Tensor | None, spoiled: Tensor | None
    ) -> Drawn:
        parameters = self._numbers.copy()
        for i, name in self._tensors:
            parameters[i] = flat(getattr(call, name))
        if self._seed:
            parameters[4] = as_int64(call.seed)
        if self._step:
            parameters[5] = as_int64(call.step)
        if allowed is not None:
            allowed = allowed.contiguous()
        plan = self._plan
        if plan is None:
            plan = self._plan = SamplePlan(
                x, raw, self._params, tuple(parameters), allowed=allowed, spoiled=spoiled, entropy=call.entropy,
                row_stats=call.top_n > 0, shape=SHAPE,
            )  # fmt: skip
        return plan(x, raw, parameters, call.stream, allowed, spoiled, call.invalid_token)

    def _ranked(self, call: SampleCall, given: Tensor, x: Tensor, allowed: Tensor | None, drawn: Drawn) -> SampleResult:
        """The result with what takes an order of the row: kept ids, rank, the best tokens."""
        out, row_stats, slot = drawn.result, drawn.row_stats, call.slot
        padding = torch.zeros_like(out.status, dtype=torch.bool) if slot is None else slot < 0
        extra: dict[str, Tensor] = {}
        x = masked(x, allowed)
        none = (out.kept_count == 0) | padding
        if call.kept_capacity:
            extra["kept_ids"] = kept_ids(x, out.kept_count, none, call.kept_capacity)
            over = (out.kept_count > call.kept_capacity) & ~none
            extra["status"] = out.status + over.to(torch.int32) * Status.KEPT_OVERFLOW.value
        if call.rank:
            ranking = masked(given, None) if self._ranked_raw else x
            extra["rank"] = torch.where(none, -1, rank_of(ranking, out.token))
        if row_stats is not None:
            source = masked(given, None) if self._ranked_raw else x
            count = None if self._ranked_raw else out.kept_count
            extra["top_ids"], extra["top_logprobs"] = top_of(
                source, row_stats[:, 3:] if self._ranked_raw else row_stats[:, :3], count, padding, call.top_n
            )
        return replace(out if call.raw_logprob else replace(out, raw_logprob=None), **extra)


def masked(x: Tensor, allowed: Tensor | None) -> Tensor:
    """[N, V] fp32 logits as the order sees them: NaN and forbidden tokens at -inf."""
    x = x.to(torch.float32)
    x = torch.where(x.isnan(), -torch.inf, x)
    if allowed is None:
        return x
    ids = torch.arange(x.shape[1], device=x.device)
    return torch.where((allowed[:, ids >> 5] >> (ids & 31)) & 1 != 0, x, -torch.inf)
