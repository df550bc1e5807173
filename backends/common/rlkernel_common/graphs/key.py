"""What makes two calls the same graph: reading a call into a key, and saying how two keys differ.

A key is a tuple (structure, leaf keys, ambient modes, training flags). Everything that a recording bakes in is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_common.graphs.static import StaticSet
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.graphed import Bucket
from rlkernel_core.tree import Structure, flatten

# Asked at every call: bound here, and without a detour through Python.
_grad, _inference, _autocast = torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled
_deterministic, _precision = torch._C._get_deterministic_algorithms, torch._C._get_float32_matmul_precision  # noqa: SLF001
_default_dtype, _Parameter = torch.get_default_dtype, torch.nn.Parameter
_PLAIN: Final = frozenset({int, bool, str, type(None)})  # values that are equal exactly if their keys are


class Key(tuple[Structure, tuple[Hashable, ...], tuple[Hashable, ...], tuple[bool, ...]]):  # noqa: SLOT001  slots of a tuple hold nothing
    """A key that is hashed once: it is looked up at every call."""

    def __init__(self, _: object) -> None:
        self._hash = tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


class TensorKey(NamedTuple):
    """What a graph bakes in of a copied input."""

    shape: tuple[int, ...]  # bucketed sizes in place of true ones
    dtype: torch.dtype
    order: tuple[int, ...] | None  # dimensions from the outermost in memory; None: contiguous
    requires_grad: bool


class StaticKey(NamedTuple):
    """An argument that is a static tensor: read in place."""

    name: str


class ValueKey(NamedTuple):
    """An argument that is no tensor. The type is part of it: 1, 1.0 and True are equal but not the same."""

    cls: type
    value: Hashable

    def __str__(self) -> str:
        """The argument as it was passed."""
        return repr(float.fromhex(self.value) if self.cls is float and isinstance(self.value, str) else self.value)


@dataclass(frozen=True)
class Layout:
    """What is known of all calls with one structure."""

    names: tuple[str, ...]  # of the leaves
    bucketed: tuple[tuple[tuple[int, int], ...], ...]  # per leaf: (bucket, dimension)
    pad: tuple[float, ...]  # per leaf


@dataclass(frozen=True)
class Reading:
    """One call, read."""

    key: Key
    leaves: Sequence[Any]
    layout: Layout
    sizes: tuple[tuple[int, int], ...]  # per bucket: (true, padded)
    over: str | None = None  # set when a size is above its largest bucket and the bucket says "eager"
    strangers: tuple[int, ...] = ()  # leaves that are tensors of another device than the graph's


class Reader:
    """Reads calls of one function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        buckets: Sequence[Bucket],
        pad: Mapping[str, float],
        static: StaticSet,
        device: torch.device,
    ) -> None:
        self._signature = _signature(fn)
        self._buckets, self._pad, self._static, self._device = tuple(buckets), dict(pad), static, device
        self._device_type = device.type
        self._layouts: dict[Structure, Layout] = {}
        for i, bucket in enumerate(self._buckets):
            if bucket.valid and self._signature is not None:
                _keyword(f"buckets[{i}].valid", bucket.valid, self._signature)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """Read a call into its key, or say which argument cannot be captured."""
        leaves, structure = flatten((args, kwargs))
        layout = self._layouts.get(structure) or self._lay_out(structure, args, kwargs)
        over, sizes = None, tuple[tuple[int, int], ...]()
        if self._buckets:
            sizes, over = self._sizes(leaves, layout)
        leaf_keys = tuple([self._leaf_key(i, leaf, layout, sizes) for i, leaf in enumerate(leaves)])
        key = Key((structure, leaf_keys, ambient(self._device.type), self._static.training()))
        strangers = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.device != self._device)
        return Reading(key, leaves, layout, sizes, over, strangers)

    def likeness(self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What everything in a call's reading but its leaves follows from, told sooner; None for nested arguments.

        Asked at every call: a tensor may have changed its size, strides or device since the call before, a module its
        mode, the thread its ambient modes. Two calls alike in this have one key, sizes and layout. The other way round
        need not be: this knows exact sizes and strides.

        Args:
            leaves: the arguments, positional ones first.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        static = self._static
        training = static.training() if static.modules else ()
        seen: list[Hashable] = [len(args), *kwargs, ambient(self._device_type), training]
        names = static.names
        for leaf in leaves:
            cls = leaf.__class__
            if cls is Tensor or cls is _Parameter:
                if names:
                    seen.append(names.get(id(leaf)))
                strides = leaf.is_contiguous() or leaf.stride()
                seen.append((leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, strides))
            elif cls in _PLAIN:
                seen.append((cls, leaf))
            elif cls is float:
                seen.append((cls, leaf.hex()))
            else:
                return None
        return tuple(seen)

    def _lay_out(self, structure: Structure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
        supplied = dict.fromkeys(b.valid for b in self._buckets if b.valid)
        if self._signature is not None:
            self._signature.bind(*args, **kwargs, **supplied)  # a wrong call fails as fn itself would
        names = _names(self._signature, structure, len(args))
        for i, bucket in enumerate(self._buckets):
            _known(f"buckets[{i}].dims", bucket.dims, names)
        _known("pad", self._pad, names)
        bucketed = tuple(tuple((i, b.dims[n]) for i, b in enumerate(self._buckets) if n in b.dims) for n in names)
        layout = Layout(names, bucketed, tuple(self._pad.get(n, 0) for n in names))
        self._layouts[structure] = layout
        return layout

    def _sizes(self, leaves: list[Any], layout: Layout) -> tuple[tuple[tuple[int, int], ...], str | None]:
        true: list[int | None] = [None] * len(self._buckets)
        for name, leaf, dims in zip(layout.names, leaves, layout.bucketed, strict=True):
            for i, dim in dims:
                if not checks.is_tensor(leaf) or not -leaf.dim() <= dim < leaf.dim():
                    raise ArgumentError(name, checks.describe(leaf), f"has no dimension {dim} to bucket", "Fix dims.")
                size = leaf.shape[dim]
                if true[i] is not None and true[i] != size:
                    remedy = f"All inputs of buckets[{i}] share one size."
                    raise ArgumentError(name, checks.describe(leaf), f"must have size {true[i]} in dim {dim}", remedy)
                true[i] = size
        sizes, over = [], None
        for i, (bucket, n) in enumerate(zip(self._buckets, true, strict=True)):
            if n is None:
                raise ArgumentError(f"buckets[{i}].dims", dict(bucket.dims), "names no input of this call", "Fix dims.")
            padded = next((s for s in bucket.sizes if s >= n), None)
            if padded is None and bucket.over == "raise":
                remedy = "Add a size, split the call, or use over='eager'."
                raise ArgumentError(f"buckets[{i}]", n, f"is above the largest size {bucket.sizes[-1]}", remedy)
            if padded is None:
                over = f"size {n} is above the largest bucket {bucket.sizes[-1]}"
            sizes.append((n, n if padded is None else padded))
        return tuple(sizes), over

    def _leaf_key(self, i: int, leaf: Any, layout: Layout, sizes: tuple[tuple[int, int], ...]) -> Hashable:
        if not isinstance(leaf, Tensor):
            return _value_key(layout.names[i], leaf)
        name = self._static.names.get(id(leaf))
        if name is not None:
            return StaticKey(name)
        if leaf.device != self._device and not leaf.is_cpu:
            raise ArgumentError(layout.names[i], checks.describe(leaf), f"must be on {self._device}", "Move it there.")
        shape = tuple(leaf.shape)
        for bucket, dim in layout.bucketed[i]:
            at = dim % len(shape)
            shape = (*shape[:at], sizes[bucket][1], *shape[at + 1 :])
        return TensorKey(shape, leaf.dtype, memory_order(leaf), leaf.requires_grad and torch.is_grad_enabled())


def ambient(device_type: str) -> tuple[Hashable, ...]:
    """Modes that change what an operator does without being an argument; in the order of `AMBIENT`."""
    return (
        _grad(),
        _inference(),
        _autocast(device_type) and torch.get_autocast_dtype(device_type),
        _deterministic(),
        _precision(),
        _default_dtype(),
    )


AMBIENT = ("grad mode", "inference mode", "autocast", "determinism", "float32 matmul precision", "default dtype")


def memory_order(x: Tensor) -> tuple[int, ...] | None:
    """Order of the dimensions in memory if `x` is dense, None if contiguous or to be made so."""
    if x.is_contiguous():
        return None
    strides, shape = x.stride(), x.shape
    order = tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], -shape[d], d)))
    return order if x.permute(order).is_contiguous() else None


