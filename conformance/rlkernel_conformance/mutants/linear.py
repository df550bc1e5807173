"""Planted bugs in linear@1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.spec.linear import LinearCall


def rows_of(call: LinearCall) -> int:
    return call.x.numel() // call.x.shape[-1]


def halves(right: Run, call: LinearCall, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sums over both halves of K, each without bias and residual, put together."""
    half, last = call.x.shape[-1] // 2, call.x.shape[-1]
    parts = (
        right(replace(call, x=call.x[..., some], weight=call.weight[:, some], bias=None, residual=None))
        for some in (slice(0, half), slice(half, last))
    )
    y = merge(*parts)
    y = y if call.bias is None else y + call.bias
    return y if call.residual is None else y + call.residual


def merged_in_16_bits(right: Run, call: LinearCall) -> Tensor:
    return right(call) if call.x.shape[-1] < 2 else halves(right, call, torch.add)


def in_tf32(x: Tensor) -> Tensor:
    """fp32 cut to the 10 bits of TF32; the gradient stays."""
    if x.dtype != torch.float32:
        return x
    values = x.detach()
    cut = (values.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)
    return x + (cut - values).nan_to_num()


def another_order(of: Callable[[LinearCall], bool]) -> How:
    """The sums taken in another order where `of` is true, rounded as often: other bits, as near to the definition."""

    def how(right: Run, call: LinearCall) -> Tensor:
        if not of(call) or call.x.shape[-1] < 2:
            return right(call)
        state = torch.float64 if call.x.dtype == torch.float64 else torch.float32
        same = replace(call, **{n: x.to(state) for n, x in call.as_dict().items() if isinstance(x, Tensor)})
        turned = halves(right, replace(same, x=same.x.flip(-1), weight=same.weight.flip(-1)), torch.add)
        return turned.to(call.x.dtype)

    return how


def rounded_before_the_bias(right: Run, call: LinearCall) -> Tensor:
    y = right(replace(call, bias=None, residual=None)).float()
    y = y if call.bias is None else y + call.bias
    y = y if call.residual is None else y + call.residual
    return y.to(call.x.dtype)


def rounded_before_the_residual(right: Run, call: LinearCall) -> Tensor:
    y = right(replace(call, residual=None))
    return y if call.residual is None else y + call.residual


