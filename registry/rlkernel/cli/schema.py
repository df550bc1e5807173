"""`rlkernel schema`: the files' forms as JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.cli.output import print_json
from rlkernel_core.errors import UnknownNameError

EXAMPLES: Final = (
    ("rlkernel schema config", "the form of rlkernel.toml, for an editor or a check in CI"),
    ("rlkernel schema manifest", "what a plugin may claim"),
)
EXITS: Final = {0: "printed"}


def _config() -> dict[str, Any]:
    from rlkernel.config import schema

    return schema()


def _manifest() -> dict[str, Any]:
    from rlkernel_core.manifest import Backend

    return Backend.model_json_schema()


def _decision() -> dict[str, Any]:
    from pydantic import TypeAdapter

    from rlkernel_core.decision import Decision

    found = TypeAdapter(Decision).json_schema()
    found["properties"]["hash"] = {"description": "equal where the same kernel runs", "type": "string"}
    return found


_SCHEMAS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "config": _config,
    "manifest": _manifest,
    "decision": _decision,
}


def command(
    form: Annotated[
        str | None, typer.Argument(metavar="config|manifest|decision", help="Left out, all under their names.")
    ] = None,
    *,
    json: Json = False,  # noqa: ARG001 every command takes it; a schema is JSON anyway
) -> None:
    """JSON schema of what rlkernel reads and writes.

    config is rlkernel.toml, manifest is what a plugin exports, decision is
    what `rlkernel explain --json` and decisions.json hold.
    """
    if form is not None and form not in _SCHEMAS:
        raise UnknownNameError("form", form, _SCHEMAS)
    print_json(_SCHEMAS[form]() if form is not None else {name: make() for name, make in _SCHEMAS.items()})
