"""What a manifest claims that cannot be meant: against itself, its entry point, and the catalog of operators."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import InvalidRequirement, Requirement

from rlkernel_core.decision import ALIASES
from rlkernel_core.errors import ConfigError, UnknownNameError, did_you_mean
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec

if TYPE_CHECKING:
    from pydantic import ValidationError

    from rlkernel_core.manifest import Backend, Impl


def validated(manifest: Backend) -> Backend:
    """A copy whose fields have been validated and are of plain types: `model_construct` takes whatever it is given.

    Raises:
        ValidationError: a field breaks a rule.
        ApiMismatchError: it is for another plugin API.
    """
    return type(manifest).model_validate(manifest.model_dump(warnings=False))


def contradiction(name: str, manifest: Backend, brought: Mapping[str, OpSpec[Any, Any]]) -> str | None:
    """What a validated manifest claims that cannot be meant; None where there is nothing.

    Args:
        name: of its entry point.
        manifest: what is judged.
        brought: specs of the operators that it brings, as `specs_of` gives them.
    """
    catalog = ChainMap(dict(brought), OPERATORS)  # type: ignore[arg-type]  # which is only read
    if manifest.name != name:
        return f"name: it calls itself {manifest.name!r}, and is known as {name!r}; write name={name!r}"
    if name in ALIASES:
        return f"{name!r} is another name of the backend {ALIASES[name]!r}"
    for impl in manifest.impls:
        op, _, number = impl.op.partition("@")
        if op not in catalog:
            return str(UnknownNameError("operator", op, catalog))
        spec = catalog[op]
        if int(number) == spec.version and (odd := impl.supports - spec.feature_names):
            return str(UnknownNameError(f"feature of {impl.op}", min(odd), spec.feature_names))
        if int(number) == spec.version and (lacking := _unreachable(impl, spec)):
            return f"{impl.op}.supports: {impl.target} claims no {lacking}"
        for text in impl.requires.packages:
            if problem := _no_requirement(text):
                return f"{impl.op}.requires.packages: {text!r}: {problem}; write a name and versions, 'torch>=2.9'"
    return None


def specs_of(manifest: Backend) -> dict[str, OpSpec[Any, Any]]:
    """The specs of the operators that a manifest brings, by name; they are imported.

    Raises:
        ConfigError: one is no spec, or its name is not one that this backend may give.
    """
    found: dict[str, OpSpec[Any, Any]] = {}
    for operator in manifest.operators:
        module, _, attribute = operator.spec.partition(":")
        spec = getattr(import_module(module), attribute)
        if not isinstance(spec, OpSpec):
            raise ConfigError(f"operators: {operator.spec} is a {type(spec).__name__}, not a rlkernel_core.spec.OpSpec")
        prefix = f"{manifest.name.replace('-', '_')}_"
        if not spec.name.startswith(prefix) or not spec.name.isidentifier():
            raise ConfigError(f"operators: {spec.name!r} should begin with the backend's name, {prefix!r}")
        if spec.name in found or (spec.name in OPERATORS and OPERATORS[spec.name] is not spec):
            raise ConfigError(f"operators: there is another operator {spec.name!r}")
        found[spec.name] = spec
    return found


def _unreachable(impl: Impl, spec: OpSpec[Any, Any]) -> str | None:
    """A family of features of which every call needs one and an implementation claims none."""
    for name in spec.one_of:
        if impl.supports.isdisjoint(family := spec.family(name)):
            return f"{name}:..., and every call needs one; add one of {', '.join(family)}"
    return None


def _no_requirement(text: str) -> str | None:
    """Why a text is no requirement that can be held against installed versions."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if requirement.marker or requirement.url:
        return f"a {'marker' if requirement.marker else 'URL'} cannot be held against what is installed"
    return None


def broken_rules(error: ValidationError) -> str:
    """Which fields of a manifest break which rule, and what to write: `Impl.op: 'logprob' should look like …; …`."""
    found = [{**e, "loc": _fields_of(e["loc"])} for e in error.errors()]
    judged = {e["loc"] for e in found if e["type"] != "tuple_type"}  # what may be a word or several is tried as both
    rules = [_broken_rule(error.title, e) for e in found if e["type"] != "tuple_type" or e["loc"] not in judged]
    return "; ".join(dict.fromkeys(rules))


def _fields_of(place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Where a field stands, without pydantic's names of the forms that it may have."""
    return tuple(str(part) for part in place if re.fullmatch(r"\w+", str(part)))


def _broken_rule(model: str, found: Any) -> str:
    from rlkernel_core import manifest

    *_, last = path = list(found["loc"]) or [model]
    where = ".".join([model, *path] if found["loc"] else path)
    if found["type"] == "extra_forbidden":
        known = {name for m in _MODELS for name in getattr(manifest, m).model_fields}
        if model in _MODELS and len(path) == 1:
            known = set(getattr(manifest, model).model_fields)
        return f"{where}: there is no such field{did_you_mean(last, known)}; the fields are {', '.join(sorted(known))}"
    if found["type"] == "missing":
        fields = {n: f for m in _MODELS for n, f in getattr(manifest, m).model_fields.items()}
        about = fields[last].description if last in fields else None
        return f"{where}: is missing; write {last}=...{f', {about}' if about else ''}"
    return f"{where}: {str(found['msg']).removeprefix('Value error, ')}"


_MODELS: Final = ("Backend", "Operator", "Impl", "Requires", "Limits")
