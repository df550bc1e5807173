"""Implementations for tests of audits: right ones, and ones with a planted bug. All are functions of a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_core.spec.sampling import SampleResult
from rlkernel_torch.logprob import logprob as _logprob
from rlkernel_torch.quantize import quantize as _quantize
from rlkernel_torch.sample import sample as _sample

HERE = "tests.audited"


def right(call: Any) -> Any:
    """The reference under another name."""
    return _logprob(call)


def off(call: LogprobCall) -> LogprobResult:
    """Log-probabilities off by 1e-2."""
    found = _logprob(call)
    return replace(found, logprob=found.logprob + 1e-2)


def off_within_tolerance(call: LogprobCall) -> LogprobResult:
    """Log-probabilities off by 1.5e-5, where either side may be off by 1e-5."""
    found = _logprob(call)
    return replace(found, logprob=found.logprob + 1.5e-5)


def nan_in_one_row(call: LogprobCall) -> LogprobResult:
    """NaN where there is none."""
    found = _logprob(call)
    row = torch.arange(len(found.logprob)) == 1
    return replace(found, logprob=found.logprob.masked_fill(row, torch.nan))


def doubles(call: LogprobCall) -> LogprobResult:
    """The right values in another dtype."""
    found = _logprob(call)
    return replace(found, logprob=found.logprob.double())


def prepared_off(call: LogprobCall) -> Callable[[LogprobCall], LogprobResult]:
    """The planted bug, prepared once a shape."""
    del call
    return off


def sample_right(call: Any) -> SampleResult:
    """The reference under another name."""
    return _sample(call)


def sample_ignores_seed(call: Any) -> SampleResult:
    """Draws with another seed."""
    return _sample(type(call)(**{**call.as_dict(), "seed": call.seed + 1000}))


def sample_one_tie(call: Any) -> SampleResult:
    """The reference, but for the token of one row and what a filter's border says."""
    found = _sample(call)
    token = found.token.clone()
    token[0] = (token[0] + 1) % call.logits.shape[1]
    return replace(found, token=token, kept_count=found.kept_count + 1)


def quantize_right(call: Any) -> Any:
    """The reference under another name."""
    return _quantize(call)


def quantize_one_code(call: Any) -> Any:
    """One code flipped."""
    found = _quantize(call)
    codes = found.parts["codes"].clone()
    codes.view(-1)[0] ^= 1
    return replace(found, parts={**found.parts, "codes": codes})


def backend(target: str, op: str = "logprob", *, prepared: bool = False) -> Backend:
    """A backend `acme` with one implementation of an operator, which claims all that there is."""
    spec = OPERATORS[op]
    impl = Impl(
        op=spec.id,
        target=f"{HERE}:{target}",
        requires=Requires(device="cpu"),
        supports=spec.feature_names,
        prepared=prepared,
    )
    return Backend(name="acme", api=API_VERSION, impls=(impl,))