def difference(new: Reading, key: Key) -> list[str]:
    """In words, what of the new reading another key lacks; empty when the structures differ."""
    structure, leaves, modes, training = key
    if structure != new.key[0]:
        return []
    said = [f"{w} is {a}, was {b}" for w, a, b in zip(AMBIENT, new.key[2], modes, strict=True) if a != b]
    if training != new.key[3]:
        said.append("a training flag changed")
    for name, a, b in zip(new.layout.names, new.key[1], leaves, strict=True):
        said += _leaf_difference(name, a, b)
    return said


def _leaf_difference(name: str, a: Hashable, b: Hashable) -> list[str]:
    if a == b:
        return []
    if isinstance(a, TensorKey) and isinstance(b, TensorKey):
        return [f"{f} of {name} is {x}, was {y}" for f, x, y in zip(a._fields, a, b, strict=True) if x != y]
    if isinstance(a, ValueKey) and isinstance(b, ValueKey):
        return [f"{name} is {a}, was {b}"]
    return [f"{name} is another kind of argument"]


def varying(keys: Sequence[Key], layout: Layout) -> list[str]:
    """Names of arguments that are no tensors and differ among the keys: each value costs a graph."""
    rows = [k[1] for k in keys if len(k[1]) == len(layout.names)]
    columns = [{row[i] for row in rows} for i in range(len(layout.names))]
    found = zip(layout.names, columns, strict=True)
    return [name for name, seen in found if len(seen) > 1 and all(isinstance(v, ValueKey) for v in seen)]


