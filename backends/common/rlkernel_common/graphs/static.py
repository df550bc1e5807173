"""Tensors that a recording reads in place: enumerated by name, fingerprinted, and compared later.

An in-place write keeps the fingerprint: the next replay sees it. Rebinding a parameter, `resize_`, `.data = `, a cast
or a move to another device changes it: a replay would read the old memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentTypeError
from rlkernel_core.tree import flatten

Fingerprint = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def fingerprint(x: Tensor) -> Fingerprint:
    """Everything about `x` that a recording bakes in."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


class StaticSet:
    """Named tensors and the modules they come from."""

    def __init__(self, sources: Sequence[tuple[str, Any]]) -> None:
        self._sources = tuple(sources)
        self.accept()

    def accept(self) -> None:
        """Take the tensors as they are now for the right ones."""
        self.modules = [m for name, s in self._sources for m in _modules(s)]
        self._held = self.tensors()
        self._prints = {name: fingerprint(x) for name, x in self._held.items()}
        plain = all(checks.is_tensor(source) for _, source in self._sources)
        self._plain = (list(self._held.values()), list(self._prints.values())) if plain else None
        self.names = {id(x): name for name, x in self._held.items()}  # by identity, while `_held` keeps them alive

    def let_go(self) -> None:
        """Keep no tensor alive; until the next `accept`, none is known by identity."""
        self._held, self._plain, self.names = {}, None, {}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as the sources hold them now."""
        return {name: x for prefix, source in self._sources for name, x in _walk(prefix, source)}

    def held(self) -> tuple[Tensor, ...]:
        """The tensors that were accepted, each once."""
        return tuple({id(x): x for x in self._held.values()}.values())

    def changed(self) -> tuple[str, ...]:
        """Names whose tensors moved, changed, appeared or vanished since they were accepted."""
        if self._plain is not None and [fingerprint(x) for x in self._plain[0]] == self._plain[1]:
            return ()  # tensors that were passed themselves: nothing to walk through
        now = {name: fingerprint(x) for name, x in self.tensors().items()}
        return tuple(sorted(n for n in now.keys() | self._prints.keys() if now.get(n) != self._prints.get(n)))

    def training(self) -> tuple[bool, ...]:
        """Training flags of the modules: dropout and normalization read them."""
        return tuple([m.training for m in self.modules])


def _modules(source: Any) -> list[torch.nn.Module]:
    return [m for leaf in flatten(source)[0] if isinstance(leaf, torch.nn.Module) for m in leaf.modules()]


def _walk(name: str, source: Any) -> Iterator[tuple[str, Tensor]]:
    if checks.is_tensor(source):
        yield name, source
    elif isinstance(source, torch.nn.Module):
        yield from source.named_parameters(prefix=name, remove_duplicate=False)
        yield from source.named_buffers(prefix=name, remove_duplicate=False)
    elif isinstance(source, (tuple, list)):
        for i, item in enumerate(source):
            yield from _walk(f"{name}.{i}", item)
    elif isinstance(source, dict):
        for key, item in source.items():
            yield from _walk(f"{name}.{key}", item)
    elif dataclasses.is_dataclass(source):  # a quantized weight: tensors among other things
        leaves, structure = flatten(source)
        yield from ((n, x) for n, x in zip(structure.names(name), leaves, strict=True) if checks.is_tensor(x))
    elif callable(source):
        yield from _walk(name, source())
    else:
        remedy = "Pass tensors, modules, dicts or lists of them, or callables that return them."
        raise ArgumentTypeError(name, checks.describe(source), "holds no tensor", remedy)
