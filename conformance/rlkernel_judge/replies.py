"""What a worker may reply, by request: read strictly, for the candidate's process can send anything.

Numbers must be finite: a NaN would pass every comparison.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Names = Annotated[list[str], Field(max_length=10_000)]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int


class _Ready(_Reply):
    facts: dict[str, bool]
    complaint: str | None


class _Conduct(BaseModel):
    model_config = ConfigDict(extra="forbid")

    generator: bool
    modes: bool
    aliases: bool
    stray_s: Seconds


class _Call(_Reply):
    result: Any
    results: Annotated[int, Field(ge=0)]
    written: list[Annotated[int, Field(ge=0)]]
    conduct: _Conduct
    same: str | None
    call: bool


class _Result(_Reply):
    result: Any


class _Burst(_Reply):
    seconds: list[Seconds]


class _Timed(_Reply):
    result: Any
    at: list[Annotated[int, Field(ge=0)]]  # bytes in the shared memory
    call: bool


class _Look(_Reply):
    touched: Names
    borrowed: Names


REPLIES: Final[dict[str, type[_Reply]]] = {
    "ready": _Ready,
    "load": _Reply,
    "call": _Call,
    "backward": _Result,
    "fetch": _Result,
    "burst": _Burst,
    "attach": _Reply,
    "timed": _Timed,
    "look": _Look,
    "keep": _Reply,
    "draw": _Reply,
    "ping": _Reply,
}


def read(request: str, reply: Any) -> dict[str, Any]:
    """A reply to a request, every field of the type it must have.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return REPLIES[request].model_validate(reply, strict=True).model_dump()
