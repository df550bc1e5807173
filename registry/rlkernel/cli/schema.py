"""`rlkernel schema`: the files' forms as JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from rlkernel.cli.options import Json
from rlkernel.cli.output import print_json

EXAMPLES: Final = (
    ("rlkernel schema config", "the form of rlkernel.toml, for an editor or a check in CI"),
    ("rlkernel schema manifest", "what a plugin may claim"),
)
EXITS: Final = {0: "printed"}


class Form(StrEnum):
    """What there is a schema of."""

    config = "config"
    manifest = "manifest"
    decision = "decision"


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


_SCHEMAS: Final[Mapping[Form, Callable[[], dict[str, Any]]]] = {
    Form.config: _config,
    Form.manifest: _manifest,
    Form.decision: _decision,
}


def command(
    form: Annotated[
        Form | None, typer.Argument(metavar="config|manifest|decision", help="Left out, all under their names.")
    ] = None,
    *,
    json: Json = False,  # noqa: ARG001 every command takes it; a schema is JSON anyway
) -> None:
    """JSON schema of what rlkernel reads and writes.

    config is rlkernel.toml, manifest is what a plugin exports, decision is
    what `rlkernel explain --json` and decisions.json hold.
    """
    print_json(_SCHEMAS[form]() if form else {f.value: make() for f, make in _SCHEMAS.items()})