def _value_key(name: str, leaf: Any) -> ValueKey:
    value = float.hex(leaf) if isinstance(leaf, float) else leaf  # tells -0.0 from 0.0, and NaN equals itself
    try:
        hash(value)
    except TypeError as error:
        remedy = "Pass it as a tensor, or as a tuple, list or dict of tensors and hashable values."
        raise ArgumentTypeError(name, checks.describe(leaf), "is no tensor and cannot be a key", remedy) from error
    return ValueKey(type(leaf), value)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):  # builtins without a signature
        return None


def _names(signature: inspect.Signature | None, structure: Structure, positional: int) -> tuple[str, ...]:
    """Names of the leaves: parameter names where the signature gives them, else positions."""
    roots = [str(i) for i in range(positional)]
    if signature is not None:
        kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        known = [p.name for p in signature.parameters.values() if p.kind in kinds]
        roots[: len(known)] = known[:positional]
    args, kwargs = structure.children
    pairs = [*zip(roots, args.children, strict=True), *zip(kwargs.keys, kwargs.children, strict=True)]
    return tuple(name for root, child in pairs for name in child.names(str(root)))


def _keyword(argument: str, name: str, signature: inspect.Signature) -> None:
    takes = [n for n, p in signature.parameters.items() if p.kind in {p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD}]
    if name not in takes and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        raise ArgumentError(argument, repr(name), "is no keyword of fn", f"It takes {', '.join(takes)}.")


def _known(argument: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ArgumentError(argument, repr(name), "is not an input of fn", f"Inputs are {', '.join(names)}.")
