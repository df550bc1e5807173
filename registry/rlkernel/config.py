"""Where a policy's values come from: use() > configure() > environment > rlkernel.toml > default.

Each layer is validated once, here; `merge` then takes every value from the highest layer that sets it and remembers
which one that was. Within a layer an operator's own value beats the general one; a general value in a higher layer
beats an operator's value in a lower one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlkernel_core.decision import ALIASES, AUTO, PROVED, OpPolicy, Policy
from rlkernel_core.documents import read_toml, short
from rlkernel_core.environment import path_in, variable
from rlkernel_core.errors import ConfigError, FileError, UnknownNameError, did_you_mean
from rlkernel_core.paths import missing
from rlkernel_core.spec import OPERATORS

FILE: Final = "rlkernel.toml"
LOCK_FILE: Final = "rlkernel.lock"
_HERE: Final = Path()
# The three variables there are; RLKERNEL_NAME_* is its own for the backend NAME. Any other RLKERNEL_* is an error: a
# dead variable is a wrong experiment.
ENVIRONMENT: Final[Mapping[str, str]] = {
    "RLKERNEL_CONFIG": "path of the configuration file (default: rlkernel.toml here or in a parent folder)",
    "RLKERNEL_ORDER": "backends in order of preference, comma-separated, e.g. 'acme,auto'",
    "RLKERNEL_FALLBACK": "'warn' or 'error'",
    "RLKERNEL_RECORD": "folder in which an engine of SGLang writes decisions.json of what it draws with",
}


class OpSettings(BaseModel):
    """What can be said about one operator: `[rlkernel.ops.NAME]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    order: tuple[str, ...] | None = Field(
        default=None, description="backends that may run, best first; 'auto' is our own"
    )
    fallback: Literal["warn", "error"] | None = Field(default=None, description="how loud a fallback is")
    need: tuple[str, ...] | None = Field(
        default=None,
        description="features an implementation must claim; 'conformant': a report in `reports` must hold for it; "
        "'exact': that, batch_invariant, and a manifest that names `sums`",
    )
    profile: bool | None = Field(
        default=None, strict=True, description="whether profilers show each call as a range with its decision's id"
    )
    audit: int | None = Field(
        default=None, strict=True, ge=0, description="compare every so many-th call with the reference; 0 is off"
    )
    max_workspace_bytes: int | None = Field(
        default=None,
        strict=True,
        ge=0,
        description="most bytes that a call may need on its device beyond its results; left out, any number",
    )

    @field_validator("order", "need", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("order")
    @classmethod
    def _some_name(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError('an empty order permits nothing; write order = ["auto"]')
        return value and tuple(ALIASES.get(name, name) for name in value)

    @field_validator("order", mode="before")
    @classmethod
    def _in_order(cls, value: object) -> object:
        if isinstance(value, set | frozenset):
            raise ValueError("a set has none; write a list")  # noqa: TRY004  pydantic wants ValueError
        return value


class Settings(OpSettings):
    """One layer of configuration: the `[rlkernel]` table of rlkernel.toml."""

    probe: Literal["subprocess", "inprocess", "off"] | None = Field(
        default=None, description="where a backend's self-test runs before its first use"
    )
    lock: str | None = Field(default=None, description="path of the lock file; relative to the configuration file")
    reports: str | None = Field(
        default=None,
        description="folder of conformance reports, for need = ['conformant'] and ['exact']; relative likewise",
    )
    ops: dict[str, OpSettings] = Field(default_factory=dict, description="the same keys for one operator")


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", title=FILE)

    rlkernel: Settings = Settings()


def schema() -> dict[str, Any]:
    """JSON schema of rlkernel.toml."""
    return _File.model_json_schema()


def validated(
    values: Mapping[str, Any],
    where: str,
    backends: Iterable[str],
    folder: Path = _HERE,
    operator: Callable[[str], bool] = OPERATORS.__contains__,
) -> Settings:
    """A layer from plain values; anything unknown or malformed is a ConfigError that names it.

    Args:
        values: keys as in the `[rlkernel]` table.
        where: what to call the layer in messages: "use()", "RLKERNEL_ORDER", a path.
        backends: names that an order may mention besides "auto".
        folder: what paths are relative to.
        operator: whether there is an operator of a name.
    """
    try:
        settings = Settings.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error)}") from error
    known = {AUTO, *backends}
    for name, op in {"": settings, **settings.ops}.items():
        at = f"{where}: ops.{name}." if name else f"{where}: "
        if name and not operator(name):
            raise ConfigError(f"{where}: ops: {UnknownNameError('operator', name, OPERATORS)}")
        for backend in op.order or ():
            if backend not in known:
                raise ConfigError(f"{at}order: {UnknownNameError('backend', backend, known)}")
        offered = _features(name)
        for feature in op.need or ():
            if feature not in offered:
                raise ConfigError(f"{at}need: {UnknownNameError('feature', feature, offered)}")
    paths = {key: path for key in ("lock", "reports") if (path := getattr(settings, key)) is not None}
    return settings.model_copy(update={key: str((folder / path).absolute()) for key, path in paths.items()})


def _features(op: str) -> frozenset[str]:
    """What a policy can need of an operator; of any where none is named."""
    specs = [OPERATORS[op]] if op else OPERATORS.values()
    return PROVED.union(*(spec.feature_names for spec in specs))


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    path = ".".join(str(p)[:100] for p in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = OpSettings.model_fields if path.startswith("ops.") else Settings.model_fields
        return f"unknown key {path!r}{did_you_mean(str(problem['loc'][-1])[:100], known)}"
    return f"{path}: {problem['msg']}; got {short(problem['input'])}"


def find_file(environ: Mapping[str, str], start: Path) -> Path | None:
    """RLKERNEL_CONFIG, else the nearest rlkernel.toml from `start` upwards."""
    if path := path_in("RLKERNEL_CONFIG", environ):
        if not _is_file(path):
            raise ConfigError(f"RLKERNEL_CONFIG: {missing(path)}; unset it or correct the path")
        return path
    return next((f for d in (start, *start.parents) if _is_file(f := d / FILE)), None)


def _is_file(path: Path) -> bool:
    """A file that can be seen: folders above may be closed to this user, and a name may be none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_file(
    path: Path, backends: Iterable[str], operator: Callable[[str], bool] = OPERATORS.__contains__
) -> Settings:
    """The layer in a rlkernel.toml."""
    try:
        values = read_toml(path, {str: object}, "Mend it, or remove it.")
    except FileError as error:
        raise ConfigError(str(error)) from error
    odd = set(values) - set(_File.model_fields)
    if odd:
        raise ConfigError(f"{path}: unknown table {short(min(odd))}{did_you_mean(min(odd)[:100], _File.model_fields)}")
    table = values.get("rlkernel", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: rlkernel must be a table: write [rlkernel]")
    return validated(table, str(path), backends, path.parent, operator)


def read_environment(environ: Mapping[str, str], backends: Iterable[str]) -> dict[str, Settings]:
    """Variable -> the layer it stands for."""
    backends = tuple(backends)
    own = tuple(f"RLKERNEL_{b.upper().replace('-', '_')}_" for b in backends)
    for name in environ:
        if name.startswith("RLKERNEL_") and name not in ENVIRONMENT and not name.startswith(own):
            raise ConfigError(f"{name[:100]}: {UnknownNameError('environment variable', name, ENVIRONMENT)}")
    layers = {}
    if order := variable("RLKERNEL_ORDER", environ):
        names = [n.strip() for n in order.split(",") if n.strip()]
        layers["RLKERNEL_ORDER"] = validated({"order": names}, "RLKERNEL_ORDER", backends)
    if fallback := variable("RLKERNEL_FALLBACK", environ):
        layers["RLKERNEL_FALLBACK"] = validated({"fallback": fallback}, "RLKERNEL_FALLBACK", backends)
    return layers


def ambient(
    backends: Iterable[str],
    environ: Mapping[str, str] | None = None,
    operator: Callable[[str], bool] = OPERATORS.__contains__,
) -> list[tuple[str, Settings]]:
    """The layers below use() and configure(), highest first: environment, then file, each with its name."""
    environ = os.environ if environ is None else environ
    backends = tuple(backends)
    layers = list(read_environment(environ, backends).items())
    try:
        here = Path.cwd()
    except FileNotFoundError:
        here = _HERE  # the working folder has been deleted, and what was in it
    path = find_file(environ, here)
    if path is not None:
        layers.append((str(path), read_file(path, backends, operator)))
    lock = here / LOCK_FILE
    if _is_file(lock):
        layers.append((str(lock), Settings(lock=str(lock))))
    return layers


def merge(layers: Iterable[tuple[str, Settings]]) -> Policy:
    """One policy from layers, highest first; every value keeps the name of the layer it came from."""
    stack = list(layers)
    source: dict[str, str] = {}

    def pick(key: str, default: Any, op: str = "") -> Any:
        for name, layer in stack:
            own = getattr(layer.ops[op], key) if op in layer.ops else None
            value = own if own is not None else getattr(layer, key)
            if value is not None:
                source[f"ops.{op}.{key}" if op else key] = name
                return value
        source[f"ops.{op}.{key}" if op else key] = "default"
        return default

    def op_policy(op: str = "") -> OpPolicy:
        need = frozenset(pick("need", (), op))
        order, fallback = pick("order", (AUTO,), op), pick("fallback", "warn", op)
        profile, audit, room = pick("profile", False, op), pick("audit", 0, op), pick("max_workspace_bytes", None, op)
        return OpPolicy(order, fallback, need and need & _features(op), profile, audit, room)

    ops = {op: op_policy(op) for op in dict.fromkeys(op for _, layer in stack for op in layer.ops)}
    probe, lock, reports = pick("probe", "subprocess"), pick("lock", None), pick("reports", None)
    return Policy(op_policy(), ops, probe, lock, reports, source)
