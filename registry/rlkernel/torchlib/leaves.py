"""A call as one line of text and its leaves: what a node of a compiled graph can hold.

    logits=grad(t[0]), ids=t[1], temperature=f[0], mask=None, entropy=True,
    support=new('rlkernel_core.spec.logprob:Support', ids=t[2], offsets=t[3]), ...

`t`, `i` and `f` are the tensors, integers and floats of the call, in order; `grad` marks a tensor that a gradient is
wanted for; everything else is constant. In front stands `autocast('cpu', 'bfloat16'): ` where the call is made under
autocast. Tensors nested in tuples, dicts and dataclasses so flow through a graph as tensors. Results go the other way:
an outline of text and a list of tensors.

Functions marked as traced are read by Dynamo and use only what it can follow; those marked as constant run as they are
while it traces. Knows no backend.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentTypeError

# An outline is nested tuples of text alone: Dynamo may turn a number that it reads from a tuple into a symbol.
Outline = tuple[Any, ...]
Reader = Callable[..., dict[str, Any]]  # (tensors, integers, floats, grad) -> arguments by name
_REMEMBERED: Final = 4096
_AUTOCAST: Final = re.compile(r"^autocast\('(\w+)', '(\w+)'\): ")
F = TypeVar("F", bound=Callable[..., Any])


def constant(run: F) -> F:
    """Have Dynamo call this function, with constants, and take what it returns for one."""
    marked: F = torch.compiler.assume_constant_result(run)  # type: ignore[no-untyped-call]
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
    """The text of an argument, its leaves appended; traced.

    Args:
        value: the argument.
        leaves: receives tensors, integers and floats.
        grad: whether tensors that require a gradient are to be marked.
    """
    if isinstance(value, Tensor):
        leaves.tensors.append(value)
        at = f"t[{len(leaves.tensors) - 1}]"
        return f"grad({at})" if grad and value.requires_grad else at
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        leaves.integers.append(value)
        return f"i[{len(leaves.integers) - 1}]"
    if isinstance(value, float):
        leaves.floats.append(value)
        return f"f[{len(leaves.floats) - 1}]"
    if isinstance(value, (torch.dtype, torch.device)):
        return f"torch_constant({str(value).removeprefix('torch.')!r})"
    if isinstance(value, dict):
        return "{" + ", ".join([f"{k!r}: {write(v, leaves, grad=grad)}" for k, v in value.items()]) + "}"
    names = fields_of(type(value))
    if names:
        parts = [f"{name}={write(getattr(value, name), leaves, grad=grad)}" for name in names]
        return f"new({path_of(type(value))!r}, {', '.join(parts)})"
    if isinstance(value, (tuple, list)):
        return "(" + "".join([write(v, leaves, grad=grad) + ", " for v in value]) + ")"
    if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
        return f"group({value.group_name!r})"
    return f"opaque({path_of(type(value))!r})"


def surroundings(kind: str) -> str:
    """The text in front of a call that is made under autocast on this type of device; traced."""
    if not torch.is_autocast_enabled(kind):
        return ""
    return f"autocast({kind!r}, {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')!r}): "


def autocast(text: str) -> AbstractContextManager[Any]:
    """What a call was made under: torch runs nodes without autocast once it has traced them."""
    found = _AUTOCAST.match(text)
    return torch.autocast(found[1], torch_constant(found[2])) if found else nullcontext()


@lru_cache(_REMEMBERED)
def reader(text: str) -> Reader:
    """The arguments that a text stands for, as a function of tensors, integers, floats and of what `grad` does."""
    source = f"dict({_AUTOCAST.sub('', text)})"
    tree = ast.parse(source, mode="eval")
    odd = next((node for node in ast.walk(tree) if not isinstance(node, _DATA)), None)
    calls = {getattr(node.func, "id", "?") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if odd is not None or calls - {"dict", "grad", *_WORDS}:
        raise ArgumentTypeError("call", text, "is no text of a call", "Let rlkernel write the graph's nodes.")
    found: Reader = eval(f"lambda t, i, f, grad: {source}", {**_WORDS})  # noqa: S307 checked above to hold data alone
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


def _new(path: str, **values: Any) -> Any:
    return class_at(path)(**values)


def _group(name: str) -> Any:
    """A process group by name, as graphs of torch hold them."""
    find: Any = torch.distributed.distributed_c10d
    return find._resolve_process_group(name)  # noqa: SLF001 as torch's functional collectives do


def _opaque(path: str) -> Any:
    raise ArgumentTypeError(
        "argument", path, "cannot be part of a compiled graph", "Bind the call outside: run = op.bind(...)."
    )


_WORDS: Final[dict[str, Callable[..., Any]]] = {
    "new": _new,
    "torch_constant": torch_constant,
    "group": _group,
    "opaque": _opaque,
}
_DATA: Final = (
    ast.Expression,
    ast.Call,
    ast.keyword,
    ast.Name,
    ast.Load,
    ast.Subscript,
    ast.Constant,
    ast.Tuple,
    ast.Dict,
)
