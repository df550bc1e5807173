"""One compiled configuration of a kernel: which constants and types it was compiled for, and which calls it serves.

A call is described by its `Argument`s: the type that Triton would give it and what the value is known to be. A
configuration serves a call when all that it assumes holds; of several the one that assumes most is taken.
Imports neither torch nor Triton.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

Constant = bool | int | float | str | None
_NO_OPTIONS: Final[Mapping[str, int]] = MappingProxyType({})
_OWN: Final = ("target", "entry", "shared", "arguments", "registers", "spilled", "source")  # of a Code, as in JSON
_PAIRS: Final = ("types", "constants", "options")  # of a Configuration, dicts in JSON
# What a Configuration and a Code are in JSON (`rlkernel_core.documents`).
CONFIGURATION: Final[Mapping[str, Any]] = {
    "kernel": str,
    "types": {str: str},
    "constants": {str: (bool, int, float, str, None)},
    "divisible": [str],
    "num_warps": int,
    "num_stages": int,
    "enable_fp_fusion": bool,
    "options": {str: int},
}
CODE: Final[Mapping[str, Any]] = {
    **CONFIGURATION,
    **dict.fromkeys(("target", "entry", "source"), str),
    **dict.fromkeys(("shared", "arguments", "registers", "spilled"), int),
    "unread": [str],
    "files": {str: str},
}
WIDER: Final = {"i32": ("i32", "i64"), "i64": ("i64",)}  # what a number may be passed as


@dataclass(frozen=True)
class Argument:
    """A parameter of a launch at run time: Triton's type, and what its value allows to assume."""

    type: str  # "*bf16", "i32", "fp32"; "none" for None
    divisible: bool = False  # by 16
    one: bool = False  # equal to 1


@dataclass(frozen=True)
class Configuration:
    """One configuration of one kernel. Two are the same when all of this is."""

    kernel: str  # "rlkernel_triton.logprob.kernels:partial_softmax"
    types: tuple[tuple[str, str], ...]  # (parameter, type) of what is passed
    constants: tuple[tuple[str, Constant], ...]  # (parameter, value) of the rest
    divisible: tuple[str, ...] = ()  # parameters assumed to be multiples of 16
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True
    options: tuple[tuple[str, int], ...] = ()  # of the target's compiler alone: ("waves_per_eu", 0)

    def __post_init__(self) -> None:
        # By name: the kernel knows the order of its parameters.
        for name in ("types", "constants", "divisible", "options"):
            object.__setattr__(self, name, tuple(sorted(getattr(self, name))))

    def unspecialized(self, constexprs: Collection[str]) -> Configuration:
        """The same of which nothing is assumed: it serves what this one does, and every other alignment and size."""
        ones = {n: "i32" for n, v in self.constants if n not in constexprs and v is not None}
        kept = tuple((n, v) for n, v in self.constants if n not in ones)
        return replace(self, types=(*self.types, *ones.items()), constants=kept, divisible=())

    def specialized(self, divisible: Collection[str], ones: Collection[str]) -> Configuration:
        """The same where these parameters are multiples of 16 and those are 1, of those that are passed."""
        types = tuple((n, kind) for n, kind in self.types if n not in ones)
        one = tuple((n, 1) for n, _ in self.types if n in ones)
        kept = tuple(n for n, _ in types if n in divisible)
        return replace(self, types=types, constants=(*self.constants, *one), divisible=kept)

    def serves(self, arguments: Mapping[str, Argument], unread: Collection[str] = ()) -> bool:
        """Whether a call with these run-time arguments may run it; constants of the signature are compared by `key`.

        Args:
            arguments: those of the call, by name.
            unread: parameters that its code never looks at, whose types do not matter.
        """
        for name, kind in self.types:
            argument = arguments.get(name)
            if argument is None:
                return False
            if name not in unread and kind not in WIDER.get(argument.type, (argument.type,)):
                return False
        constants = dict(self.constants)
        for name, argument in arguments.items():
            if name in constants and not (argument.one if constants[name] == 1 else argument.type == "none"):
                return False
        return all(arguments[name].divisible for name in self.divisible if name not in unread)

    @property
    def specialization(self) -> int:
        """How much it assumes; the most is the fastest."""
        return len(self.divisible) + len(self.constants)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return own | {name: dict(own[name]) for name in _PAIRS} | {"divisible": list(self.divisible)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Configuration:
        """From JSON."""
        own = {f.name: document[f.name] for f in fields(cls)}
        own |= {name: tuple(own[name].items()) for name in _PAIRS}
        return cls(**own | {"divisible": tuple(own["divisible"])})

    @property
    def text(self) -> str:
        """One line that tells it from every other."""
        return json.dumps(self.document())


@dataclass(frozen=True)
class Code:
    """A configuration for one target."""

    configuration: Configuration
    target: str
    entry: str  # name of the kernel in its module
    shared: int  # bytes of dynamic shared memory
    arguments: int  # that the entry takes; what is above `configuration.types` are scratch pointers, passed as null
    registers: int  # of a thread
    spilled: int  # bytes a thread
    source: str  # hash of the kernel's source and all it calls
    unread: tuple[
        str, ...
    ] = ()  # parameters that its code never looks at, as what stands for a mask where there is none
    files: Mapping[str, str] = field(default_factory=dict)  # kind ("cubin", "ptx", "hsaco") -> name within the bundle

    def document(self) -> dict[str, Any]:
        """As JSON."""
        own = {name: getattr(self, name) for name in _OWN}
        return {**self.configuration.document(), **own, "unread": list(self.unread), "files": dict(self.files)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Code:
        """From JSON."""
        own = {name: document[name] for name in (*_OWN, "files")}
        return cls(Configuration.of(document), unread=tuple(document["unread"]), **own)

    def serves(self, arguments: Mapping[str, Argument]) -> bool:
        """Whether a call with these run-time arguments may run it."""
        return self.configuration.serves(arguments, self.unread)

    def stands_for(self, configuration: Configuration) -> bool:
        """Whether another one would be this code again: it differs in types of parameters that are never read."""
        return self._blank(self.configuration) == self._blank(configuration)

    def _blank(self, configuration: Configuration) -> Configuration:
        types = tuple((n, "" if n in self.unread else kind) for n, kind in configuration.types)
        return replace(
            configuration, types=types, divisible=tuple(n for n in configuration.divisible if n not in self.unread)
        )


def fixed(configuration: Configuration, constexprs: Iterable[str]) -> tuple[Any, ...]:
    """The key under which configurations are looked up: what a call's constants and options must equal."""
    constants = dict(configuration.constants)
    return key(
        configuration.kernel,
        {n: constants[n] for n in constexprs},
        configuration.num_warps,
        configuration.num_stages,
        fusion=configuration.enable_fp_fusion,
        options=dict(configuration.options),
    )


def key(
    kernel: str,
    constants: Mapping[str, Constant],
    warps: int,
    stages: int,
    *,
    fusion: bool,
    options: Mapping[str, int] = _NO_OPTIONS,
) -> tuple[Any, ...]:
    """The key of a call. Types beside values: True is not 1, 1 is not 1.0."""
    how = (kernel, warps, stages, fusion, tuple(sorted(options.items())))
    return (*how, tuple((n, type(v).__name__, v) for n, v in sorted(constants.items())))
