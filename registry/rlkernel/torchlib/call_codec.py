"""A call as JSON and its leaves: what a node of a compiled graph can hold.

    {"logits": {"g": 0}, "ids": {"t": 1}, "temperature": {"f": 0}, "mask": null, "entropy": true,
     "support": {"new": "rlkernel_core.spec.logprob:Support", "ids": {"t": 2}, "offsets": {"t": 3}}, ...}

`t`, `i` and `f` number the tensors, integers and floats of the call, in order; `g` is a tensor that a gradient is
wanted for; everything else is constant, a `QuantSpec` with its integers: the format fixes these. Under "autocast"
stands what the call was made under, if anything. Tensors nested in tuples, dicts and dataclasses so flow through a
graph as tensors. Results go the other way: an outline of text and a list of tensors.

Functions marked as traced are read by Dynamo and use only what it can follow; those marked as constant run as they are
while it traces. Knows no backend.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentTypeError
from rlkernel_core.quant.spec import FORMATS, QuantSpec

# An outline is nested tuples of text alone: Dynamo may turn a number that it reads from a tuple into a symbol.
Outline = tuple[Any, ...]
Wanted = Callable[[Tensor], Tensor]
_REMEMBERED: Final = 4096
_SPEC: Final = f"{QuantSpec.__module__}:{QuantSpec.__qualname__}"
_SPEC_FIELDS: Final = tuple(f.name for f in dataclasses.fields(QuantSpec) if f.name not in {"rows", "group"})
F = TypeVar("F", bound=Callable[..., Any])


def constant(run: F) -> F:
    """Have Dynamo call this function, with constants, and take what it returns for one."""
    marked: F = torch.compiler.assume_constant_result(run)
    return marked


@constant
def fields_of(cls: type) -> tuple[str, ...]:
    """Names to take a container apart by; empty where it is none."""
    return _fields_of(cls)


@cache
def _fields_of(cls: Hashable) -> tuple[str, ...]:
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return tuple(f.name for f in dataclasses.fields(cls) if f.init)
    return tuple(getattr(cls, "_fields", ()))


@constant
def path_of(cls: type) -> str:
    """`package.module:Name`."""
    return f"{cls.__module__}:{cls.__qualname__}"


@constant
def class_at(path: str) -> type:
    """Inverse of `path_of`, for the containers that `fields_of` knows."""
    module, _, name = path.partition(":")
    cls: Any = import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        raise TypeError(f"{path} is no dataclass")
    return cls


@constant
def torch_constant(name: str) -> Any:
    """A dtype by name, or a device by its string."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else torch.device(name)


class Leaves:
    """The leaves of a call in order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.integers: list[int] = []
        self.floats: list[float] = []


def write(value: Any, leaves: Leaves, *, grad: bool) -> str:
    """The JSON of an argument, its leaves appended; traced.

    Args:
        value: the argument.
        leaves: receives tensors, integers and floats.
        grad: whether tensors that require a gradient are to be marked.
    """
    if isinstance(value, Tensor):
        leaves.tensors.append(value)
        return f'{{"{"g" if grad and value.requires_grad else "t"}": {len(leaves.tensors) - 1}}}'
    if value is None or isinstance(value, (bool, str)):
        return quoted(value)
    if isinstance(value, int):
        leaves.integers.append(value)
        return f'{{"i": {len(leaves.integers) - 1}}}'
    if isinstance(value, float):
        leaves.floats.append(value)
        return f'{{"f": {len(leaves.floats) - 1}}}'
    if isinstance(value, (torch.dtype, torch.device)):
        return f'{{"torch": {quoted(str(value).removeprefix("torch."))}}}'
    if isinstance(value, dict):
        pairs = [f"[{write(k, leaves, grad=grad)}, {write(v, leaves, grad=grad)}]" for k, v in value.items()]
        return f'{{"dict": [{", ".join(pairs)}]}}'
    names = fields_of(type(value))
    if names:
        return _container(value, names, leaves, grad=grad)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join([write(v, leaves, grad=grad) for v in value])}]"
    if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
        return f'{{"group": {quoted(value.group_name)}}}'
    return f'{{"opaque": {quoted(path_of(type(value)))}}}'


def _container(value: Any, names: tuple[str, ...], leaves: Leaves, *, grad: bool) -> str:
    """The JSON of a dataclass or a named tuple; traced."""
    # By name: of a class that `class_at` gave, Dynamo's guards cannot look up where it comes from.
    if path_of(type(value)) == _SPEC and (value.rows, value.group) == sizes_of(value.format):
        parts = [f'"{name}": {quoted(getattr(value, name))}' for name in _SPEC_FIELDS]
        return f'{{"spec": {{{", ".join(parts)}}}}}'
    parts = [f'"{name}": {write(getattr(value, name), leaves, grad=grad)}' for name in names]
    return f'{{"new": {quoted(path_of(type(value)))}, {", ".join(parts)}}}'


@constant
def sizes_of(format: str) -> tuple[int, int]:  # noqa: A002  the field's noun
    """Rows and columns that share a scale; -1 where there is no such format."""
    row = FORMATS.get(format)
    return (row.spec.rows, row.spec.group) if row else (-1, -1)


@constant
def quoted(value: str | bool | None) -> str:
    """A text, a flag or None in JSON."""
    return json.dumps(value)


def surroundings(kind: str) -> str:
    """A first entry for a call that is made under autocast on this type of device, else nothing; traced."""
    if not torch.is_autocast_enabled(kind):
        return ""
    return f'"autocast": ["{kind}", "{str(torch.get_autocast_dtype(kind)).removeprefix("torch.")}"], '


@lru_cache(_REMEMBERED)
def read(text: str) -> dict[str, Any]:
    """The JSON of a call, with what it was made under as "autocast" (None outside autocast).

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ArgumentTypeError("call", text, "is no text of a call", "Let rlkernel write the graph's nodes.")
    return {"autocast": None, **found}


