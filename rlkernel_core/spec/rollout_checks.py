"""Checks of what the methods of a rollout buffer are given, shared by all implementations.

Each runs before anything is changed, so that a refused call loses nothing. They look at metadata and at Python values
only: none reads a value off the device, so that `append` may be captured. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from rlkernel_core.spec.rollouts import STATUS, Field, GroupRules, Slots

if TYPE_CHECKING:
    from torch import Tensor


def check_reserve(limits: Any, groups: Any, version: Any, most: int) -> tuple[list[int], list[int]]:
    """One limit and one group for each sequence; `most` is the largest limit of one."""
    wanted = _integers("groups", groups, at_least=0)
    if isinstance(limits, int) and not isinstance(limits, bool):
        if not wanted:
            raise ArgumentError("groups", [], "must name a group for each sequence", "Pass [0, 0] for two.")
        limits = [limits] * len(wanted)
    each = _integers("limits", limits, at_least=1, at_most=most)
    if len(each) != len(wanted) or not each:
        raise ArgumentError("limits", each, f"must give one limit for each of {len(wanted)} groups", "Match them.")
    checks.integer("version", version, at_least=0)
    return each, wanted


def check_slots(slots: Any, device: Any) -> None:
    """Slots as `reserve` returns them."""
    checks.instance("slots", slots, Slots)
    checks.tensor("slots.ids", slots.ids, ndim=1, kind="integer")
    checks.tensor("slots.stamps", slots.stamps, kind="integer")
    checks.shape("slots.stamps", slots.stamps, slots.ids.shape, "slots.ids")
    for name, x in (("slots.ids", slots.ids), ("slots.stamps", slots.stamps)):
        _on(name, x, device)


def check_append(
    slots: Any, values: Any, fields: Mapping[str, Field], *, cu_seqlens: Any, alive: Any, device: Any
) -> None:
    """One token for each slot, or packed ones, of every field that has no default."""
    check_slots(slots, device)
    rows = slots.ids.shape[0]
    if cu_seqlens is not None:
        checks.shape("cu_seqlens", checks.tensor("cu_seqlens", cu_seqlens, kind="integer"), (rows + 1,), "slots + 1")
        _on("cu_seqlens", cu_seqlens, device)
    if alive is not None:
        checks.shape("alive", checks.tensor("alive", alive, kind="bool"), (rows,), "slots")
        _on("alive", alive, device)
    if not isinstance(values, Mapping):
        raise ArgumentTypeError("values", checks.describe(values), "must map fields to tensors", "Pass {'token': x}.")
    for name in values:
        if name not in fields:
            raise UnknownNameError("field", name, fields)
    tokens = rows if cu_seqlens is None else None
    for name, field in fields.items():
        if name in values:
            tokens = _check_value(f"values[{name!r}]", values[name], field, tokens, device)
        elif field.default is None or (cu_seqlens is not None and not values):
            raise ArgumentError("values", list(values), f"must give field {name!r}", "Or give it a default.")


def _check_value(name: str, value: Any, field: Field, tokens: int | None, device: Any) -> int:
    """One field's values; how many tokens they are of."""
    whole = field.dtype.startswith(("int", "uint", "bool"))
    x = checks.tensor(name, value, ndim=1 + len(field.shape), kind="real")
    if whole and x.is_floating_point():
        problem = f"is stored as {field.dtype}, which would cut it off"
        raise ArgumentTypeError(name, checks.describe(x), problem, "Cast it with .long(), or change the field's dtype.")
    found = x.shape[0] if tokens is None else tokens
    checks.shape(name, x, (found, *field.shape), "the tokens of this call")
    _on(name, x, device)
    return found


def check_status(status: Any, count: int) -> list[str]:
    """How each of the sequences ended."""
    each = [status] * count if isinstance(status, str) else status
    if not isinstance(each, Sequence) or len(each) != count:
        raise ArgumentError("status", checks.describe(status), f"must be one name or {count}", "Match slots.")
    return [checks.choice("status", name, [s for s in STATUS if s != "filler"]) for name in each]


def check_rules(rules: Any, version: Any) -> None:
    """Rules, or None; the newest version, or None."""
    if rules is not None:
        checks.instance("rules", rules, GroupRules)
        checks.flags(**{"rules.complete": rules.complete, "rules.distinct_rewards": rules.distinct_rewards})
        checks.integer("rules.min_valid", rules.min_valid, at_least=0)
        if rules.max_age is not None:
            checks.integer("rules.max_age", rules.max_age, at_least=0)
    if version is not None:
        checks.integer("version", version, at_least=0)


def check_discard(groups: Any, reason: Any, known: Iterable[int]) -> list[int]:
    """Groups that are held, each once."""
    if not isinstance(reason, str) or not reason:
        raise ArgumentTypeError("reason", checks.describe(reason), "must be a few words", "Pass 'prompt withdrawn'.")
    if isinstance(groups, Iterable) and not isinstance(groups, str | bytes):
        groups = list(groups)
    wanted, held = list(dict.fromkeys(_integers("groups", groups, at_least=0))), set(known)
    for group in wanted:
        if group not in held:
            raise UnknownNameError("group", str(group), map(str, held))
    return wanted


def check_path(path: Any) -> str:
    """A file's name."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ArgumentTypeError("path", checks.describe(path), "must be the name of a file", "Pass 'rollouts.pt'.")
    return str(os.fspath(path))


def _integers(name: str, x: Any, *, at_least: int, at_most: int = (1 << 63) - 1) -> list[int]:
    """A sequence of integers within the bounds."""
    if not isinstance(x, Sequence) or isinstance(x, str | bytes):
        raise ArgumentTypeError(
            name, checks.describe(x), "must be a sequence of integers", "Pass a list of Python ints."
        )
    return [checks.integer(name, value, at_least=at_least, at_most=at_most) for value in x]


def _on(name: str, x: Tensor, device: Any) -> None:
    if x.device != device:
        raise ArgumentError(name, checks.describe(x), f"must be on the buffer's device, {device}", "Move it there.")
