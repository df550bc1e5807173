"""Planted bugs in grouped_linear@1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_conformance.mutants.linear import in_tf32, without_last_tile
from rlkernel_core.spec.grouped_linear import GroupedLinearCall
from rlkernel_torch.grouped_linear import members


def rows_of(call: GroupedLinearCall) -> Tensor:  # [T, 1]
    """How many rows the expert of a row has; 0 for rows of none."""
    mine = members(call.ends, call.x.shape[0])
    return (mine * mine.sum(1, keepdim=True)).sum(0)


def bias_of_rows(call: GroupedLinearCall) -> Tensor | float:  # [T, N]
    """The bias of each row's expert."""
    if call.bias is None:
        return 0.0
    return sum(torch.where(of_e, b, 0) for of_e, b in zip(members(call.ends, len(call.x)), call.bias, strict=True))


def another_order(of: Callable[[Tensor], Tensor]) -> How:
    """The sums taken in another order where `of` rows is true, rounded as often: other bits, as near to float64."""

    def how(right: Run, call: GroupedLinearCall) -> Tensor:
        y, K = right(call), call.x.shape[1]
        if K < 2:
            return y
        state = torch.float64 if call.x.dtype == torch.float64 else torch.float32
        x, weight = call.x.to(state).flip(1), call.weight.to(state).flip(2)
        turned = bias_of_rows(call)
        for some in (slice(K // 2), slice(K // 2, K)):
            turned = turned + right(replace(call, x=x[:, some], weight=weight[..., some], bias=None))
        return torch.where(of(rows_of(call)), turned.to(y.dtype), y)

    return how


def merged_in_16_bits(right: Run, call: GroupedLinearCall) -> Tensor:
    half = call.x.shape[1] // 2
    if not half:
        return right(call)
    first = right(replace(call, x=call.x[:, :half], weight=call.weight[..., :half], bias=None))
    return first + right(replace(call, x=call.x[:, half:], weight=call.weight[..., half:]))


def rounded_before_the_bias(right: Run, call: GroupedLinearCall) -> Tensor:
    return right(replace(call, bias=None)) + bias_of_rows(call)


def last_columns_left_out(right: Run, call: GroupedLinearCall) -> Tensor:
    K = call.x.shape[1]
    kept = K // 16 * 16 if K > 16 else K
    return right(replace(call, x=call.x[:, :kept], weight=call.weight[..., :kept]))


def tile_of_the_first_expert(right: Run, call: GroupedLinearCall) -> Tensor:
    """A tile of 16 rows across the end of an expert takes the weight of its first row."""
    T, E = call.x.shape[0], call.ends.shape[0]
    if not T:
        return right(call)
    row = torch.arange(T, device=call.x.device)
    last = call.ends.clamp(0, T).cummax(0).values
    expert = (row[:, None] >= last).sum(1)[row // 16 * 16]
    ends = torch.stack([((expert <= e) & (row < last[-1])).sum() for e in range(E)]).int()
    return right(replace(call, ends=ends))


def neighbors_times_zero(right: Run, call: GroupedLinearCall) -> Tensor:
    """Rows of the same expert, and of all others, multiplied by 0."""
    taken = call.x.detach()[: int(call.ends.clamp(0, call.x.shape[0]).max())]
    return right(call) + 0.0 * taken.nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def experts_times_zero(right: Run, call: GroupedLinearCall) -> Tensor:
    """One-hot products: other experts' weights multiplied by 0."""
    return right(call) + 0.0 * call.weight.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def rest_to_the_last_expert(right: Run, call: GroupedLinearCall) -> Tensor:
    """Rows behind the last end are those of the last expert."""
    ends = call.ends.clone()
    ends[-1] = call.x.shape[0]
    return right(replace(call, ends=ends))


def rest_has_a_bias(right: Run, call: GroupedLinearCall) -> Tensor:
    y = right(call)
    return y if call.bias is None else torch.where(members(call.ends, y.shape[0]).any(0), y, call.bias[-1])


def ends_as_they_are(right: Run, call: GroupedLinearCall) -> Tensor:
    """Rows are counted by differences of ends, of which a wild one takes rows of others."""
    counts = call.ends.diff(prepend=call.ends.new_zeros(1)).clamp(0, call.x.shape[0])
    return right(replace(call, ends=counts.cumsum(0).int()))


def weight_gradient_of_whole_tiles(right: Run, call: GroupedLinearCall) -> Tensor:
    """The gradient of the weight leaves out an expert's rows beyond 16 where it has more."""
    y = right(replace(call, weight=call.weight.detach()))
    mine = members(call.ends, call.x.shape[0])
    kept = mine & (mine.cumsum(1) <= 16)
    of_weight = sum(
        torch.where(of_e, torch.where(of_e, call.x.detach(), 0) @ w.t(), 0)
        for of_e, w in zip(kept, call.weight, strict=True)
    )
    return y + (of_weight - of_weight.detach()).nan_to_num().to(y.dtype)


def masked_by_products(right: Run, call: GroupedLinearCall) -> Tensor:
    """The gradient of the weight multiplies the rows of others by 0."""
    y = right(replace(call, weight=call.weight.detach()))
    mine = members(call.ends, call.x.shape[0]).to(call.x.dtype)
    of_weight = sum((call.x.detach() * of_e) @ w.t() for of_e, w in zip(mine, call.weight, strict=True))
    return y + (of_weight - of_weight.detach()).nan_to_num()


def never_written(right: Run, call: GroupedLinearCall) -> Tensor:
    """The gradient of the weight of an expert without rows is what was in memory."""
    y = right(call)
    if not call.weight.requires_grad:
        return y
    empty = call.ends.clamp(0, y.shape[0]).cummax(0).values.diff(prepend=call.ends.new_zeros(1)) == 0
    of_weight = torch.where(empty[:, None, None], call.weight, 0).sum()
    return y + (of_weight - of_weight.detach()).nan_to_num()


def with_cut_weight(call: GroupedLinearCall) -> GroupedLinearCall:
    whole = call.weight.dim() == 3 and call.x.dim() == 2 and call.weight.shape[2] > call.x.shape[1] > 0
    return replace(call, weight=call.weight[..., : call.x.shape[1]]) if whole else call


BUGS: Final = {
    "products_in_tf32": Bug(
        "GN-01", "fp32 operands lose 13 bits on tensor cores", plant.maps(x=in_tf32, weight=in_tf32)
    ),
    "tile_of_the_first_expert": Bug(
        "GN-01", "a tile across the end of an expert takes the weight of its first row", tile_of_the_first_expert
    ),
    "merged_in_16_bits": Bug("GN-02", "sums of parts of K are rounded before they are added", merged_in_16_bits),
    "rounded_before_the_bias": Bug("GN-02", "one rounding more before the bias", rounded_before_the_bias),
    "last_columns_left_out": Bug("GN-03", "what is beyond whole steps of K is left out", last_columns_left_out),
    "bias_is_dropped_at_the_last_tile": Bug(
        "GN-04", "the bias of the last columns is not read", plant.maps(bias=without_last_tile)
    ),
    "bias_of_the_first_expert": Bug(
        "GN-04", "all experts have the bias of the first", plant.maps(bias=lambda b: b[:1].expand_as(b))
    ),
    "neighbors_times_zero": Bug("GN-05", "rows of others multiplied by 0", neighbors_times_zero),
    "experts_times_zero": Bug("GN-06", "weights of other experts multiplied by 0", experts_times_zero),
    "rest_to_the_last_expert": Bug("GN-07", "rows of no expert meet the last one", rest_to_the_last_expert),
    "rest_has_a_bias": Bug("GN-07", "rows of no expert have a bias", rest_has_a_bias),
    "ends_as_they_are": Bug("GN-08", "ends that fall are differences below 0", ends_as_they_are),
    "bias_is_a_constant": Bug("GN-09", "bias detached, and grad claimed all the same", plant.maps(bias=Tensor.detach)),
    "weight_gradient_of_whole_tiles": Bug(
        "GN-09", "rows beyond whole tiles are left out of the weight's gradient", weight_gradient_of_whole_tiles
    ),
    "masked_by_products": Bug("GN-10", "the weight's gradient multiplies rows of others by 0", masked_by_products),
    "never_written": Bug("GN-10", "the gradient of an expert without rows is not written", never_written),
    "no_rows_fail": Bug("GN-11", "a launch of zero blocks", plant.fails_if(lambda c: c.x.numel() == 0)),
    "cuts_what_is_too_long": plant.lenient("GN-12", "sizes never looked at: a long weight is cut", with_cut_weight),
    "sorts_in_place": Bug(
        "GN-13", "ends are made to rise where they lie", plant.writes(lambda c: c.ends.copy_(c.ends.flip(0)))
    ),
    "differs_from_call_to_call": Bug(
        "GN-14",
        "another digit at every second call (floating atomics)",
        plant.alternates(lambda r, c: plant.lower(r(c))),
    ),
    "splits_few_rows": Bug(
        "GN-15",
        "K is split over programs where an expert has few rows",
        another_order(lambda rows: (rows > 0) & (rows < 16)),
    ),
    "another_tile_for_many_rows": Bug(
        "GN-15", "a block size that changes at 128 rows of an expert", another_order(lambda rows: rows >= 128)
    ),
    "an_order_of_its_own": Bug(
        "GN-16", "a row's bits do not depend on the batch, and are not those of linear", another_order(lambda n: n > 0)
    ),
    "reads_ends_on_the_host": plant.reads_a_value("GN-17", lambda c: c.ends),
}