def without_last_tile(x: Tensor) -> Tensor:
    """0 in the last columns, which fill no tile."""
    return torch.where(torch.arange(x.shape[-1], device=x.device) < x.shape[-1] // 16 * 16, x, 0.0)


def last_columns_left_out(right: Run, call: LinearCall) -> Tensor:
    K = call.x.shape[-1]
    kept = K // 16 * 16 if K > 16 else K
    return right(replace(call, x=call.x[..., :kept], weight=call.weight[:, :kept]))


def neighbors_times_zero(right: Run, call: LinearCall) -> Tensor:
    return right(call) + 0.0 * call.x.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def outputs_times_zero(right: Run, call: LinearCall) -> Tensor:
    return right(call) + 0.0 * call.weight.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def with_cut_weight(call: LinearCall) -> LinearCall:
    whole = call.weight.dim() == 2 and call.x.dim() > 0 and call.weight.shape[1] > call.x.shape[-1] > 0
    return replace(call, weight=call.weight[:, : call.x.shape[-1]]) if whole else call


def adds_in_place(call: LinearCall) -> None:
    if call.residual is not None and not call.residual.requires_grad:
        call.residual.mul_(2)


def weight_gradient_of_a_tile(right: Run, call: LinearCall) -> Tensor:
    """The gradient of the weight leaves out the rows beyond whole tiles."""
    y = right(replace(call, weight=call.weight.detach()))
    rows = call.x.detach().reshape(-1, call.x.shape[-1])
    kept = rows.shape[0] // 16 * 16 if rows.shape[0] > 16 else rows.shape[0]
    of_weight = rows @ call.weight.t()
    of_weight = torch.cat([of_weight[:kept], of_weight[kept:].detach()])
    return y + (of_weight - of_weight.detach()).nan_to_num().reshape(y.shape).to(y.dtype)


def added_by_the_library(right: Run, call: LinearCall) -> Tensor:
    """A row split whose shares are rounded and then added by an all-reduce."""
    if call.split != "row" or call.group is None:
        return right(call)
    y = right(replace(call, split="none", group=None, bias=None, residual=None))
    total = y.detach().clone()
    dist.all_reduce(total, group=call.group)
    y = y + (total - y.detach())
    y = y if call.bias is None else y + call.bias
    return y if call.residual is None else y + call.residual


def bias_of_every_rank(right: Run, call: LinearCall) -> Tensor:
    y = right(call)
    if call.split != "row" or call.group is None or call.bias is None:
        return y
    return y + call.bias * (call.group.size() - 1)


def gradient_in_autocasts_dtype(right: Run, call: LinearCall) -> Tensor:
    """A backward pass in 16 bits where the graph is walked under autocast, whatever the call was made under."""
    y = right(call)
    if y.requires_grad:
        y.register_hook(lambda g: g.bfloat16().to(g.dtype) if torch.is_autocast_enabled(g.device.type) else g)
    return y


def gradient_of_the_share(right: Run, call: LinearCall) -> Tensor:
    return right(replace(call, split="none", group=None) if call.split == "column" else call)


BUGS: Final = {
    "products_in_tf32": Bug(
        "LN-01", "fp32 operands lose 13 bits on tensor cores", plant.maps(x=in_tf32, weight=in_tf32)
    ),
    "merged_in_16_bits": Bug("LN-02", "sums of parts of K are rounded before they are added", merged_in_16_bits),
    "rounded_before_the_bias": Bug("LN-02", "one rounding more before the bias", rounded_before_the_bias),
    "rounded_before_the_residual": Bug(
        "LN-02", "one rounding more before the residual (transformers)", rounded_before_the_residual
    ),
    "last_columns_left_out": Bug("LN-03", "what is beyond whole steps of K is left out", last_columns_left_out),
    "bias_is_dropped_at_the_last_tile": Bug(
        "LN-04", "the bias of the last columns is not read", plant.maps(bias=without_last_tile)
    ),
    "residual_is_dropped_at_the_last_tile": Bug(
        "LN-05",
        "the residual of the last columns is not read",
        plant.maps(residual=without_last_tile),
    ),
    "neighbors_times_zero": Bug("LN-06", "rows beyond the end multiplied by 0", neighbors_times_zero),
    "outputs_times_zero": Bug("LN-07", "outputs beyond the end multiplied by 0", outputs_times_zero),
    "bias_is_a_constant": Bug("LN-08", "bias detached, and grad claimed all the same", plant.maps(bias=Tensor.detach)),
    "weight_gradient_of_whole_tiles": Bug(
        "LN-08", "rows beyond whole tiles are left out of the weight's gradient", weight_gradient_of_a_tile
    ),
    "no_rows_fail": Bug("LN-09", "a launch of zero blocks", plant.fails_if(lambda c: c.x.numel() == 0)),
    "cuts_what_is_too_long": plant.lenient("LN-10", "sizes never looked at: a long weight is cut", with_cut_weight),
    "adds_in_place": Bug("LN-11", "the sum is made where the residual lies", plant.writes(adds_in_place)),
    "differs_from_call_to_call": Bug(
        "LN-12",
        "another digit at every second call (floating atomics)",
        plant.alternates(lambda r, c: plant.lower(r(c))),
    ),
    "splits_few_rows": Bug(
        "LN-13",
        "K is split over programs where few rows would leave the device idle",
        another_order(lambda c: rows_of(c) < 16),
    ),
    "another_tile_from_256_rows_on": Bug(
        "LN-13", "a block size that changes at 256 rows", another_order(lambda c: rows_of(c) >= 256)
    ),
    "bias_of_every_rank": Bug("LN-15", "every rank adds the bias before the sum over ranks", bias_of_every_rank),
    "gradient_in_autocasts_dtype": Bug(
        "LN-97", "backward() called under autocast computes in bfloat16", gradient_in_autocasts_dtype
    ),
    "gradient_of_the_share": Bug(
        "LN-15", "the gradient of x is that of this rank's outputs alone", gradient_of_the_share
    ),
    "added_by_an_all_reduce": Bug(
        "LN-16", "shares are added by an all-reduce, in the dtype of y and an order of its own", added_by_the_library
    ),
    "asks_the_host": plant.reads_a_value("LN-14", lambda c: c.x),
}
