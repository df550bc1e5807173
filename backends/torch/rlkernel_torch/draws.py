"""A draw per row, and the values that a result holds where no token could be drawn.

Legend: N rows. Imports no operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_common.requests import Edited, Requests
from rlkernel_core.spec.sampling import SampleResult, Status
from rlkernel_torch.truncation import FilteredSoftmax


@dataclass(frozen=True)
class Draw:
    """Tokens with what is known about them; every tensor is [N]."""

    token: Tensor  # int64, in [0, V); meaningless where none was drawn
    logprob: Tensor  # float64
    log_kept_mass: Tensor  # float64
    count: Tensor  # int64
    threshold: Tensor  # in the type of the results
    threshold_id: Tensor  # int64
    posinf: Tensor  # bool
    nan: Tensor  # bool
    bad: Tensor  # bool: a parameter has no meaning
    padding: Tensor  # bool: the row stands for nothing

    @property
    def none(self) -> Tensor:
        """[N] bool: rows from which no token can be drawn."""
        return (self.count == 0) | self.bad

    def rows(self, value: Tensor, without: float, on_padding: float = 0) -> Tensor:
        """[N] values with the stated ones where there is no token; floats in the type of the results."""
        value = torch.where(self.padding, on_padding, torch.where(self.none, without, value))
        return value.to(self.threshold.dtype) if value.is_floating_point() else value

    def result(self, invalid_token: int, kept_capacity: int = 0) -> SampleResult:
        """What is always returned."""
        status = self.nan * Status.NAN.value + (self.posinf & ~self.bad) * Status.POSINF.value
        status = status + torch.where(self.bad, Status.PARAM.value, (self.count == 0) * Status.EMPTY.value)
        if kept_capacity:
            status = status + ((self.count > kept_capacity) & ~self.none) * Status.KEPT_OVERFLOW.value
        return SampleResult(
            token=torch.where(self.none | self.padding, invalid_token, self.token),
            logprob=self.rows(self.logprob, -torch.inf),
            log_kept_mass=self.rows(self.log_kept_mass, -torch.inf),
            kept_count=self.rows(self.count, 0).to(torch.int32),
            status=torch.where(self.padding, 0, status).to(torch.int32),
            threshold=self.rows(self.threshold, torch.inf),
            threshold_id=self.rows(self.threshold_id, -1, -1),
        )


def drawn_from(law: FilteredSoftmax, edited: Edited, requests: Requests, token: Tensor) -> Draw:
    """The draw of given tokens from a law."""
    bad = requests.bad | edited.bad
    return Draw(
        token=token,
        logprob=law.logprob(token),
        log_kept_mass=law.log_kept_mass,
        count=law.count,
        threshold=law.threshold,
        threshold_id=law.threshold_id,
        posinf=law.weights.posinf,
        nan=edited.nan,
        bad=bad,
        padding=torch.zeros_like(bad) if requests.padding is None else requests.padding,
    )
