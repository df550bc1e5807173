"""The front door: one function per operator that builds the record of a call and runs the plan of its shape.

The functions are generated from the records, so that an argument is written down once. A call costs a record, a key and
one lookup; a key that the table of the current scope does not have goes to `decide.plan_for`, the cold path.

While torch traces, a call takes the compiled path instead (torchlib), which makes the same decisions.
There is no try around a kernel: what an implementation raises is what the caller sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, Protocol, TypeVar, cast

from rlkernel import policy, spread
from rlkernel.decide import bind, plan_for
from rlkernel.plans import Choice, names_in_parts, parts
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.brought import BROUGHT
from rlkernel_core.spec.form import OpSpec, P

R_co = TypeVar("R_co", covariant=True)
_GROUPS: Final = ("group", "process_group")  # arguments that a DeviceMesh of one dimension may stand for


class Operator(Protocol[P, R_co]):
    """An operator of the front door: call it, or bind it."""

    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the implementation that the policy chooses."""
        ...

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R_co]:
        """A function that keeps to the implementation which takes this very call, whatever the policy becomes."""
        ...


def operator(spec: OpSpec[Any, Any]) -> Operator[Any, Any]:
    """Generate the front-door function of a spec.

    It is one of `OPERATORS`, but for the conformance suite, which also asks for one with a faulty `check`.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    scope: dict[str, Any] = {
        **names_in_parts(),
        "_Fake": FakeTensor,
        "_SCOPE": policy.SCOPE.get,
        "_process": policy.PROCESS,
        "_base": policy.base,
        "_compiling": torch.compiler.is_compiling,
        "_group_of": spread.group_of,
        "_call": spec.call,
        "_plan_for": partial(plan_for, spec),
        "_record": spec.record,
        "_new": object.__new__,
        **{f"_default_{name}": p.default for name, p in spec.parameters.items()},
    }
    if spec.name in BROUGHT:  # torch.compile cannot know the shapes of its results
        scope["_outside"] = torch.compiler.disable(
            lambda call: plan_for(spec, None, call).run(call), reason=f"{spec.name} is an operator of a plugin's own"
        )
    exec(compile(source(spec), f"<rlkernel.{spec.name}>", "exec"), scope)  # noqa: S102 as dataclasses do; the source is ours
    call = scope[spec.name]
    scope["_self"] = call
    _described(call, spec)
    call.spec, call.last = spec, None
    policy.PROCESS.operators.append(call)

    def bound(*args: Any, **kwargs: Any) -> Any:
        given = {name: spread.group_of(x) if name in _GROUPS else x for name, x in kwargs.items()}
        return _described(scope["_bind"](bind(spec, spec.call(*args, **given))), spec)

    call.bind = bound
    return cast("Operator[Any, Any]", call)


@cache
def _brought(spec: OpSpec[Any, Any]) -> Operator[Any, Any]:
    return operator(spec)


def brought_operator(name: str) -> Operator[Any, Any]:
    """The front-door function of an operator that a plugin brought."""
    return _brought(OPERATORS[name])


def _described(function: Any, spec: OpSpec[Any, Any]) -> Any:
    function.__name__, function.__doc__, function.__module__ = spec.name, spec.record.__doc__, "rlkernel"
    function.__signature__ = spec.signature
    return function


def source(spec: OpSpec[Any, Any]) -> str:
    """Source of the generated functions of an operator: the public one, and `_bind`, which makes bound ones."""
    needed = [name for name, p in spec.parameters.items() if p.default is p.empty]
    at = [name for name in needed if spec.parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    named = [name for name in needed if name not in at]
    head = ", ".join([*at, *(["*"] if named else []), *named])
    passed = ", ".join([*at, *(f"{name}={name}" for name in named)])
    # Options that are left out cost nothing; those that are given enter the key with their names.
    key = (
        f"key = ({', '.join([*parts(spec, needed), '_grad()'])})\n"
        "        if _options:\n            key = (*key, *_options, *map(_key_of, _options.values()))"
    )
    # What the record's own __init__ does, at half its cost: type.__call__ enters it by way of a tuple and a dict.
    written = "; ".join(f"call.{n} = {n if n in needed else f'_default_{n}'}" for n in spec.parameters)
    if spec.primary is not None:  # torch warns where the address of a fake tensor is read
        key = f"if {spec.primary}.__class__ is _Fake:\n            raise TypeError\n        {key}"

    # A group is often left out, and is none of the options then. torch.compile holds a mesh as what has no group.
    groups = "".join(
        f"    if {name!r} in _options:\n        _options[{name!r}] = _group_of(_options[{name!r}])\n"
        for name in _GROUPS
        if name in spec.parameters
    )

    def function(name: str, table: str, plan_for: str, compiled: str) -> str:
        return (
            f"def {name}({head}, **_options):\n"
            "    if _compiling():\n"
            f"        call = _call({passed}, **_options)\n"
            f"        {compiled}\n"
            f"{groups}"
            "    try:\n"
            f"        {key if spec.planned else 'raise TypeError'}\n"
            f"        plan = {table}.get(key)\n"
            "    except (AttributeError, TypeError, RuntimeError):  # its check names what is wrong\n"
            "        key = plan = None\n"
            "    if plan is None:\n"
            f"        call = _call({passed}, **_options)\n"
            f"        plan = {plan_for}(key, call)\n"
            "    elif _options:\n"
            f"        call = _record({passed}, **_options)\n"
            "    else:\n"
            f"        call = _new(_record); {written}\n"
            "    choice = plan.choice\n"
            "    choice.calls += 1\n"
        )

    compiled = f"from rlkernel.torchlib import compiled; return compiled({spec.name!r}, call)"
    public = function(
        spec.name,
        f"(_SCOPE() or _process.base or _base()).tables[{spec.name!r}]",
        "_plan_for",
        "return _outside(call)" if spec.name in BROUGHT else compiled,
    )
    bound = function("bound", "_table", "_bound.plan_for", "return _bound.plan_for(None, call).run(call)")
    indented = "".join(f"    {line}\n" for line in bound.splitlines())
    return (
        f"{public}    _self.last = choice\n    return plan.run(call)\n\n"
        f"def _bind(_bound):\n    _table = _bound.table\n{indented}        return plan.run(call)\n    return bound\n"
    )
