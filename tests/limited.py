"""Implementations with limits, for tests: functions of a record, and what tells their memory."""

from __future__ import annotations

from typing import Any

from rlkernel_core.errors import ArgumentError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Limits, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_torch.logprob import logprob as _logprob

HERE = "tests.limited"


def logprob(call: LogprobCall) -> LogprobResult:
    """The reference under another name."""
    return _logprob(call)


def four_bytes_a_logit(call: LogprobCall) -> int:
    """A copy of the logits in fp32."""
    return 4 * call.logits.numel()


def raises(call: LogprobCall) -> int:
    """Cannot tell."""
    raise ZeroDivisionError("in the workspace")


def text(call: LogprobCall) -> Any:
    """Tells no number."""
    return "much"


def refuses_an_argument(call: LogprobCall) -> int:
    """Refuses what the call itself refuses."""
    raise ArgumentError("top_logprobs", call.top_logprobs, "is too many", "Pass fewer.")


def backend(limits: Limits | None = None, workspace: str | None = None, name: str = "acme") -> Backend:
    """A backend with one logprob implementation."""
    spec = OPERATORS["logprob"]
    impl = Impl(
        op=spec.id,
        target=f"{HERE}:logprob",
        requires=Requires(device=("cpu", "cuda")),
        supports=spec.feature_names,
        limits=limits,
        workspace=f"{HERE}:{workspace}" if workspace else None,
    )
    return Backend(name=name, api=API_VERSION, impls=(impl,))
