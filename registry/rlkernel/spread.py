"""Tensors that are spread over ranks: a DTensor in a call is refused by name, with what to pass in its place.

A DeviceMesh of one dimension in the place of a group stands for that dimension's group (`group_of`); one of more is
refused with the dimensions that it has.
Nothing is taken apart here. The same Shard(0) of a head means two things: under FSDP ranks have tokens of their own and
the head is to be gathered; under tensor parallelism they have the same tokens, and each its part of the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from rlkernel_core.errors import ArgumentTypeError

_MODULE: Final = "torch.distributed.tensor"
_MESHES: Final = "torch.distributed.device_mesh"


def group_of(x: Any) -> Any:
    """The process group of a DeviceMesh of one dimension; anything else as it is."""
    meshes: Any = sys.modules.get(_MESHES)
    if meshes is not None and type(x) is meshes.DeviceMesh and x.ndim == 1:
        return x.get_group()
    return x


def refuse(call: Any) -> None:
    """Refuse a call of which an argument is a DTensor, or a DeviceMesh that `group_of` has left.

    Raises:
        ArgumentTypeError: it names the argument, its placements and the two ways on, or the mesh's dimensions.
    """
    meshes: Any = sys.modules.get(_MESHES)
    if meshes is None:  # nobody can have made a mesh, and no DTensor is without one
        return
    for name, x in _arguments(call):
        if type(x) is meshes.DeviceMesh:  # isinstance is no plain one, and torch.compile cannot trace it
            over = x.mesh_dim_names
            each = " or ".join(f"mesh[{dim!r}]" if over else f"mesh.get_group({dim})" for dim in over or range(x.ndim))
            text = f"must be a process group or a mesh of one dimension, and has {x.ndim}"
            raise ArgumentTypeError(name, repr(x), text, f"Pass {each}.")
        found = described(x)
        if found is not None:
            raise ArgumentTypeError(
                name,
                found,
                "must be a tensor of this rank",
                f"Pass {name}.full_tensor(), as under FSDP, whose ranks have tokens of their own; or, where ranks have "
                f"the same tokens and each a part of the vocabulary, {name}.to_local() with "
                f"group={name}.device_mesh.get_group(), to operators that take a group.",
            )


def described(x: object) -> str | None:
    """Shape, placements and mesh of a DTensor, for messages; None for anything else."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or not isinstance(x, module.DTensor):
        return None
    placed = ", ".join(map(str, x.placements))
    over = x.device_mesh.mesh_dim_names or tuple(range(x.device_mesh.ndim))
    return f"a DTensor {list(x.shape)}, ({placed}) over mesh ({', '.join(map(str, over))})"


def _arguments(call: Any) -> Iterator[tuple[str, Any]]:
    """Arguments of a record by name, those in a list or a table too."""
    for name in call.__dataclass_fields__:
        x = getattr(call, name)
        if isinstance(x, list | tuple):
            yield from ((f"{name}[{i}]", each) for i, each in enumerate(x))
        elif isinstance(x, dict):
            yield from ((f"{name}[{key!r}]", each) for key, each in x.items())
        else:
            yield name, x