def autocast(text: str) -> AbstractContextManager[Any]:
    """What a call was made under: torch runs nodes without autocast once it has traced them."""
    under = read(text)["autocast"]
    return torch.autocast(under[0], torch_constant(under[1])) if under else nullcontext()


def arguments(
    text: str, tensors: Sequence[Tensor], integers: Sequence[int], floats: Sequence[float], grad: Wanted
) -> dict[str, Any]:
    """The arguments that a text stands for; `grad` makes of a tensor one that a gradient is wanted for."""

    def made(node: Any) -> Any:
        if isinstance(node, list):
            return tuple(made(item) for item in node)
        if not isinstance(node, dict):
            return node
        kind = next(iter(node))
        at = node[kind]
        if kind in {"t", "g"}:
            return tensors[at] if kind == "t" else grad(tensors[at])
        if kind in {"i", "f"}:
            return (integers if kind == "i" else floats)[at]
        if kind == "new":
            return class_at(at)(**{name: made(part) for name, part in node.items() if name != "new"})
        if kind == "dict":
            return {made(k): made(v) for k, v in at}
        if kind in _WORDS:
            return _WORDS[kind](at)
        raise ArgumentTypeError("call", text, f"holds {kind!r}, which stands for nothing", "Trace the graph again.")

    return {name: made(node) for name, node in read(text).items() if name != "autocast"}


def marked(text: str) -> list[int]:
    """Positions of the tensors that a gradient is wanted for, in the order in which the text names them."""
    found: list[int] = []

    def look(node: Any) -> None:
        if isinstance(node, dict) and "g" in node:
            found.append(node["g"])
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            look(part)

    look(read(text))
    return found


def outline(result: Any) -> tuple[Outline, list[Tensor]]:
    """A result as an outline of text and its tensors."""
    tensors: list[Tensor] = []
    return _outline(result, tensors), tensors


def _outline(value: Any, tensors: list[Tensor]) -> Outline:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", str(len(tensors) - 1))
    if value is None:
        return ("none",)
    if isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, str(int(value)) if isinstance(value, bool | int) else str(value))
    if isinstance(value, (torch.dtype, torch.device)):
        return ("constant", str(value).removeprefix("torch."))
    cls: type = type(value)
    if names := _fields_of(cls):
        return ("new", path_of(cls), names, tuple([_outline(getattr(value, n), tensors) for n in names]))
    if isinstance(value, dict):
        return ("dict", tuple(value), tuple(_outline(v, tensors) for v in value.values()))
    if isinstance(value, (tuple, list)):
        return ("tuple", tuple(_outline(v, tensors) for v in value))
    raise ArgumentTypeError("result", path_of(cls), "cannot leave a compiled graph", "Call it outside torch.compile.")


def rebuild(outline: Outline, tensors: Sequence[Tensor]) -> Any:
    """Inverse of `outline`; traced."""
    kind = outline[0]
    if kind == "tensor":
        return tensors[int(outline[1])]
    if kind == "none":
        return None
    if kind == "new":
        values = [rebuild(node, tensors) for node in outline[3]]
        return class_at(outline[1])(**dict(zip(outline[2], values, strict=True)))
    if kind == "dict":
        return dict(zip(outline[1], [rebuild(node, tensors) for node in outline[2]], strict=True))
    if kind == "tuple":
        return tuple([rebuild(node, tensors) for node in outline[1]])
    if kind == "constant":
        return torch_constant(outline[1])
    if kind == "bool":
        return outline[1] == "1"
    return int(outline[1]) if kind == "int" else float(outline[1]) if kind == "float" else outline[1]


def same(tensor: Tensor) -> Tensor:
    """What `grad` does where no gradient is recorded."""
    return tensor


def leaf(tensor: Tensor) -> Tensor:
    """The same values, as a tensor that a gradient is wanted for."""
    return tensor.detach().requires_grad_()


def _group(name: str) -> Any:
    """A process group by name, as graphs of torch hold them."""
    find: Any = torch.distributed.distributed_c10d
    return find._resolve_process_group(name)  # noqa: SLF001 as torch's functional collectives do


def _spec(fields: dict[str, Any]) -> QuantSpec:
    """A spec by what its format does not fix."""
    return dataclasses.replace(FORMATS[fields["format"]].spec, **fields)


def _opaque(path: str) -> Any:
    raise ArgumentTypeError(
        "argument", path, "cannot be part of a compiled graph", "Bind the call outside: run = op.bind(...)."
    )


_WORDS: Final[dict[str, Callable[[Any], Any]]] = {
    "torch": torch_constant, "group": _group, "opaque": _opaque, "spec": _spec,
}  # fmt: skip
