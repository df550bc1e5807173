"""Planted bugs in what logprob@1 and linear_logprob@1 do with several ids per row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.listed_ids import ids_per_row, is_ragged
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.sampling import TokenLists


def several(call: Any) -> bool:
    """Whether a call lists several ids per row, of each as many."""
    rows = call.logits if hasattr(call, "logits") else call.hidden
    return ids_per_row(call.ids, rows) is not None


def ragged(call: Any) -> bool:
    """Whether a call has lists of any length, some entries in them."""
    return is_ragged(call.ids) and call.ids.ids.shape[0] > 2


def in_lists(how: How) -> How:
    """A bug in calls that list several ids per row."""
    return plant.where(several, how)


def naive_difference(_: Any, out: LogprobResult) -> Tensor:
    lse = out.lse[..., None]  # type: ignore[index]  # plain torch has it
    return (out.logprob + lse) - lse


def first_of_list(_: Any, out: LogprobResult) -> Tensor:
    first = out.logprob[..., :1].detach()
    return out.logprob + (first.expand_as(out.logprob) - out.logprob.detach()).nan_to_num()


def repeated(ids: Tensor) -> Tensor:
    """Ids that stand further left in their row too."""
    same = ids[..., :, None] == ids[..., None, :]
    return same.tril(-1).any(-1)


def repeats_get_no_gradient(call: Any, out: LogprobResult) -> Tensor:
    return torch.where(repeated(call.ids), out.logprob.detach(), out.logprob)


def gradient_of_the_first(_: Any, out: LogprobResult) -> Tensor:
    return torch.cat((out.logprob[..., :1], out.logprob[..., 1:].detach()), -1)


def padding_from_the_end(right: Run, call: Any) -> LogprobResult:
    V = (call.logits if hasattr(call, "logits") else call.weight).shape[-1 if hasattr(call, "logits") else 0]
    return right(replace(call, ids=torch.where(call.ids == -1, V - 1, call.ids)))


def spoiled_row(_: Any, out: LogprobResult) -> Tensor:
    return torch.where(out.invalid.any(-1, keepdim=True), torch.nan, out.logprob)  # type: ignore[union-attr]


def flagged_row(_: Any, out: LogprobResult) -> Tensor:
    return out.invalid.any(-1, keepdim=True).expand_as(out.invalid)  # type: ignore[union-attr,arg-type]


def padding_takes_a_gradient(call: Any, out: LogprobResult) -> Tensor:
    operand = call.logits if hasattr(call, "logits") else call.hidden
    total = 0.0 * operand.nan_to_num().sum(-1, keepdim=True).to(out.logprob.dtype)
    return torch.where(call.ids == -1, out.logprob + total, out.logprob)


def refuses_padding(right: Run, call: Any) -> LogprobResult:
    if call.validate and bool((call.ids == -1).any()):
        raise ArgumentError("ids", -1, "must lie in the vocabulary", "Correct the value.")
    return right(call)


def shifted_offsets(call: Any) -> TokenLists:
    offsets = call.ids.offsets
    return TokenLists(call.ids.ids, torch.cat((offsets[:1], (offsets[1:-1] + 1).clamp(max=offsets[-1]), offsets[-1:])))


def places(call: Any) -> tuple[Tensor, Tensor]:
    """[M] the row of each entry, as many as there are beyond the last list; and whether it is one of these."""
    at = torch.arange(call.ids.ids.shape[0], device=call.ids.ids.device)
    row = torch.searchsorted(call.ids.offsets.long(), at, right=True) - 1
    return row, row >= call.ids.offsets.shape[0] - 1


def beyond_the_lists(call: Any, out: LogprobResult) -> Tensor:
    return torch.where(places(call)[1], -1.0, out.logprob)


def repeats_of_a_list_get_no_gradient(call: Any, out: LogprobResult) -> Tensor:
    ids, (row, _) = call.ids.ids, places(call)
    same = (ids[:, None] == ids) & (row[:, None] == row)
    return torch.where(same.tril(-1).any(-1), out.logprob.detach(), out.logprob)


def empty_lists_get_no_gradient(call: Any, out: LogprobResult) -> Any:
    empty = (call.ids.offsets.diff() == 0).view(out.lse.shape)  # type: ignore[union-attr]  # plain torch has it
    return torch.where(empty, out.lse.detach(), out.lse)  # type: ignore[arg-type,union-attr]


def entries_beyond_take_a_gradient(call: Any, out: LogprobResult) -> Tensor:
    operand = call.logits if hasattr(call, "logits") else call.hidden
    zero = 0.0 * operand.nan_to_num().sum().to(out.logprob.dtype)
    return torch.where(places(call)[1], out.logprob + zero, out.logprob)


def padding_of_a_list_from_the_end(right: Run, call: Any) -> LogprobResult:
    V = (call.logits.shape[-1] if hasattr(call, "logits") else call.weight.shape[0]) - 1
    return right(replace(call, ids=replace(call.ids, ids=torch.where(call.ids.ids == -1, V, call.ids.ids))))


def bugs_of_lists(value: str, gradient: str) -> dict[str, Bug]:
    """Bugs in calls that have lists of any length, by name, in the clauses of one of the operators."""

    def planted(clause: str, wrong: str, how: How) -> Bug:
        return Bug(clause, wrong, plant.where(ragged, how))

    return {
        "shifted_offsets": planted(value, "each list ends an entry too late", plant.given(ids=shifted_offsets)),
        "beyond_the_lists": planted(
            value, "entries beyond the last offset are computed", plant.returns(logprob=beyond_the_lists)
        ),
        "repeats_of_a_list_get_no_gradient": planted(
            gradient,
            "a store for each entry: of a repeated one the last wins",
            plant.returns(logprob=repeats_of_a_list_get_no_gradient),
        ),
        "empty_lists_get_no_gradient": planted(
            gradient,
            "rows with an empty list are left out backward",
            plant.returns(lse=empty_lists_get_no_gradient),
        ),
        "entries_beyond_take_a_gradient": planted(
            gradient,
            "entries beyond the last offset multiplied by 0, so that NaN comes through",
            plant.returns(logprob=entries_beyond_take_a_gradient),
        ),
        "padding_of_a_list_from_the_end": planted(
            gradient, "-1 in a list read as the last of the vocabulary", padding_of_a_list_from_the_end
        ),
    }


def bugs(value: str, gradient: str, absent: str) -> dict[str, Bug]:
    """Bugs by name, in the clauses of one of the operators: on values, on gradients, and on absent ids."""

    def returned(clause: str, wrong: str, **fields: Any) -> Bug:
        return Bug(clause, wrong, in_lists(plant.returns(**fields)))

    return {
        "lists_by_difference": returned(
            value, "z - lse for listed ids, which rounds to 0 on confident rows", logprob=naive_difference
        ),
        "first_of_list": returned(value, "the first id of a list for all of it", logprob=first_of_list),
        "repeats_get_no_gradient": returned(
            gradient, "a store for each listed id: of a repeated one the last wins", logprob=repeats_get_no_gradient
        ),
        "gradient_of_the_first": returned(
            gradient, "gradients of the first listed id alone", logprob=gradient_of_the_first
        ),
        "padding_from_the_end": Bug(absent, "-1 read as the last of the vocabulary", in_lists(padding_from_the_end)),
        "spoiled_row": returned(absent, "one id out of range spoils its row", logprob=spoiled_row),
        "flagged_row": returned(absent, "one flag for all ids of a row", invalid=flagged_row),
        "padding_takes_a_gradient": returned(
            absent, "padding multiplied by 0, so that NaN comes through", logprob=padding_takes_a_gradient
        ),
    }


OF_LOGITS: Final = {
    **bugs("LP-28", "LP-29", "LP-30"),
    "lists_are_not_validated": Bug("LP-30", "validate=True looks at no list", in_lists(plant.given(validate=False))),
    "refuses_padding": Bug("LP-30", "validate=True refuses -1 in a list", in_lists(refuses_padding)),
    **bugs_of_lists("LP-37", "LP-38"),
    "offsets_are_not_validated": Bug(
        "LP-38", "validate=True looks at no offsets", plant.where(ragged, plant.given(validate=False))
    ),
}
OF_A_HEAD: Final = {**bugs("LL-33", "LL-34", "LL-35"), **bugs_of_lists("LL-42", "LL-43")}
