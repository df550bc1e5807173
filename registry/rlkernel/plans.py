"""Plans: what runs for calls of one shape, made once and found again by one lookup.

A key holds everything that a check, a decision or a preparation may look at: of tensors dtype, device, sizes, strides,
alignment and whether a gradient is wanted; of numbers, flags and names their values. Left out are values on the device
and the integers that a spec calls `varying`, such as the step of a draw, of which a key knows only how wide they are:
whether a kernel that takes 32 bits takes them, or one that takes 64.

Plans lie in one bounded table per operator and policy scope. `rlkernel status` shows how many there are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, final

from rlkernel_core.decision import Decision
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec

if TYPE_CHECKING:
    from rlkernel.audit import Audited
    from rlkernel_core.gradients import Pair

# Plans that a table keeps. A run with packed batches meets a new number of tokens at almost every step: the oldest
# quarter goes when a table is full.
MOST: Final = 4096
ALIGNMENT: Final = 16  # bytes; kernels are compiled for pointers that are multiples of it, or for any
# In the place of address 0, which a tensor spread over ranks has: it must find no plan of a tensor that is here.
NOWHERE: Final = 0.5
_PLAIN: Final = frozenset({bool, int, float, str, type(None), complex})


@final
@dataclass(slots=True, eq=False)
class Choice:
    """An implementation that was chosen for some kind of call: why, and how often it has run."""

    function: Callable[[Any], Any]
    prepared: bool  # whether `function` takes the first call of a shape and returns what runs calls of that shape
    decision: Decision
    calls: int = 0
    audit: Audited | None = None  # what was found where the policy says `audit`
    pair: type[Pair[Any, Any]] | None = None  # forward and backward of calls that want gradients

    def plan(self, call: Any, *, grad: bool) -> Plan:
        """What runs calls of this shape, whether they want gradients or not."""
        if grad and self.pair is not None:
            return Plan(self.pair(call), self)
        return Plan(self.function(call) if self.prepared else self.function, self)


@final
@dataclass(slots=True, eq=False)
class Plan:
    """What runs for calls of one shape."""

    run: Callable[[Any], Any]
    choice: Choice


class Table(dict[Any, Plan]):
    """Plans of one operator under one policy, by the key of their calls."""

    __slots__ = ("evicted", "made")

    def __init__(self) -> None:
        super().__init__()
        self.made = self.evicted = 0

    def forget(self) -> None:
        """Drop all plans, and what is known of earlier ones."""
        self.clear()
        self.made = self.evicted = 0

    def keep(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        """Store a plan, at the cost of the oldest ones where there are too many."""
        if len(self) >= MOST:
            for old in list(self)[: MOST // 4]:
                self.pop(old, None)
            self.evicted += MOST // 4
        self.made += 1
        return self.setdefault(key, plan)


def key_of(x: Any) -> Any:
    """What a plan may depend on in an argument.

    Raises:
        TypeError: it is of a type that no operator takes, or cannot be part of a key; its call is planned anew.
    """
    kind = x.__class__
    if kind in _PLAIN:
        return kind, x
    if _is_tensor(kind):
        return x.dtype, x.shape, x.stride(), x.device, (x.data_ptr() or NOWHERE) % ALIGNMENT, x.requires_grad
    if kind is QuantTensor:
        return x.plan_key
    if kind is tuple or kind is list:
        return kind, *map(key_of, x)
    if isinstance(x, Mapping):
        return kind, *((key_of(k), key_of(v)) for k, v in x.items())
    if names := _fields(kind):
        return kind, *[key_of(getattr(x, name)) for name in names]
    if hasattr(kind, "group_name"):  # a process group: itself, since another may have its name, rank and size
        return kind, x
    if isinstance(x, enum.Enum) or kind.__module__ == "torch":  # a dtype or a device
        return kind, x
    raise TypeError(f"{kind.__name__} is no part of a key")


@cache
def _is_tensor(kind: type) -> bool:
    return hasattr(kind, "data_ptr") and hasattr(kind, "stride")


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()


def parts(spec: OpSpec[Any, Any], names: Iterable[str], of: str = "") -> list[str]:
    """Expressions that make up the key of some arguments, which are called `of` + their name.

    They need what `names_in_parts` gives. The keys of tensors and weights are written out, as `key_of` makes them:
    every call has one, and a function that is called for each costs more than what it looks at.
    """
    out: list[str] = []
    for name in names:
        x, annotation = of + name, str(spec.parameters[name].annotation)
        if annotation == "Tensor":
            out += _tensor_parts(x)
            continue
        key = f"_key_of({x})"
        if "Tensor" in annotation.split(" | "):
            key = f"({', '.join(_tensor_parts(x))}) if {x}.__class__ is _Tensor else {key}"
        if annotation == "Tensor | QuantTensor":  # a weight, of which most are parameters
            key = f"{x}.plan_key if {x}.__class__ is _QuantTensor else ({', '.join(_tensor_parts(x))})"
        if annotation == "QuantTensor":
            key = f"{x}.plan_key if {x}.__class__ is _QuantTensor else {key}"
        if name in spec.varying:
            key = f"(0 <= {x} < {2**31}) + (0 <= {x} < {2**64}) if {x}.__class__ is int else {key}"
        out.append(key)
    return out


def _tensor_parts(x: str) -> list[str]:
    aligned = f"({x}.data_ptr() or {NOWHERE}) % {ALIGNMENT}"
    return [*(f"{x}.{name}" for name in ("dtype", "shape", "stride()", "device")), aligned, f"{x}.requires_grad"]


def names_in_parts() -> dict[str, Any]:
    """The names that the expressions of `parts` need."""
    import torch

    return {"_key_of": key_of, "_Tensor": torch.Tensor, "_QuantTensor": QuantTensor, "_grad": torch.is_grad_enabled}


@cache
def key_function(op: str) -> Callable[[Any], Any]:
    """The key of a record as a function.

    It raises AttributeError, TypeError or RuntimeError for a call that has no key: an argument is of a wrong type, or a
    tensor without storage.
    """
    scope = names_in_parts()
    found = ", ".join(parts(OPERATORS[op], OPERATORS[op].parameters, "call."))
    source = f"def key(call):\n    return ({found}, _grad())\n"
    exec(compile(source, f"<rlkernel.{op}: key>", "exec"), scope)  # noqa: S102 as dataclasses do; the source is ours
    function: Callable[[Any], Any] = scope["key"]
    return function


def key_or_none(op: str, call: Any) -> Any:
    """The key of a record; None where it has none, or where every call of the operator is planned anew."""
    if not OPERATORS[op].planned:
        return None
    try:
        key = key_function(op)(call)
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return key
