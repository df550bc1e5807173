"""The key of a call: calls that need different features, or run on another device or dtype, are different kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel import decide, dispatch
from rlkernel_core.quant.spec import FORMATS, QuantSpec
from rlkernel_core.reference.direct import quantize
from rlkernel_core.spec import OPERATORS

DRAWS = 1500
T, HALF, WHOLE = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)
META = torch.zeros(2, 4, device="meta")
WANTS_GRAD = torch.zeros(2, 4, requires_grad=True)
PACKED = [quantize(torch.randn(4, 256), f) for f in ("int8_channel", "int4_g128", "nf4")]
PACKED.append(quantize(torch.randn(4, 256), QuantSpec.named("nf4", double_quant=True)))

# Values by a word of the annotation: they differ in what a decision may look at, and in what it may not (sizes).
VALUES: Mapping[str, tuple[Any, ...]] = {
    "Tensor": (T, torch.zeros(3, 4), HALF, WHOLE, META, WANTS_GRAD, torch.nn.Parameter(T)),
    "None": (None,),
    "bool": (False, True),
    "int": (-1, 0, 1, 2, 3, 7),
    "float": (-1.0, 0.0, 0.5, 1.0, 2.0),
    "tuple[float, float]": ((0.0, 1.0), (-1.0, 2.0)),
    "QuantTensor": tuple(PACKED),
    "QuantSpec": (QuantSpec.named("nf4"), QuantSpec.named("nf4", double_quant=True)),
    "LoRA": (rlk.LoRA(torch.zeros(2, 256), torch.zeros(4, 2)), rlk.LoRA(WANTS_GRAD, WANTS_GRAD)),
    "torch.dtype": (torch.float16, torch.float32),
    "Sequence[Any]": ((), (T,), (T, META)),
    "Any": (T, (T,), {"x": META}),
    "Callable[..., Any]": (len, lambda x: x),
}


def words(op: str) -> tuple[str, ...]:
    """Strings that mean something to an operator: what its variants are called, and a few defaults."""
    spec = OPERATORS[op]
    variants = [f.name.partition(":")[2] for f in spec.features if ":" in f.name]
    defaults = [p.default for p in spec.parameters.values() if isinstance(p.default, str)]
    return tuple(dict.fromkeys([*variants, *defaults, "first", "always", "raw", "error", "carry", "batch", "none"]))


def values(op: str, name: str) -> list[Any]:
    """What an argument may be, of every kind that its annotation names."""
    annotation = str(OPERATORS[op].parameters[name].annotation)
    if name == "format":
        return [*FORMATS, *VALUES["QuantSpec"]]
    if name == "device":
        return [None, "cpu", torch.device("meta")]
    found: list[Any] = []
    for part in annotation.split(" | "):
        found += words(op) if part == "str" else VALUES.get(part, (SimpleNamespace(), SimpleNamespace(x=1)))
    return found


@dataclass
class Seen:
    """Stands in for the cold path and notes what it is asked."""

    key: Any = None
    args: Any = None

    def __call__(self, spec: Any, key: Any, args: dict[str, Any]) -> decide.Hit:
        self.key, self.args = key, args
        return decide.Hit(lambda *_, **__: None, None)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    rlk.refresh()
    found = Seen()
    monkeypatch.setattr(dispatch, "decide", found)
    return found


def draw(op: str, rng: random.Random) -> dict[str, Any]:
    """Arguments of a call: those that must be there, and a few of the others."""
    parameters = OPERATORS[op].parameters.values()
    given = [p.name for p in parameters if p.default is p.empty]
    rest = [p.name for p in parameters if p.default is not p.empty]
    given += rng.sample(rest, rng.randint(0, min(2, len(rest))))
    return {name: rng.choice(values(op, name)) for name in given}


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_calls_of_one_kind_need_the_same(op, seen) -> None:
    call: Callable[..., Any] = dispatch.operator(op)
    spec, rng = OPERATORS[op], random.Random(op)
    kinds: dict[Any, tuple[Any, ...]] = {}
    for _ in range(DRAWS):
        call(**draw(op, rng))
        try:
            facts = (spec.needs(seen.args), *decide.place(spec, seen.args), grad(spec, seen.args))
        except ValueError:  # refused before anything is decided
            continue
        assert seen.key is not None
        before = kinds.setdefault(seen.key, (facts, seen.args))
        assert facts == before[0], (seen.args, before[1])
    assert len(kinds) > 3


def grad(spec: Any, args: Mapping[str, Any]) -> bool:
    return any(getattr(args[n], "requires_grad", False) for n in spec.differentiable)


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_sizes_and_magnitudes_make_no_kind_of_their_own(op, seen) -> None:
    call, rng = dispatch.operator(op), random.Random(op)
    for _ in range(DRAWS // 10):
        args = draw(op, rng)
        call(**args)
        key = seen.key
        call(**{name: larger(value) for name, value in args.items()})
        assert seen.key == key


def larger(value: Any) -> Any:
    """The same kind of argument, of another size."""
    if isinstance(value, torch.Tensor):
        more = torch.zeros(7, *value.shape[1:], dtype=value.dtype, device=value.device)
        return (
            torch.nn.Parameter(more) if type(value) is torch.nn.Parameter else more.requires_grad_(value.requires_grad)
        )
    if isinstance(value, float) and value not in {0.0, 1.0}:
        return 1.5 * value
    return value + 5 if type(value) is int and value > 0 else value
