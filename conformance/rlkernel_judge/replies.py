"""What a host may answer, by request: read strictly, for the candidate's process can say anything.

Numbers must be finite: a NaN would pass every comparison.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Names = Annotated[list[str], Field(max_length=10_000)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int


class _Ready(_Answer):
    facts: dict[str, bool]
    complaint: str | None


class _Conduct(BaseModel):
    model_config = ConfigDict(extra="forbid")

    generator: bool
    modes: bool
    aliases: bool
    stray_s: Seconds


class _Call(_Answer):
    result: Any
    results: Annotated[int, Field(ge=0)]
    written: list[Annotated[int, Field(ge=0)]]
    conduct: _Conduct
    same: str | None
    call: bool


class _Result(_Answer):
    result: Any


class _Burst(_Answer):
    seconds: list[Seconds]


class _Look(_Answer):
    touched: Names
    imported: Names


ANSWERS: Final[dict[str, type[_Answer]]] = {
    "ready": _Ready,
    "load": _Answer,
    "call": _Call,
    "backward": _Result,
    "fetch": _Result,
    "burst": _Burst,
    "look": _Look,
    "keep": _Answer,
    "draw": _Answer,
    "ping": _Answer,
}


def read(request: str, said: Any) -> dict[str, Any]:
    """An answer to a request, every field of the type it must have.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return ANSWERS[request].model_validate(said, strict=True).model_dump()
