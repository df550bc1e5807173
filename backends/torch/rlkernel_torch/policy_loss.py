"""policy_loss@1 in plain torch: the coefficient function, forward and backward.

The gradient is made with the value, analytically; backward only scales it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common.known_gradient import scaled
from rlkernel_common.loss_batch import prepare
from rlkernel_common.row_statistics import accumulator
from rlkernel_common.sequences import Packed, Sequences, layout
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec import policy_loss as spec
from rlkernel_core.spec.policy_loss import LossResult, PolicyLossCall
from rlkernel_torch.loss_coefficients import Coefficients, coefficients, summary


def full_mask(mask: Tensor | None, shape: tuple[int, ...], sequences: Sequences, device: torch.device) -> Tensor:
    """The mask with its default filled in, False at tokens of no sequence."""
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=device)
    return mask & sequences.inside if isinstance(sequences, Packed) else mask


def policy_loss(call: PolicyLossCall) -> LossResult:
    """See rlkernel_core.spec.policy_loss.PolicyLossCall."""
    return PolicyLossPair(call)(call) if gradient_wanted("policy_loss", call) else evaluated(call)[0]


class PolicyLossPair(Pair[PolicyLossCall, LossResult]):
    """The loss with its gradient by log-probability and by entropy."""

    op = "policy_loss"

    def __init__(self, call: PolicyLossCall) -> None:
        """Keep the dtypes of calls of this shape."""
        super().__init__(call)
        self._dtypes = [None if x is None else x.dtype for x in self.inputs(call)]

    def forward(self, call: PolicyLossCall) -> tuple[LossResult, Saved]:
        """The loss, and what its gradients are multiples of."""
        result, at = evaluated(call)
        known = (at.dlogprob, at.dentropy)
        return result, tuple([x if wanted else None for x, wanted in zip(known, self.wanted, strict=True)])

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Scale what forward made."""
        (g,) = grads
        found = zip(saved, self._dtypes, strict=True)
        return tuple([scaled(x, g, dtype) if x is not None and g is not None and dtype else None for x, dtype in found])

    @classmethod
    def saved_like(cls, call: PolicyLossCall, result: LossResult, wanted: tuple[bool, ...]) -> Saved:
        """One number a token for each gradient that is wanted."""
        of = zip(cls.inputs(call), wanted, strict=True)
        return tuple([result.loss.new_empty(x.shape) if x is not None and wants else None for x, wants in of])


def evaluated(call: PolicyLossCall) -> tuple[LossResult, Coefficients]:
    """The result, and the derivatives at this point."""
    logprob, old_logprob, entropy = call.logprob, call.old_logprob, call.entropy
    config = spec.configure(call)
    shape = tuple(logprob.shape)
    sequences = layout(shape, call.cu_seqlens)
    with torch.no_grad():
        batch = prepare(
            call,
            config,
            sequences,
            mask=full_mask(call.mask, shape, sequences, logprob.device),
            before=logprob if old_logprob is None else old_logprob,
            dtype=accumulator(logprob),
        )
        at = coefficients(logprob, entropy, batch, config, sequences)
        value, stats = summary(at, entropy, batch, config, sequences)
    return LossResult(value, stats), at
