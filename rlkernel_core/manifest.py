"""What a plugin claims: one frozen `Backend` whose implementations are strings.

Nothing a manifest names is imported until it is chosen; a manifest prints as JSON, and the conformance suite reads
the same object to know what to attack. This is the only module of the core that uses pydantic.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rlkernel_core.errors import ApiMismatchError
from rlkernel_core.hardware import architecture

# (major, minor) of this plugin API. A plugin works when its major is ours and its minor is not above ours.
API_VERSION: Final[tuple[int, int]] = (2, 0)

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"(?!auto$)[a-z][a-z0-9_-]*")  # "auto" is a word of `order`
_OP = re.compile(r"[a-z][a-z0-9_]*@[1-9][0-9]*")
_DEVICE = re.compile(r"\*|[a-z][a-z0-9_]*")
_DTYPE = re.compile(r"[a-z][a-z0-9_]*")
_ARCH = re.compile(r"[a-z]+[0-9]+\+|[a-z*?][a-z0-9_*?]*")
_SUMS = re.compile(r"[a-z0-9][a-z0-9._+-]*(/[a-z0-9][a-z0-9._+-]*)*")


def _match(pattern: re.Pattern[str], example: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{value!r} should look like {example!r}")
        return value

    return AfterValidator(check)


def _spelled(value: object) -> object:
    """An architecture in the one spelling that calls have: "sm90" for sm_90 and SM90."""
    return architecture(value) if isinstance(value, str) else value


Target = Annotated[str, _match(_TARGET, "package.module:function")]
Name = Annotated[str, _match(_NAME, "acme")]
OpId = Annotated[str, _match(_OP, "logprob@1")]
Device = Annotated[str, _match(_DEVICE, "cuda")]
Dtype = Annotated[str, _match(_DTYPE, "bfloat16")]
Sums = Annotated[str, _match(_SUMS, "mma16/c8/f32")]
Arch = Annotated[str, BeforeValidator(_spelled), _match(_ARCH, "sm90', 'sm80+' or 'gfx9*")]


class _Claim(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Requires(_Claim):
    """What must be true of the machine and the call before an implementation may be chosen."""

    device: Annotated[tuple[Device, ...], Field(min_length=1)] | Device = Field(
        description="torch device types it runs on, e.g. 'cuda'; '*' for any"
    )
    dtypes: tuple[Dtype, ...] = Field(
        default=(), description="dtypes of the primary tensor, e.g. 'bfloat16'; empty for any"
    )
    arch: tuple[Arch, ...] = Field(
        default=(), description="architectures, e.g. 'sm90', 'gfx942', 'sm80+'; empty for any"
    )
    arch_excluded: tuple[Arch, ...] = Field(
        default=(), description="architectures it must not run on although `arch` admits them"
    )
    packages: tuple[str, ...] = Field(
        default=(), description="requirements such as 'flashinfer-python>=0.7': a name and versions, no marker or URL"
    )


class Limits(_Claim):
    """The largest calls that an implementation takes, as data: `rlkernel explain` prints them."""

    max_rows: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="most rows (tokens) of a call; the operator's spec says what counts as one"
    )
    max_vocab: Annotated[int, Field(ge=1)] | None = Field(default=None, description="largest vocabulary of a call")
    layouts: tuple[Literal["contiguous", "contiguous_last_dim"], ...] = Field(
        default=(), description="layouts of the primary tensor that it reads; empty for any strides"
    )


class Impl(_Claim):
    """One implementation of one operator."""

    op: OpId = Field(description="operator and version of its meaning, e.g. 'logprob@1'")
    target: Target = Field(description="'package.module:function' of the operator's call record; imported when chosen")
    requires: Requires = Field(description="devices, dtypes, architectures and packages it is for")
    supports: frozenset[str] = Field(default=frozenset(), description="feature names from the operator's spec")
    prepared: bool = Field(
        default=False,
        description="whether the target takes the first call of a shape (sizes, dtypes, strides, flags) and returns "
        "the function that runs calls of that shape, instead of running them itself",
    )
    limits: Limits | None = Field(
        default=None, description="the largest sizes it takes; checked before `check` is asked"
    )
    sums: Sums | None = Field(
        default=None,
        description="name of the order in which it adds, e.g. 'mma16/c8/f32'; two implementations of one operator that "
        "name the same order promise the same bits on one architecture; left out, it promises none",
    )
    workspace: Target | None = Field(
        default=None,
        description="'package.module:function' of the call's record, asked once a shape; returns the most bytes that "
        "the call needs on its device beyond its results, backward included",
    )
    gradient: Target | None = Field(
        default=None,
        description="'package.module:Class' of a rlkernel_core.gradients.Pair: forward and backward of calls that want "
        "gradients, which then never go to the target; without it the target records its own gradients",
    )
    check: Target | None = Field(
        default=None,
        description="'package.module:function' of the call's record, asked once a shape; "
        "returns None or a Reason of stage 'shape'",
    )


class Operator(_Claim):
    """An operator of a plugin's own: what it means, and what attacks its clauses."""

    spec: Target = Field(
        description="'package.module:SPEC', an OpSpec; its name begins with the backend's: 'acme_swish' of acme"
    )
    attacks: Annotated[str, _match(_MODULE, "acme_rl.attacks")] | None = Field(
        default=None, description="module with the attacks on its clauses, which `rlkernel conformance run` imports"
    )


class Backend(_Claim):
    """A plugin's manifest: who it is and what it claims."""

    name: Name = Field(description="the entry point's name, used in `order`")
    api: tuple[int, int] = Field(description="the plugin API it was written for, as numbers: (2, 0)")
    impls: tuple[Impl, ...] = Field(description="its implementations, in its own order of preference")
    operators: tuple[Operator, ...] = Field(default=(), description="operators that it brings, beside rlkernel's")
    self_test: Target | None = Field(
        default=None,
        description="'package.module:function' taking a device string; runs one small kernel and raises if it is wrong",
    )
    url: str = Field(default="", description="where users report problems")

    @model_validator(mode="before")
    @classmethod
    def _api_window(cls, claims: Any) -> Any:
        # Before anything else: a manifest for another API may hold fields that this version cannot judge.
        api = claims.get("api") if isinstance(claims, dict) else None
        if isinstance(api, tuple | list) and len(api) == 2 and all(isinstance(n, int) for n in api):
            major, minor = api
            if major != API_VERSION[0] or minor > API_VERSION[1]:
                raise ApiMismatchError((major, minor), API_VERSION)
        return claims

    def of(self, op: str) -> tuple[Impl, ...]:
        """Implementations of an operator id, `op`, in the manifest's order of preference."""
        return tuple(i for i in self.impls if i.op == op)
