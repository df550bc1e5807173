"""Kernels that cost nothing: they return a result made beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.sampling import SampleResult

_ROWS = torch.zeros(4)
_RESULTS = {
    "logprob": LogprobResult(_ROWS, _ROWS, invalid=_ROWS.bool()),
    "sample": SampleResult(*([_ROWS] * 7)),
}


def _with_the_signature_of(op: str) -> Callable[..., Any]:
    """A function with an operator's parameters and defaults, since that is what calling costs."""
    signature = inspect.signature(OPERATORS[op].signature)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    head = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    scope: dict[str, Any] = {"result": _RESULTS[op]}
    exec(f"def {op}{head}:\n    return result", scope)  # noqa: S102 the source is the spec's own
    made: Callable[..., Any] = scope[op]
    return made


logprob = _with_the_signature_of("logprob")
sample = _with_the_signature_of("sample")
