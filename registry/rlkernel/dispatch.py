"""The warm path: one dict lookup from the kind of a call to the callable that takes it.

For every operator a function is generated whose body builds the key of a call from what its spec declares (device,
dtype, gradient, which optional arguments are there), looks it up in the table of the current scope and calls the raw
implementation. A miss goes to `decide.decide`, the cold path.

While torch traces, it takes the compiled lane instead (torchlib.py), which makes the same decisions.
There is no try around a kernel: what an implementation raises is what the caller sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar, cast

from rlkernel import policy
from rlkernel.decide import Hit, arguments, bind, decide, place, unknown_argument
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec, P

R_co = TypeVar("R_co", covariant=True)

# How an argument enters the key, by its annotation; `{}` is the argument. Sizes never do: they would make a new
# decision of every shape. `OpSpec.needs` may look at no more than this.
_KEY: Final[Mapping[str, str]] = {
    "bool": "{}",
    "str": "{}",
    "int": "{} > 0",
    "float": "{} != 0",
    "Tensor | None": "{} is None",
}
_BY_CLASS: Final = "{}.__class__"  # unions and dataclasses


class Operator(Protocol[P, R_co]):
    """An operator of the front door: call it, or bind it."""

    spec: OpSpec[Any, Any]
    last: Hit | None
    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the implementation that the policy chooses."""
        ...

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R_co]:
        """The raw implementation for calls of this kind: the decision is frozen, the dispatch cost is gone."""
        ...


def typed(signature: Callable[P, R_co]) -> Operator[P, R_co]:
    """The front-door operator of a spec's signature, with its types kept."""
    return operator(signature.__name__)


def operator(name: str) -> Operator[Any, Any]:
    """Generate the front-door function of an operator."""
    import torch

    spec = OPERATORS[name]
    scope: dict[str, Any] = {
        "_SCOPE": policy.SCOPE.get,
        "_base": policy.base,
        "_compiling": torch.compiler.is_compiling,
        "_decide": decide,
        "_grad": torch.is_grad_enabled,
        "_place": place,
        "_unknown_argument": unknown_argument,
        "_spec": spec,
        **{f"_default_{p.name}": p.default for p in spec.parameters.values()},
    }
    exec(compile(source(spec), f"<rlkernel.{name}>", "exec"), scope)  # noqa: S102 as dataclasses do; the source is ours
    call = scope[name]
    call.__doc__, call.__module__ = spec.signature.__doc__, "rlkernel"
    call.__signature__ = inspect.signature(spec.signature)
    call.spec, call.last = spec, None
    scope["_self"] = call
    call.bind = lambda *args, **kwargs: bind(spec, arguments(spec, args, kwargs))
    return cast("Operator[Any, Any]", call)


def source(spec: OpSpec[Any, Any]) -> str:
    """Source of the generated function of an operator."""
    head, passed, parts = [], [], _key(spec)
    for name, p in spec.parameters.items():
        if p.kind is p.KEYWORD_ONLY and "*" not in head:
            head.append("*")
        head.append(name if p.default is p.empty else f"{name}=_default_{name}")
        passed.append(f"{name}={name}" if p.kind is p.KEYWORD_ONLY else name)
    args = "{" + ", ".join(f"{n!r}: {n}" for n in spec.parameters) + "}"
    if spec.primary is None:
        parts.insert(0, f"_place(_spec, {args})")
    return (
        f"def {spec.name}({', '.join(head)}, **_unknown):\n"
        f"    if _unknown:\n"
        f"        _unknown_argument(_spec, *next(iter(_unknown.items())))\n"
        "    if _compiling():\n"
        "        from rlkernel.torchlib import compiled\n"
        f"        return compiled({spec.name!r}, {args})\n"
        "    try:\n"
        f"        key = ({', '.join(parts)},)\n"
        f"        hit = (_SCOPE() or _base()).tables[{spec.name!r}].get(key)\n"
        "    except (AttributeError, TypeError):  # an argument of a wrong type: its check will name it\n"
        "        key = hit = None\n"
        "    if hit is None:\n"
        f"        hit = _decide(_spec, key, {args})\n"
        "    hit.calls += 1\n"
        "    _self.last = hit\n"
        f"    return hit.run({', '.join(passed)})\n"
    )


def _key(spec: OpSpec[Any, Any]) -> list[str]:
    """Expressions that tell kinds of calls apart."""
    parts: list[str] = []
    for name, p in spec.parameters.items():
        annotation = str(p.annotation)
        if name in spec.keys:
            parts += spec.keys[name]
        elif name == spec.primary:
            parts += [f"{name}.device", f"{name}.dtype"]
        elif annotation != "Tensor":
            parts.append(_KEY.get(annotation, _BY_CLASS).format(name))
    if spec.differentiable:
        wanted = " or ".join(f"getattr({n}, 'requires_grad', False)" for n in spec.differentiable)
        parts.append(f"_grad() and ({wanted})")
    return parts
