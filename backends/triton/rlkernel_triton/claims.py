"""What the kernels of each operator claim: one row an operator, from which both manifests are made.

Imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

FLOATS: Final = ("bfloat16", "float16", "float32")
REALS: Final = (*FLOATS, "bool", "int16", "int32", "int64", "int8", "uint8")


@dataclass(frozen=True)
class Claim:
    """One implementation of one operator."""

    target: str  # "package.module:function"
    dtypes: tuple[str, ...] = FLOATS  # of the primary tensor; empty for any
    without: frozenset[str] = frozenset()  # features of the spec that are not claimed
    check: str | None = None  # asked at every call, see rlkernel_core.manifest.Impl
    kernels: bool = True  # False: torch's work on a GPU, with no kernel that an interpreter could run


CLAIMS: Final[Mapping[str, Claim]] = {
    "logprob": Claim("rlkernel_triton.logprob:logprob"),
    "linear_logprob": Claim("rlkernel_triton.linear_logprob:linear_logprob"),
    "sample": Claim("rlkernel_triton.sampling.call:sample"),
    "capture": Claim("rlkernel_triton.graphs.capture:capture", dtypes=(), kernels=False),
    "advantage": Claim("rlkernel_triton.advantage:advantage", REALS, check="rlkernel_triton.advantage:fits"),
    "affine_suffix_scan": Claim(
        "rlkernel_triton.suffix_scan:affine_suffix_scan", check="rlkernel_triton.suffix_scan:fits"
    ),
    "linear_policy_loss": Claim(
        "rlkernel_triton.linear_policy_loss:linear_policy_loss", without=frozenset({"group", "mixed_dtypes", "support"})
    ),
    "policy_loss": Claim("rlkernel_triton.policy_loss:policy_loss", check="rlkernel_triton.policy_loss:fits"),
    "whiten": Claim("rlkernel_triton.whitening:whiten", REALS, check="rlkernel_triton.whitening:fits"),
}


def manifest(name: str, device: str, arch: tuple[str, ...] = (), arch_excluded: tuple[str, ...] = ()) -> Backend:
    """A backend that offers every claim on one kind of device."""

    def impl(op: str, claim: Claim) -> Impl:
        spec: Any = OPERATORS[op]
        return Impl(
            op=spec.id,
            target=claim.target,
            requires=Requires(device=device, dtypes=claim.dtypes, arch=arch, arch_excluded=arch_excluded),
            supports=spec.feature_names - claim.without,
            check=claim.check,
        )

    offered = {op: claim for op, claim in CLAIMS.items() if claim.kernels or device != "cpu"}
    return Backend(name=name, api=API_VERSION, impls=tuple(impl(op, claim) for op, claim in offered.items()))
