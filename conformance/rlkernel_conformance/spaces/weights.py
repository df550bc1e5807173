"""Weights at the borders of the formats, for the spaces of operators on quantized weights.

Legend: N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Generator, Tensor

from rlkernel_conformance.quantized_weights import WEIGHTS, claims
from rlkernel_conformance.spaces.layouts import laid_out
from rlkernel_conformance.spaces.space import Point
from rlkernel_conformance.subject import Subject
from rlkernel_core.manifest import Impl
from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor

# K of Llama 2 and 3 and Qwen, multiples of every group, and one whose last groups are short.
LONG: Final = (11008, 14336, 27648, 11008 + 24)
MEMBERS: Final = 9  # most members of a family that stand in one factor
_Chosen = dict[str, Any]  # levels of "family" and "member"


def _variants(name: str) -> list[QuantSpec]:
    """Every spec that a format offers, the default first."""
    options = FORMATS[name].options
    values = itertools.product(*options.values())
    specs = [QuantSpec.named(name, **dict(zip(options, chosen, strict=True))) for chosen in values]
    return sorted(specs, key=lambda spec: len(spec.changed))


def _family(spec: QuantSpec) -> str:
    """What formats share that are decoded alike."""
    kind = FORMATS[spec.format].codec if spec.element != "int8" or spec.act == "none" else "integers of x"
    if kind == "grid":
        kind = spec.element if spec.element.startswith("int") else "fp8"
    zero = "" if spec.symmetric else " float zero" if spec.float_zero else " asymmetric"
    return f"{kind}{zero}{' act order' if spec.act_order else ''}{' quantized x' if 'act' in spec.changed else ''}"


def _members(subject: Subject, options: tuple[str, ...]) -> dict[str, tuple[QuantSpec, ...]]:
    """Claimed formats by family, at most MEMBERS in each; those that differ in no option of the operator's are one."""
    return _found(subject, subject.impls, options)


@lru_cache(256)
def _found(subject: Subject, impls: tuple[Impl, ...], options: tuple[str, ...]) -> dict[str, tuple[QuantSpec, ...]]:
    del impls  # a name may stand for another manifest later on
    found: dict[str, dict[frozenset[str], QuantSpec]] = {}
    for name in FORMATS:
        for spec in _variants(name):
            if claims(subject, spec, options):
                found.setdefault(_family(spec), {}).setdefault(spec.features(*options), spec)
    return {
        f"{name} {1 + i // MEMBERS}" if len(specs) > MEMBERS else name: tuple(specs.values())[i : i + MEMBERS]
        for name, specs in found.items()
        for i in range(0, len(specs), MEMBERS)
    }


def families(subject: Subject, options: tuple[str, ...]) -> tuple[str, ...]:
    """Families of formats of which the subject claims some."""
    return tuple(_members(subject, options))


def spec(subject: Subject, options: tuple[str, ...], levels: Point | _Chosen) -> QuantSpec:
    """The format that the levels of "family" and "member" stand for."""
    family = _members(subject, options)[levels["family"]]
    return family[levels["member"] % len(family)]


def every(subject: Subject, options: tuple[str, ...]) -> list[_Chosen]:
    """Levels that stand for each claimed format once."""
    found = _members(subject, options).items()
    return [{"family": name, "member": i} for name, family in found for i in range(len(family))]


def lengths(chosen: Sequence[_Chosen]) -> list[tuple[_Chosen, int]]:
    """Formats with a K of LONG each: all of them for the first of a family, one for others."""
    each = [(levels, LONG if levels["member"] == 0 else LONG[i % 4 : i % 4 + 1]) for i, levels in enumerate(chosen)]
    return [(levels, K) for levels, sizes in each for K in sizes]


def _top(dtype: torch.dtype) -> float:
    """A power of two of which a few make no overflow in a dtype."""
    return 2.0**13 if dtype == torch.float16 else 2.0**100


def _tiny(dtype: torch.dtype) -> float:
    """A few steps of the subnormal numbers that fp32 or, where it has fewer, a dtype holds."""
    return 2.0**-22 if dtype == torch.float16 else 2.0**-131 if dtype == torch.bfloat16 else 2.0**-147


def _holes(n: int, k: int, g: Generator) -> Tensor:
    """A row of zeros, one of -0, and a group of each elsewhere."""
    x = WEIGHTS["graded"](n, k, g)
    x[::3], x[1::5] = 0.0, -0.0
    x[:, : k // 2 // 32 * 32 : 2] *= 0.0  # either zero
    return x


def _codes(n: int, k: int, g: Generator) -> Tensor:
    """Multiples of 1/4 up to 8 in groups that reach 7, 7.5 or -8 by row: codes, middles of two, and what is beyond."""
    x = torch.randint(-32, 33, (n, k), generator=g).double() / 4
    reach = torch.tensor([7.5, 7.0, -8.0, 6.0])[torch.arange(n) % 4].double()[:, None]
    x = x.clamp(-reach.abs(), reach.abs())
    x[:, ::16] = reach
    return x


def _wide(n: int, k: int, g: Generator) -> Tensor:
    """Multiples of 1/4 up to 127 in rows that reach 127: codes of 8 bits, and middles of two."""
    x = torch.randint(-508, 509, (n, k), generator=g).double() / 4
    x[:, ::16] = 127.0
    return x


def _poisoned(n: int, k: int, g: Generator) -> Tensor:
    """An inf or a NaN in every fourth row, at its beginning or its end."""
    x = WEIGHTS["graded"](n, k, g)
    x[::4, 0], x[1::4, -1] = torch.nan, -torch.inf
    return x


def _of_any_dtype(how: Callable[[int, int, Generator], Tensor]) -> Callable[[int, int, Generator, torch.dtype], Tensor]:
    return lambda n, k, g, _: how(n, k, g)


# name -> [N, K] in float64 for a dtype
VALUES: Final[Mapping[str, Callable[[int, int, Generator, torch.dtype], Tensor]]] = {
    **{name: _of_any_dtype(how) for name, how in WEIGHTS.items() if name != "normal"},
    "zeros": _of_any_dtype(_holes),
    "codes": _of_any_dtype(_codes),
    "wide": _of_any_dtype(_wide),
    "one variance": lambda n, k, g, _: 1 + WEIGHTS["normal"](n, k, g) * 2.0**-10,
    "subnormal": lambda n, k, g, dtype: WEIGHTS["normal"](n, k, g) * 8 * _tiny(dtype),
    "huge": lambda n, k, g, dtype: WEIGHTS["normal"](n, k, g) * _top(dtype),
    "not finite": _of_any_dtype(_poisoned),
}


def weight(values: str, N: int, K: int, g: Generator, dtype: str = "float32") -> Tensor:
    """[N, K] of named values, on the CPU."""
    kind: torch.dtype = getattr(torch, dtype)
    return VALUES[values](N, K, g, kind).to(kind)


def placed(w: QuantTensor, layout: str) -> QuantTensor:
    """The weight with each part laid out as a cut of a larger weight has it: at any address, in wider rows."""
    return replace(w, parts={name: laid_out(part, layout) for name, part in w.parts.items()})
