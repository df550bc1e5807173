"""Implementations that return a result made beforehand, so that what is measured is the way to them.

The one place of the benchmarks that knows what an implementation looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

import rlkernel as rlk
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.sampling import SampleResult

STUB: Final = "stub"  # the backend, which looks at the shape of a call before it takes it

_ROWS = torch.zeros(4)
RESULTS: Final[dict[str, Any]] = {  # operator -> what its stub returns
    "logprob": LogprobResult(_ROWS, _ROWS, invalid=_ROWS.bool()),
    "sample": SampleResult(*([_ROWS] * 7)),
    "qmatmul": _ROWS,
}


def kernel(op: str) -> Callable[..., Any]:
    """A function with an operator's parameters and defaults, since that is what a direct call costs."""
    signature = OPERATORS[op].signature
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    head = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    scope: dict[str, Any] = {"result": RESULTS[op]}
    exec(f"def {op}{head}:\n    return result", scope)  # noqa: S102 the source is the spec's own
    made: Callable[..., Any] = scope[op]
    return made


KERNELS: Final[dict[str, Callable[..., Any]]] = {op: kernel(op) for op in RESULTS}


def logprob(_: Any) -> Any:
    """The implementation of logprob that the manifests name."""
    return RESULTS["logprob"]


def sample(_: Any) -> Any:
    """The implementation of sample that the manifests name."""
    return RESULTS["sample"]


def qmatmul(_: Any) -> Any:
    """The implementation of qmatmul that the manifests name."""
    return RESULTS["qmatmul"]


def rows_fit(_: Any) -> None:
    """A check that accepts every shape."""


@contextmanager
def stubbed() -> Iterator[None]:
    """The stubs are a backend of this process for this time."""
    impls = tuple(
        Impl(
            op=OPERATORS[op].id,
            target=f"{__name__}:{op}",
            requires=Requires(device="*"),
            supports=OPERATORS[op].feature_names,
            check=f"{__name__}:rows_fit",
        )
        for op in KERNELS
    )
    with rlk.registered(Backend(name=STUB, api=API_VERSION, impls=impls)):
        yield
