"""Backends whose source cannot be used: it does not parse, does not import, or needs what is not here."""

from __future__ import annotations

from typing import Any

from rlkernel_conformance.hostile import hostile
from rlkernel_core.spec.logprob import LogprobCall


@hostile("import_error", target="rlkernel_conformance.hostile.unimportable:logprob")
def fails_at_import(call: LogprobCall) -> Any:
    """Raises while its module is imported."""


@hostile("syntax_error", target="rlkernel_conformance.hostile.unparsable:logprob")
def has_a_syntax_error(call: LogprobCall) -> Any:
    """Cannot be parsed."""


@hostile("import_error")
def needs_what_is_not_here(call: LogprobCall) -> Any:
    """Imports a missing package when it is called."""
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


@hostile("protocol_error", target="rlkernel_conformance.hostile.leaving:logprob")
def leaves_at_import(call: LogprobCall) -> Any:
    """Ends the process while its module is imported."""
