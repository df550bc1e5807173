"""Small implementations and manifests that dispatch tests register in this process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from rlkernel_core.gradients import Saved
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.quant.tensor import CANONICAL
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_torch.direct import qmatmul
from rlkernel_torch.logprob import LogprobPair
from rlkernel_torch.logprob import logprob as reference_logprob

HERE = "tests.implementations"


def ones(call: LogprobCall) -> LogprobResult:
    """Answers 1 everywhere, so that a test sees who answered."""
    one = torch.ones(call.ids.shape)
    return LogprobResult(one, one, invalid=torch.zeros(call.ids.shape, dtype=torch.bool))


def first_column(call: LogprobCall) -> LogprobResult:
    """Answers with views of its argument."""
    return LogprobResult(
        call.logits[..., 0], call.logits[..., 0], invalid=torch.zeros(call.ids.shape, dtype=torch.bool)
    )


def raises(call: LogprobCall) -> LogprobResult:
    """A kernel that fails."""
    raise RuntimeError("the kernel failed")


def forgetful(logits: Any, ids: Any, **kwargs: Any) -> LogprobResult:
    """Takes the operator's arguments, and no record of them."""
    return LogprobResult(ids, ids)


def even_rows(call: LogprobCall) -> Reason | None:
    """A check that refuses an odd number of rows."""
    rows = call.logits.shape[0]
    return Reason("shape", "unsupported", f"{rows} rows is odd", "pad the batch") if rows % 2 else None


def check_raises(call: LogprobCall) -> Reason | None:
    """A check that fails."""
    raise ZeroDivisionError("in the check")


def tiled_product(call: QmatmulCall) -> Any:
    """qmatmul of weights in a layout of its own, which no reference reads: codes with one more dimension."""
    w = call.w
    if w.layout != "acme_tiles":
        raise ValueError(w.layout)
    codes = replace(w, parts={**w.parts, "codes": w.parts["codes"][0]}, layout=CANONICAL)
    return qmatmul(call.x, codes, activation=call.activation)


def check_lies(call: LogprobCall) -> Any:
    """A check that answers a bool, which says nothing about why."""
    return False


def acme(
    target: str = "ones",
    *,
    name: str = "acme",
    supports: frozenset[str] = frozenset({"grad"}),
    check: str | None = None,
    self_test: str | None = None,
    dtypes: tuple[str, ...] = (),
    device: str = "cpu",
    gradient: str | None = None,
) -> Backend:
    """A backend with one logprob implementation."""
    impl = Impl(
        op="logprob@1",
        target=f"{HERE}:{target}",
        requires=Requires(device=device, dtypes=dtypes),
        supports=supports,
        check=f"{HERE}:{check}" if check else None,
        gradient=f"{HERE}:{gradient}" if gradient else None,
    )
    return Backend(
        name=name, api=API_VERSION, impls=(impl,), self_test=f"tests.self_tests:{self_test}" if self_test else None
    )


def few_rows(call: LogprobCall) -> Reason | None:
    """A check that refuses more than 4 rows."""
    rows = call.logits.shape[0]
    return Reason("shape", "unsupported", f"{rows} rows are many", "split the batch") if rows > 4 else None


COUNTED: Counter[str] = Counter()  # what `CountingPair` and `counting` have run


def counting(call: LogprobCall) -> LogprobResult:
    """plain torch, counted."""
    COUNTED["plain"] += 1
    return reference_logprob(call)


class CountingPair(LogprobPair):
    """The pair of plain torch, counted."""

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Saved]:
        """Once a step."""
        COUNTED["forward"] += 1
        return super().forward(call)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Once a step."""
        COUNTED["backward"] += 1
        return super().backward(saved, grads)


class ForgetfulPair(LogprobPair):
    """Saves less than it says."""

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Saved]:
        """The result and no more."""
        return super().forward(call)[0], (None,)
